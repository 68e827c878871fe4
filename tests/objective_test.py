"""Tests of the losses against recorded values, a loop implementation of Algorithm 1, and equivalent formulas."""

import functools
import math
import unittest.mock

import numpy as np
import pytest
import scipy.spatial
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import metrics
import objective
import simclr
from config import Config
from large_batch import blocked_nt_xent
from runtime import replicas
from support import golden

ARRAYS = golden.load("nt_xent")


def algorithm_1(z, temperature):
    """Computes the loss of the paper's Algorithm 1. Rows 2k and 2k + 1 of z (zero-based) are a positive pair."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    exponentials = np.exp(z @ z.T / temperature)
    np.fill_diagonal(exponentials, 0)  # The sum is over k != i.
    ell = [
        -math.log(exponentials[i, j] / sum(exponentials[i]))
        for k in range(len(z) // 2)
        for i, j in ((2 * k, 2 * k + 1), (2 * k + 1, 2 * k))
    ]
    return np.mean(ell)


@pytest.mark.parametrize("images, temperature", [(2, 0.1), (5, 0.5), (7, 1.0)])
def test_contrastive_loss_is_twice_the_loss_of_algorithm_1(images, temperature):
    first, second = np.random.default_rng(images).standard_normal((2, images, 6))
    interleaved = np.stack([first, second], 1).reshape(2 * images, 6)
    loss, logits_ab, labels = objective.add_contrastive_loss(
        tf.constant(np.concatenate([first, second])), True, temperature
    )
    assert_allclose(loss, 2 * algorithm_1(interleaved, temperature), rtol=1e-12)
    assert_array_equal(labels, np.eye(images, 2 * images))
    cosines = scipy.spatial.distance.cdist(first, second, "cosine")
    assert_allclose(logits_ab, (1 - cosines) / temperature, atol=1e-12)


def value_and_gradient(function, z):
    """Returns the scalars (loss, accuracy, entropy) computed by `function`, and the gradient of the loss."""
    with tf.GradientTape() as tape:
        tape.watch(z)
        scalars = function(z)
    return [float(scalar) for scalar in scalars], tape.gradient(scalars[0], z).numpy()


def plain(z, hidden_norm=True, temperature=1.0):
    """Returns the loss, accuracy and entropy, computed without blocks."""
    loss, logits_ab, labels = objective.add_contrastive_loss(z, hidden_norm, temperature)
    return (
        loss,
        metrics.contrastive_accuracy(logits_ab, labels),
        metrics.contrastive_entropy(logits_ab),
    )


def similar_views(images, width, dtype, noise=1.0):
    """Returns projections [2 * images, width]. The most similar second view is not always the positive."""
    first, difference = np.random.default_rng(images).standard_normal((2, images, width))
    return tf.constant(np.concatenate([first, first + noise * difference]), dtype)


@pytest.mark.parametrize("case", [*map(str, ARRAYS["cases"])])
def test_loss_metrics_and_gradient_match_the_original(case):
    z = tf.constant(ARRAYS[f"{case}/hidden"])
    settings = golden.contrastive_settings(case)
    recorded = [ARRAYS[f"{case}/{name}"] for name in ("loss", "contrast_acc", "contrast_entropy")]
    # For 4 images, there are 2 blocks; for 33 images, there are 3.
    blocked = functools.partial(blocked_nt_xent.contrastive_loss, block_rows=len(z) // 2)
    for function in (plain, blocked):
        scalars, gradient = value_and_gradient(functools.partial(function, **settings), z)
        assert_allclose(scalars, recorded, rtol=1e-5)
        assert golden.relative_error(gradient, ARRAYS[f"{case}/grad"]) < 1e-5


@pytest.mark.parametrize(
    "dtype, tolerance, xla", [(tf.float32, 1e-5, True), (tf.float64, 1e-12, False)]
)
def test_blocked_loss_matches_the_plain_loss(dtype, tolerance, xla, monkeypatch):
    # On a TPU, a replica's row offset is a tensor.
    monkeypatch.setattr(replicas, "row_offset", lambda local, strategy: tf.constant(0))

    @tf.function(autograph=False, jit_compile=xla)
    def blocked(z, block_sizes):
        results = []
        for block_rows in block_sizes:
            with tf.GradientTape() as tape:
                tape.watch(z)
                scalars = blocked_nt_xent.contrastive_loss(z, True, 0.2, None, block_rows)
            results.append((*scalars, tape.gradient(scalars[0], z)))
        return results

    # With 12 images: one block, and three blocks of four images.
    for images, block_sizes in ((1, [1]), (12, [0, 9])):
        z = similar_views(images, 6, dtype)
        results = blocked(z, block_sizes)
        monkeypatch.undo()
        expected, expected_gradient = value_and_gradient(lambda z: plain(z, True, 0.2), z)
        assert images == 1 or 0 < expected[1] < 1
        for loss, *scalars, gradient in results:
            assert_allclose(loss, expected[0], rtol=tolerance, atol=tolerance)
            assert_allclose(scalars, expected[1:], rtol=1e-6, atol=1e-6)
            bound = tolerance * (np.abs(expected_gradient).max() + 1)
            assert_allclose(gradient, expected_gradient, atol=bound)


@pytest.mark.parametrize(
    "hidden_norm, temperature, scale", [(True, 0.01, 1.0), (False, 0.1, 30.0), (False, 1.0, 1e4)]
)
def test_blocked_loss_equals_the_readable_form_for_large_logits_and_small_losses(
    hidden_norm, temperature, scale
):
    exact = scale * similar_views(9, 8, tf.float64, 0.5)
    z = tf.cast(exact, tf.float32)
    scalars, gradient = value_and_gradient(
        lambda z: blocked_nt_xent.contrastive_loss(z, hidden_norm, temperature, block_rows=4), z
    )
    # With normalization, the loss is 2e-5, and float32 rounds the probabilities.
    for reference, bound in [(z, 1e-5)] + [(exact, 1e-4)] * (not hidden_norm):
        expected, expected_gradient = value_and_gradient(
            lambda z: plain(z, hidden_norm, temperature), reference
        )
        assert_allclose(scalars, expected, rtol=bound, atol=1e-9)
        assert golden.relative_error(gradient, expected_gradient) < bound


def test_nan_in_a_projection_makes_the_loss_nan():
    z = tf.tensor_scatter_nd_update(similar_views(6, 4, tf.float32), [[3, 1]], [np.nan])
    assert np.isnan(blocked_nt_xent.contrastive_loss(z, block_rows=2)[0])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_losses_are_computed_in_float32(dtype):
    z = tf.cast(similar_views(7, 5, tf.float32), dtype)
    expected, expected_gradient = value_and_gradient(plain, tf.cast(z, tf.float32))
    for function in (plain, blocked_nt_xent.contrastive_loss):
        scalars, gradient = value_and_gradient(function, z)
        assert_allclose(scalars, expected, rtol=1e-6)
        assert gradient.dtype == dtype.as_numpy_dtype
        assert_allclose(gradient.astype(np.float32), expected_gradient, rtol=1e-2, atol=1e-4)


def test_gradient_ignores_metrics_and_scales_with_the_loss():
    z = similar_views(6, 5, tf.float64)

    def scaled(z):
        loss, accuracy, entropy = blocked_nt_xent.contrastive_loss(z, True, 0.3, block_rows=4)
        return 3 * loss + accuracy + entropy, accuracy, entropy

    _, gradient = value_and_gradient(scaled, z)
    _, expected = value_and_gradient(lambda z: plain(z, True, 0.3), z)
    assert_allclose(gradient, 3 * expected, rtol=1e-9, atol=1e-12)


def test_flags_set_normalization_temperature_and_block_size(monkeypatch):
    # In eager execution, the patched function records every product.
    matmul = unittest.mock.Mock(wraps=tf.matmul)
    monkeypatch.setattr(tf, "matmul", matmul)
    z = similar_views(20, 4, tf.float32)
    config = Config(loss_block_rows=16, hidden_norm=False, temperature=0.4)
    terms, _ = simclr.over_batch(z, z, tf.zeros(20), config)
    # Each block compares 5 images, which is the largest divisor of 20 for up to 16 rows.
    assert [len(call.args[0]) for call in matmul.call_args_list] == [5] * 4 * 4
    assert_allclose(terms["contrast_loss"], plain(z, False, 0.4)[0], rtol=1e-5)


def test_supervised_loss_and_accuracy_ignore_images_without_a_label():
    logits = np.random.default_rng(2).standard_normal((6, 4))
    labels, variable = [0, 3, 1, 1, 2, -1], tf.Variable(logits)
    rows = [*zip(logits, labels)][:5]
    losses = [-np.log(np.exp(row[label]) / np.exp(row).sum()) for row, label in rows]
    with tf.GradientTape() as tape:
        loss, accuracy = simclr.supervised_loss(variable, tf.constant(labels))
    hits = [row.argmax() == label for row, label in rows]
    assert_allclose([loss, accuracy], [sum(losses) / 6, np.mean(hits)])
    assert [*tf.reduce_any(tape.gradient(loss, variable) != 0, 1)] == [True] * 5 + [False]
