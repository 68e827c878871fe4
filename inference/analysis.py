"""Summaries of a set of vectors: similarity, clusters, a two-dimensional map, and classes of neighbors.

scikit-learn is limited to one thread, so that results do not depend on the number of cores. With a few
hundred vectors, multiple threads would also spend most of the time waiting for each other.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import threadpoolctl

from inference import similarity

_MINI_BATCH_IMAGES = 10_000  # If there are more vectors, k-means uses mini-batches.
_MIN_MAP_IMAGES = 10  # If there are fewer vectors, the map shows principal components.
_MAP_COMPONENTS = 50  # number of principal components that t-SNE receives


def mean_similarity(vectors: np.ndarray) -> float:
    """Returns the mean cosine similarity over all pairs of vectors, or NaN if there is only one vector.

    Args:
      vectors: result of `similarity.normalize`, float32 [n, d].
    """
    count, total = len(vectors), vectors.sum(0, dtype=np.float64)
    # |sum_i v_i|^2 = sum_i |v_i|^2 + sum_{i != j} v_i . v_j
    own = np.einsum("nd,nd->", vectors, vectors, dtype=np.float64)
    return float((total @ total - own) / (count * (count - 1))) if count > 1 else float("nan")


# -------------------------------------------------------------------------------------------------------- clusters


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Clusters of n vectors, the largest first.

    Attributes:
      assignments: cluster of each vector, int [n].
      sizes: number of vectors in each cluster, int [c].
      typical: for each cluster, the indices of the vectors closest to its center, closest first.
    """

    assignments: np.ndarray
    sizes: np.ndarray
    typical: list[np.ndarray]


def find_clusters(
    vectors: np.ndarray, num_clusters: int | None, seed: int, num_typical: int
) -> Clusters:
    """Clusters vectors with k-means, or with mini-batch k-means if there are more than 10,000 vectors.

    Args:
      vectors: result of `similarity.normalize`, float32 [n, d].
      num_clusters: maximum number of clusters. None: the square root of n / 2, rounded and limited
        to the range from 2 to 20. Fewer distinct vectors result in fewer clusters.
      seed: seed for the initial centers.
      num_typical: maximum number of typical vectors per cluster.
    """
    from sklearn import cluster

    default = int(np.clip(round((len(vectors) / 2) ** 0.5), 2, 20))
    num_clusters = min(num_clusters or default, len(vectors))
    k_means = cluster.MiniBatchKMeans if len(vectors) > _MINI_BATCH_IMAGES else cluster.KMeans
    estimator = k_means(num_clusters, random_state=seed, n_init=3)
    with warnings.catch_warnings(), threadpoolctl.threadpool_limits(1, "openmp"):
        # Duplicates may leave clusters empty. Empty clusters are dropped below.
        warnings.simplefilter("ignore")
        found = estimator.fit_predict(vectors)
    sizes = np.bincount(found, minlength=num_clusters)
    order = np.argsort(-sizes, kind="stable")
    nonempty = order[: np.count_nonzero(sizes)]
    centers = similarity.normalize(estimator.cluster_centers_)
    ranked = np.argsort(-np.einsum("nd,nd->n", vectors, centers[found]), kind="stable")
    typical = [ranked[found[ranked] == number][:num_typical] for number in nonempty]
    return Clusters(np.argsort(order)[found], sizes[nonempty], typical)


# ------------------------------------------------------------------------------------------------------------- map


def map_points(vectors: np.ndarray, seed: int) -> tuple[np.ndarray, str]:
    """Maps vectors to two dimensions with t-SNE, so that similar vectors are close to each other.

    With fewer than 10 vectors, or if all vectors are equal, uses the first two principal components.

    Args:
      vectors: result of `similarity.normalize`, float32 [n, d].
      seed: seed for the optimization.

    Returns:
      Points in [0, 1], float [n, 2], and the name of the method.
    """
    from sklearn import decomposition, manifold

    size = min(_MAP_COMPONENTS, *vectors.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The variance of one vector is not defined.
        components = decomposition.PCA(size, random_state=seed).fit_transform(vectors)
    points = np.pad(components, [(0, 0), (0, 2)])[:, :2]
    method = "principal components"
    if len(vectors) >= _MIN_MAP_IMAGES and points[:, 0].std() > 1e-6:
        method, perplexity = "t-SNE", min(30.0, (len(vectors) - 1) / 3)
        with threadpoolctl.threadpool_limits(1, "openmp"):
            points = manifold.TSNE(perplexity=perplexity, random_state=seed).fit_transform(
                components
            )
    if np.ptp(points[:, 1]) > np.ptp(points[:, 0]):
        # The orientation is arbitrary, and screens are usually wider than they are high.
        points = points[:, ::-1]
    points = points - points.min(0)
    return points / max(points.max(), 1e-12), method


# --------------------------------------------------------------------------------------------------------- classes


def predict_from_neighbors(indices: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Classifies each image by a vote of its nearest neighbors among the other images (leave-one-out).

    Args:
      indices: nearest neighbors of each image, int [n, k].
      labels: labels, int [n].

    Returns:
      The most frequent label among the neighbors, int [n]. Ties are broken in favor of the
      smallest label, as in scikit-learn.
    """
    from scipy import stats

    return stats.mode(labels[indices], axis=1).mode
