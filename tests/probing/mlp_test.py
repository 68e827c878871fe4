"""Tests for the accuracy and the memory usage of the MLP on frozen features."""

import tracemalloc

import numpy as np

from probing import features, mlp


def test_mlp_separates_clusters_and_rings_but_not_noise():
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 1500)
    clusters = (
        np.eye(4)[classes] @ random.standard_normal((4, 20)) * 3
        + random.standard_normal((1500, 20)) * 0.3
    )
    noise = random.standard_normal((1500, 20))
    for vectors, low, high in ((clusters, 0.99, 1.0), (noise, 0.17, 0.33)):
        train_set, test_set = (vectors[:1000], classes[:1000]), (vectors[1000:], classes[1000:])
        accuracy = mlp.mlp_accuracy(train_set, test_set)
        assert low <= accuracy <= high
    rings = random.integers(0, 2, 1500)
    angles = random.uniform(0, 2 * np.pi, 1500)
    # No line separates the two circles.
    points = ((1 + rings) * np.stack([np.cos(angles), np.sin(angles)])).T
    assert mlp.mlp_accuracy((points[:1000], rings[:1000]), (points[1000:], rings[1000:])) > 0.97


def test_memory_of_the_mlp_does_not_grow_with_the_number_of_examples(monkeypatch):
    monkeypatch.setattr(mlp, "_MAX_EPOCHS", 1)
    random, file = np.random.default_rng(0), features.VectorFile()
    for _ in range(40):
        file.append(random.normal(size=(1000, 128)))
    vectors, classes = file.read("h"), random.integers(0, 2, 40_000)
    tracemalloc.start()
    mlp.mlp_accuracy((vectors, classes), (vectors, classes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * vectors.nbytes
