"""Losses of the paper's Table 2, compared with loops and with the gradients in the table, on one and two replicas."""

import math

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import objective
import simclr
from config import Config

TEMPERATURE, MARGIN = 0.4, 0.6
CONFIGS = [
    Config(
        contrastive_loss=name,
        semi_hard=semi_hard,
        negatives=negatives,
        margin=MARGIN if semi_hard or name == "margin_triplet" else None,
        temperature=TEMPERATURE,
    )
    for name, semi_hard in (
        ("nt_xent", False),
        ("nt_logistic", False),
        ("nt_logistic", True),
        ("margin_triplet", False),
        ("margin_triplet", True),
    )
    for negatives in ("cross_view", "both")
]


def unit_views(images, width=5):
    """Returns unit vectors [images, width] of two views. For some vectors, the positive is not the most similar one."""
    random = np.random.default_rng(images)
    first = random.standard_normal((images, width))
    views = first, first + random.standard_normal((images, width))
    return [view / np.linalg.norm(view, axis=1, keepdims=True) for view in views]


def sigma(x):
    return 1 / (1 + math.exp(-x))


def loop_loss(config, first, second):
    """Computes the loss that `config` selects with a loop over positive pairs and their negatives."""
    total, images = 0.0, len(first)
    for anchors, others in ((first, second), (second, first)):
        for i in range(images):
            positive = float(anchors[i] @ others[i])
            negatives = [float(anchors[i] @ others[j]) for j in range(images) if j != i]
            if config.negatives == "both":
                negatives += [float(anchors[i] @ anchors[j]) for j in range(images) if j != i]
            if config.semi_hard:
                candidates = [s for s in negatives if positive - MARGIN < s < positive]
                negatives = [max(candidates)] if candidates else []
            if config.contrastive_loss == "nt_xent":
                partition = sum(math.exp(s / TEMPERATURE) for s in [positive, *negatives])
                total += -math.log(math.exp(positive / TEMPERATURE) / partition)
            elif config.contrastive_loss == "nt_logistic":
                terms = [-math.log(sigma(-s / TEMPERATURE)) for s in negatives]
                total += -math.log(sigma(positive / TEMPERATURE)) + sum(terms) / max(len(terms), 1)
            else:
                terms = [max(s - positive + MARGIN, 0) for s in negatives]
                total += sum(terms) / max(len(terms), 1)
    return total / images


