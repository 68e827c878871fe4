"""Nearest-neighbour classification of frozen features."""

from __future__ import annotations

import numpy as np

from probing import features

KNN_NEIGHBORS = 10
# Neighbours that count by similarity, and how much (Wu et al. 2018, arXiv:1805.01978, with temperature 0.1).
WEIGHTED_NEIGHBORS, WEIGHTED_TEMPERATURE = 200, 0.1


def knn_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray],
                 neighbors: int = KNN_NEIGHBORS, temperature: float | None = None) -> dict[str, float]:
    """Test accuracy of a vote among the cosine-nearest training features; see `lbfgs_accuracy`.

    Args:
      train: (features [n, d], labels [n]).
      test: (features [m, d], labels [m]).
      neighbors: how many vote; all, if there are fewer.
      temperature: votes weigh exp(cosine / temperature); None: all the same.

    Raises:
      UserError: the features contain NaN or Inf.
    """
    from sklearn import neighbors as sklearn_neighbors

    features.check_feature_sets(train, test, "knn")
    count = min(neighbors, len(train[0]))
    votes = "uniform" if temperature is None else lambda distances: np.exp(-distances / temperature)
    classifier = sklearn_neighbors.KNeighborsClassifier(count, weights=votes, metric="cosine", algorithm="brute")
    return dict(accuracy=float(classifier.fit(*train).score(*test)))
