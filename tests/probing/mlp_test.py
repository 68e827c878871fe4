"""Tests for the accuracy and the memory usage of the MLP on frozen features."""

import tracemalloc

import numpy as np

from probing import features, mlp


def test_mlp_separates_rings_but_not_noise():
    random = np.random.default_rng(0)
    classes = random.integers(0, 2, 3000)
    angles = random.uniform(0, 2 * np.pi, 3000)
    # No line separates the two circles.
    rings = ((1 + classes) * np.stack([np.cos(angles), np.sin(angles)])).T
    noise = random.standard_normal((3000, 20))
    for vectors, low, high in ((rings, 0.97, 1.0), (noise, 0.43, 0.57)):
        train_set, test_set = (vectors[:2000], classes[:2000]), (vectors[2000:], classes[2000:])
        assert low <= mlp.mlp_accuracy(train_set, test_set) <= high


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
