"""Tests for the accuracy of the MLP on frozen features."""

import numpy as np

from probing import mlp


def test_mlp_separates_rings_but_not_noise():
    random = np.random.default_rng(0)
    classes = random.integers(0, 2, 3000)
    angles = random.uniform(0, 2 * np.pi, 3000)
    # No line separates the two circles.
    rings = ((1 + classes) * np.stack([np.cos(angles), np.sin(angles)])).T
    noise = random.standard_normal((2000, 20))
    for vectors, low, high in ((rings, 0.97, 1.0), (noise, 0.43, 0.57)):
        train_set, test_set = (
            (vectors[rows], classes[rows]) for rows in (slice(1000, len(vectors)), slice(1000))
        )
        assert low <= mlp.mlp_accuracy(train_set, test_set) <= high
