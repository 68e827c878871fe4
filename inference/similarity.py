"""Search for similar vectors by cosine similarity."""

from __future__ import annotations

import dataclasses

import numpy as np

DEFAULT_THRESHOLD = 0.92
MIN_CENTERED = 10  # minimum number of vectors of which the mean is subtracted
_ROUNDING = 1e-5  # Rounding may reduce the similarity of identical vectors to slightly less than 1.


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The result of `search` for n vectors.

    Attributes:
      indices: the k nearest neighbors of each vector, most similar first; int [n, k].
      similarities: cosine similarities of these neighbors, in [-1, 1]; float32 [n, k].
      pairs: pairs (i, j) with i < j of vectors of which one is a neighbor of the other, most
        similar first; int [p, 2].
      pair_similarities: cosine similarities of these pairs; float32 [p].
      num_pairs: number of these pairs that reach the threshold.
    """

    indices: np.ndarray
    similarities: np.ndarray
    pairs: np.ndarray
    pair_similarities: np.ndarray
    num_pairs: int


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Returns the vectors [n, d] divided by their Euclidean norms, as float32. Zero vectors do not change."""
    from sklearn import preprocessing

    # In float32, the squares of very large elements would overflow.
    return preprocessing.normalize(np.float64(vectors)).astype(np.float32)


def center(vectors: np.ndarray) -> np.ndarray:
    """Subtracts the mean vector and normalizes the differences, so that unrelated vectors have a cosine of about 0.

    The mean of fewer than 10 vectors is not subtracted, because it depends too much on each vector.
    """
    if len(vectors) >= MIN_CENTERED:
        vectors = vectors - vectors.mean(0, np.float64)
    return normalize(vectors)


def search(vectors: np.ndarray, k: int, threshold: float) -> Neighbors:
    """Finds the nearest neighbors of all vectors, and the similar pairs among them.

    The search is exact: for unit vectors, |u - v|^2 = 2 - 2 u.v, so the nearest neighbors by
    Euclidean distance are the most similar ones. A vector is never its own neighbor, but it is a
    neighbor of its duplicates. The `k` most similar pairs of all vectors are among the pairs: if j
    is not among the k nearest neighbors of i, then k pairs are at least as similar as (i, j).

    Args:
      vectors: result of `center`, float32 [n, d].
      k: number of neighbors, capped at n - 1.
      threshold: minimum similarity of the pairs to count.
    """
    from sklearn import neighbors as sklearn_neighbors

    count, k = len(vectors), min(k, len(vectors) - 1)
    indices = np.zeros([count, 0], int)
    if k:
        estimator = sklearn_neighbors.NearestNeighbors(n_neighbors=k, algorithm="brute").fit(
            vectors
        )
        indices = estimator.kneighbors(return_distance=False)
    similarities = np.zeros(indices.shape, np.float32)
    for column, neighbors in enumerate(indices.T):
        similarities[:, column] = np.einsum("nd,nd->n", vectors, vectors[neighbors])
    order = np.lexsort([indices, -similarities])  # Ties are sorted by index.
    indices = np.take_along_axis(indices, order, 1)
    similarities = np.take_along_axis(similarities, order, 1).clip(-1, 1)
    pairs = np.sort(np.stack([np.repeat(np.arange(count), k), indices.ravel()], 1), 1)
    _, rows = np.unique(pairs @ [count, 1], return_index=True)
    rows = rows[np.argsort(-similarities.ravel()[rows], kind="stable")]
    values = similarities.ravel()[rows]
    num_pairs = int(np.count_nonzero(values >= threshold - _ROUNDING))
    return Neighbors(indices, similarities, pairs[rows], values, num_pairs)
