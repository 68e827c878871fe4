"""Nearest-neighbor classification of frozen features."""

from __future__ import annotations

import numpy as np

KNN_NEIGHBORS = 10
# Weighted voting as in Wu et al. 2018 (arXiv:1805.01978), with temperature 0.1.
WEIGHTED_NEIGHBORS, WEIGHTED_TEMPERATURE = 200, 0.1


def knn_accuracy(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    neighbors: int = KNN_NEIGHBORS,
    temperature: float | None = None,
) -> float:
    """Returns the test accuracy, in [0, 1], of k-nearest-neighbor classification with cosine similarity.

    Args:
      train: (features [n, d], labels [n]).
      test: (features [m, d], labels [m]).
      neighbors: number k of voting neighbors. If it exceeds n, n is used.
      temperature: votes are weighted by exp(cosine similarity / temperature), or equally if None.
    """
    from sklearn import neighbors as sklearn_neighbors

    weights = (
        "uniform" if temperature is None else lambda distances: np.exp(-distances / temperature)
    )
    classifier = sklearn_neighbors.KNeighborsClassifier(
        min(neighbors, len(train[0])), weights=weights, metric="cosine", algorithm="brute"
    )
    return float(classifier.fit(*train).score(*test))