@pytest.mark.parametrize("hidden_norm", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_losses_match_loop_implementation(config, hidden_norm):
    for images in (2, 9):
        first, second = unit_views(images)
        z = tf.constant(np.concatenate([first, 2 * second]))
        second = second if hidden_norm else 2 * second
        loss, logits_ab, labels = objective.add_alternative_contrastive_loss(
            z,
            config.contrastive_loss,
            hidden_norm,
            TEMPERATURE,
            MARGIN,
            config.semi_hard,
            config.negatives == "cross_view",
        )
        assert_allclose(logits_ab, first @ second.T / TEMPERATURE, rtol=1e-12)
        assert_array_equal(labels, np.eye(images))
        terms, reported = simclr.over_batch(z, z, None, config.replace(hidden_norm=hidden_norm))
        expected = loop_loss(config, first, second)
        assert_allclose([loss, terms["contrast_loss"]], [expected] * 2, rtol=1e-12)
        is_hit = np.argmax(logits_ab, 1) == np.arange(images)
        assert reported["contrast_acc"] == np.mean(is_hit)


def table_2_gradient(name, u, positive, negatives):
    """Returns the gradient of the negated loss with respect to u (last column of Table 2)."""
    if name == "nt_xent":
        weights = [math.exp(u @ v / TEMPERATURE) for v in (positive, *negatives)]
        partition = sum(weights)
        return (1 - weights[0] / partition) / TEMPERATURE * positive - sum(
            weight / partition / TEMPERATURE * v for weight, v in zip(weights[1:], negatives)
        )
    (negative,) = negatives
    if name == "nt_logistic":
        return (
            sigma(-u @ positive / TEMPERATURE) / TEMPERATURE * positive
            - sigma(u @ negative / TEMPERATURE) / TEMPERATURE * negative
        )
    return positive - negative if u @ positive - u @ negative < MARGIN else np.zeros_like(u)


@pytest.mark.parametrize("name, count", [("nt_xent", 4), ("nt_logistic", 1), ("margin_triplet", 1)])
def test_gradients_match_table_2(name, count):
    nonzero = set()
    for row in range(8):
        first, second = unit_views(9)
        u, positive = tf.constant(first[row]), second[row]
        negatives = np.roll(second, -row - 1, axis=0)[:count]
        with tf.GradientTape() as tape:
            tape.watch(u)
            similarities = tf.linalg.matvec(tf.constant(negatives), u)[tf.newaxis]
            loss = getattr(objective, name)(
                tf.tensordot(u, positive, 1)[tf.newaxis],
                similarities,
                tf.ones_like(similarities, tf.bool),
                MARGIN if name == "margin_triplet" else TEMPERATURE,
            )
        gradient = -tape.gradient(loss, u).numpy()
        assert_allclose(
            gradient, table_2_gradient(name, first[row], positive, negatives), atol=1e-12
        )
        nonzero.add(bool(gradient.any()))
    assert nonzero == ({True, False} if name == "margin_triplet" else {True})


def test_hardest_negative_within_the_margin_is_selected():
    positive = tf.constant([0.5, 0.5, 0.5, 0.5])
    # The second is the hardest negative within the margin.
    others = tf.constant(
        [
            [0.5, 0.49, 0.2, 0.6],
            # Only the third negative is within the margin of 0.45.
            [0.9, 0.5, 0.1, -1.0],
            [0.9, 0.05, -0.1, 0.04],  # No negative is within the margin.
            # The third vector is not a negative. The first two are tied.
            [0.3, 0.3, 0.4, 0.1],
        ]
    )
    negatives = tf.constant([[True] * 4] * 3 + [[True, True, False, True]])
    assert_array_equal(
        objective.semi_hard_negatives(positive, others, negatives, 0.45),
        [
            [False, True, False, False],
            [False, False, True, False],
            [False] * 4,
            [True, False, False, False],
        ],
    )


@pytest.mark.parametrize("config", [*CONFIGS, Config(loss_block_rows=4)])
def test_losses_metrics_and_gradients_are_the_same_on_one_and_two_replicas(config, two_replicas):
    views = np.stack(unit_views(6))
    # Each replica has three first views, followed by the three second views of the same images.
    local_z = two_replicas.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            np.concatenate(np.split(views, 2, 1)[context.replica_id_in_sync_group])
        )
    )

    def step(z, strategy):
        with tf.GradientTape() as tape:
            tape.watch(z)
            terms, metrics = simclr.over_batch(z, z, None, config, strategy)
            loss_share = terms["contrast_loss"] / strategy.num_replicas_in_sync
        return tape.gradient(loss_share, z), {**terms, **metrics}

    expected_gradient, expected = step(
        tf.constant(np.concatenate(views)), tf.distribute.get_strategy()
    )
    assert 0 < expected["contrast_acc"] < 1
    results, scalars = tf.function(lambda: two_replicas.run(step, args=(local_z, two_replicas)))()
    gradients = two_replicas.experimental_local_results(results)
    joined = np.concatenate([np.split(gradient, 2) for gradient in gradients], 1)
    assert_allclose(joined.reshape(12, 5), expected_gradient, rtol=1e-10, atol=1e-14)
    for name, value in scalars.items():
        mean = two_replicas.reduce("MEAN", value, axis=None)
        bound = 1e-12 if name == "contrast_loss" else 1e-6
        assert_allclose(mean, expected[name], rtol=bound)


def test_margin_defaults_to_0_8_but_is_unset_for_losses_without_a_margin():
    assert Config().effective_margin is None
    assert Config(contrastive_loss="margin_triplet").effective_margin == 0.8
    assert Config(contrastive_loss="margin_triplet", margin=0.0).effective_margin == 0
    assert (
        Config(contrastive_loss="nt_logistic", semi_hard=True, margin=0.4).effective_margin == 0.4
    )
