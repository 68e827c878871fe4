"""Losses of the paper's Table 2 and their gradients, compared with loops, on one and two replicas."""

import math

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal
from scipy import special, stats

import objective
import simclr
from config import Config, parse_settings

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


def loop_loss(config, first, second):
    """Computes the loss that `config` selects with a loop over positive pairs and their negatives."""
    total, images = 0.0, len(first)
    for anchors, others in ((first, second), (second, first)):
        candidates = [others, anchors] if config.negatives == "both" else [others]
        for i in range(images):
            positive = anchors[i] @ others[i]
            negatives = [anchors[i] @ v for views in candidates for v in np.delete(views, i, 0)]
            if config.semi_hard:
                negatives = sorted(s for s in negatives if positive - MARGIN < s < positive)[-1:]
            if config.contrastive_loss == "nt_xent":
                exponentials = np.exp(np.array([positive, *negatives]) / TEMPERATURE)
                total -= math.log(exponentials[0] / sum(exponentials))
            elif config.contrastive_loss == "nt_logistic":
                terms = [-math.log(special.expit(-s / TEMPERATURE)) for s in negatives]
                total += -math.log(special.expit(positive / TEMPERATURE)) + sum(terms) / max(
                    len(terms), 1
                )
            else:
                terms = [max(s - positive + MARGIN, 0) for s in negatives]
                total += sum(terms) / max(len(terms), 1)
    return total / images


@pytest.mark.parametrize("hidden_norm", [True, False])
@pytest.mark.parametrize("images", [2, 9])
@pytest.mark.parametrize("config", CONFIGS)
def test_losses_match_loop_implementation(config, images, hidden_norm):
    first, second = unit_views(images)
    z = tf.constant(np.concatenate([first, 2 * second]))
    second = second if hidden_norm else 2 * second
    config = config.replace(hidden_norm=hidden_norm)
    with tf.GradientTape() as tape:
        tape.watch(z)
        terms, reported = simclr.over_batch(z, z, tf.zeros(images), config)
    assert_allclose(terms["contrast_loss"], loop_loss(config, first, second), rtol=1e-12)
    logits = first @ second.T / TEMPERATURE
    assert reported["contrast_acc"] == np.mean(logits.argmax(1) == np.arange(images))
    entropies = stats.entropy(special.softmax(logits, 1), axis=1)
    # The definition of the entropy adds 1e-8 to each probability.
    assert_allclose(reported["contrast_entropy"], np.mean(entropies), atol=1e-6)
    # The derivative in a random direction is compared with finite differences of the loops.
    direction = np.random.default_rng(0).standard_normal(z.shape)

    def loss_at(distance):
        moved = z + distance * direction
        norms = np.linalg.norm(moved, axis=1, keepdims=True) if hidden_norm else 1
        return loop_loss(config, *np.split(moved / norms, 2))

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    gradient = tape.gradient(terms["contrast_loss"], z)
    assert_allclose(np.sum(gradient * direction), slope, rtol=1e-6, atol=1e-8)


def test_hardest_negative_within_the_margin_is_selected():
    others = [
        [0.5, 0.49, 0.2, 0.6],  # The second is the hardest negative within the margin of 0.45.
        [0.9, 0.5, 0.1, -1.0],  # Only the third negative is within the margin.
        [0.9, 0.05, -0.1, 0.04],  # No negative is within the margin.
        [0.3, 0.3, 0.4, 0.1],  # The third vector is not a negative. The first two are tied.
    ]
    negatives = np.ones([4, 4], bool)
    negatives[3, 2] = False
    selected = objective.semi_hard_negatives(
        tf.fill([4], 0.5), tf.constant(others), tf.constant(negatives), 0.45
    )
    assert_array_equal(np.argwhere(selected), [[0, 1], [1, 2], [3, 0]])


# The losses of Table 2 communicate in the same way.
@pytest.mark.parametrize(
    "config", [*CONFIGS[:2], CONFIGS[5], CONFIGS[8], Config(loss_block_rows=4)]
)
def test_losses_metrics_and_gradients_are_the_same_on_one_and_two_replicas(config, two_replicas):
    views = np.stack(unit_views(6))
    # Each replica has three first views, followed by the three second views of the same images.
    shares = [tf.constant(np.concatenate(share)) for share in np.split(views, 2, 1)]
    local_z = two_replicas.experimental_distribute_values_from_function(
        lambda context: shares[context.replica_id_in_sync_group]
    )

    def step(z, strategy):
        with tf.GradientTape() as tape:
            tape.watch(z)
            terms, metrics = simclr.over_batch(z, z, z[: len(z) // 2, 0], config, strategy)
            loss_share = terms["contrast_loss"] / strategy.num_replicas_in_sync
        return tape.gradient(loss_share, z), {**terms, **metrics}

    expected_gradient, expected = step(
        tf.constant(np.concatenate(views)), tf.distribute.get_strategy()
    )
    assert 0 < expected["contrast_acc"] < 1
    results, scalars = two_replicas.run(step, args=(local_z, two_replicas))
    gradients = two_replicas.experimental_local_results(results)
    joined = np.concatenate([np.split(gradient, 2) for gradient in gradients], 1)
    assert_allclose(joined.reshape(12, 5), expected_gradient, rtol=1e-10, atol=1e-14)
    for name, value in scalars.items():
        mean = two_replicas.reduce("MEAN", value, axis=None)
        bound = 1e-12 if name == "contrast_loss" else 1e-6
        assert_allclose(mean, expected[name], rtol=bound)


def test_margin_defaults_to_0_8_but_is_unset_for_losses_without_a_margin():
    for flags, margin in (
        ("", None),
        ("--contrastive_loss=margin_triplet", 0.8),
        ("--contrastive_loss=margin_triplet --margin=0", 0),
        ("--contrastive_loss=nt_logistic --semi_hard --margin=0.4", 0.4),
    ):
        assert Config(**parse_settings(flags)).effective_margin == margin
