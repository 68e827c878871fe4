"""Measures of representations and projections that need no labels."""

from __future__ import annotations

import numpy as np
from scipy.spatial import distance


def effective_rank(vectors: np.ndarray) -> float:
    """Returns RankMe: the exponential of the entropy of the normalized singular values.

    See Garrido et al. 2023, arXiv:2210.02885. The value is between 1 and min(n, d) for vectors
    [n, d]. It is biased for n < 2d.
    """
    values = np.linalg.svd(np.asarray(vectors, np.float64), compute_uv=False)
    shares = values / max(values.sum(), 1e-300) + 1e-7  # RankMe adds this constant.
    return float(np.exp(-np.sum(shares * np.log(shares))))


def alignment(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the mean squared distance between the normalized vectors of two views, [n, d] each, in [0, 4].

    See Wang and Isola 2020, arXiv:2005.10242, with alpha = 2.
    """
    return float(np.mean(np.sum((_normalize(first) - _normalize(second)) ** 2, 1)))


def uniformity(vectors: np.ndarray) -> float:
    """Returns the logarithm of the mean of exp(-2 |u - v|^2) over all pairs of normalized vectors [n, d].

    See Wang and Isola 2020, with t = 2. The value is 0 if all directions are equal. For many
    dimensions, it approaches -4 if the directions are spread evenly.
    """
    squares = distance.pdist(_normalize(vectors), "sqeuclidean")
    return float(np.log(np.mean(np.exp(-2 * squares))))


def _normalize(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)


def diagnose(h: np.ndarray, z: np.ndarray) -> dict[str, float]:
    """Returns the diagnostics of a network, keyed by their names in result.json and history.csv.

    The ranks of h (with its mean removed) and of z (not centered) are omitted if there are fewer
    than 2 d images, and uniformity if there is only one.

    Args:
      h: [V, n, c] representations of V views of n images.
      z: [V, n, d] projections.
    """
    results = {"eval/alignment": alignment(z[0], z[1])}
    if z.shape[1] > 1:
        results["eval/uniformity"] = uniformity(z[0])
    for name, vectors in (("h", h[0] - h[0].mean(0)), ("z", z[0])):
        if vectors.shape[0] >= 2 * vectors.shape[1]:
            results[f"eval/rank_{name}"] = effective_rank(vectors)
    return results
