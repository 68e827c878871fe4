"""Exact search for similar vectors by cosine similarity, in blocks that bound the memory use."""

from __future__ import annotations

import dataclasses

import numpy as np

from runtime import progress, signals

NOT_WRITTEN = "the gallery was not written; run the same command again"
DEFAULT_THRESHOLD = 0.95
BLOCK_ROWS = 1024  # A block of similarities takes 4 MiB.
# The number of pairs is limited, because n equal vectors form n (n - 1) / 2 pairs that reach the
# threshold.
MAX_PAIRS = 1_000_000
_ROUNDING = 1e-5  # Rounding may reduce the similarity of identical vectors to slightly less than 1.


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The result of `search` for n vectors.

    Attributes:
      indices: the k nearest neighbors of each vector, most similar first; int32 [n, k].
      similarities: cosine similarities of these neighbors, in [-1, 1]; float32 [n, k].
      pairs: pairs (i, j) of vectors with i < j that reach the threshold, most similar first; int32
        [p, 2].
      pair_similarities: cosine similarities of these pairs; float32 [p].
      num_pairs: number of pairs that reach the threshold. If it is greater than p, `pairs` contains
        only the p most similar pairs.
    """

    indices: np.ndarray
    similarities: np.ndarray
    pairs: np.ndarray
    pair_similarities: np.ndarray
    num_pairs: int


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Returns the vectors [n, d] divided by their Euclidean norms, as float32. Zero vectors do not change."""
    vectors = np.array(vectors, np.float32)
    # Without the division by the largest element, the squares of very large or small elements
    # overflow or underflow.
    largest = np.maximum(vectors.max(1, keepdims=True), -vectors.min(1, keepdims=True))
    vectors /= np.where(largest > 0, largest, 1)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.where(norms > 0, norms, 1)
    return vectors


def search(
    vectors: np.ndarray,
    k: int,
    threshold: float,
    max_pairs: int = MAX_PAIRS,
    block_rows: int = BLOCK_ROWS,
) -> Neighbors:
    """Finds the nearest neighbors of all vectors, and all pairs of similar vectors, in one pass.

    Only the blocks on and above the diagonal of the similarity matrix V V^T are computed. The rows
    and the columns of a block both provide candidates for neighbors. The time is quadratic in n,
    but the memory usage is not, because only a few blocks are stored in addition to the vectors and
    the result. A vector is never its own neighbor, but it is a neighbor of its duplicates. Among
    equally similar neighbors, those with the smallest indices are selected.

    Args:
      vectors: result of `normalize`, float32 [n, d]. The similarity of a zero vector to any vector
        is 0.
      k: number of neighbors, capped at n - 1.
      threshold: minimum similarity of the listed pairs.
      max_pairs: maximum number of listed pairs.
      block_rows: number of rows and columns of a block.

    Raises:
      errors.Stopped: a signal arrived.
    """
    count = len(vectors)
    k = min(k, max(count - 1, 0))
    indices = np.full([count, k], -1, np.int32)
    similarities = np.full([count, k], -np.inf, np.float32)
    pairs = _ClosestPairs(threshold - _ROUNDING, max_pairs)
    starts = range(0, count, block_rows)
    blocks = [(first, second) for first in starts for second in starts if second >= first]
    for first, second in progress.terminal_bar(blocks, len(blocks), "neighbors"):
        signals.safe_point(NOT_WRITTEN)
        rows, columns = slice(first, first + block_rows), slice(second, second + block_rows)
        block = vectors[rows] @ vectors[columns].T
        if first == second:
            np.fill_diagonal(block, -np.inf)
        _add_candidates(indices[rows], similarities[rows], block, second)
        if first == second:
            block[np.tril_indices(len(block))] = -np.inf  # Each pair is listed once.
        else:
            _add_candidates(indices[columns], similarities[columns], block.T, first)
        pairs.add(block, first, second)
    listed, pair_similarities = pairs.result()
    return Neighbors(
        indices, similarities.clip(-1, 1), listed, pair_similarities.clip(-1, 1), pairs.count
    )


def _add_candidates(indices, similarities, block, offset):
    """Merges a block of similarities into the nearest neighbors found so far, in place.

    Args:
      indices: the neighbors found so far, most similar first; int32 [n, k].
      similarities: similarities of these neighbors; float32 [n, k].
      block: similarities of the n vectors to m others; float32 [n, m]. Column j belongs to the
        vector `offset + j`.
      offset: index of the vector in the first column of `block`. Larger than all elements of
        `indices`.
    """
    k = similarities.shape[1]
    if not k:
        return
    # Sort only the vectors that are more similar than the current neighbors. Most blocks contain
    # few such vectors.
    better = block > similarities[:, -1:]
    if similarities[0, -1] == -np.inf and block.shape[1] > k:
        # The neighbors are still placeholders.
        better &= block >= np.partition(block, -k, axis=1)[:, -k : -k + 1 or None]
    rows, columns = np.nonzero(better)
    if not len(rows):
        return
    changed, starts, counts = np.unique(rows, return_index=True, return_counts=True)
    places = (
        np.arange(len(rows)) - np.repeat(starts, counts),
        np.repeat(np.arange(len(changed)), counts),
    )
    merged = np.full([len(changed), k + counts.max()], -np.inf, np.float32)
    merged_indices = np.full(merged.shape, -1, np.int32)
    merged[:, :k], merged_indices[:, :k] = similarities[changed], indices[changed]
    merged[places[1], k + places[0]], merged_indices[places[1], k + places[0]] = (
        block[rows, columns],
        offset + columns,
    )
    order = np.argsort(-merged, axis=1, kind="stable")[:, :k]
    similarities[changed] = np.take_along_axis(merged, order, 1)
    indices[changed] = np.take_along_axis(merged_indices, order, 1)


class _ClosestPairs:
    """The `limit` most similar pairs that reach a threshold.

    At most 2 * `limit` pairs are stored, plus those of one block.
    """

    def __init__(self, threshold, limit):
        self.count = 0  # number of pairs that reach the threshold
        self._threshold, self._limit = threshold, limit
        self._above = -np.inf  # Pairs with at most this similarity are not needed.
        self._parts, self._held = [], 0

    def add(self, block, first, second):
        """Adds a block of similarities, float32 [n, m].

        Element [i, j] belongs to the vectors with the indices `first + i` and `second + j`.
        """
        reaches = block >= self._threshold
        count = int(np.count_nonzero(reaches))
        self.count += count
        if not count:
            return
        if self._above > -np.inf:
            reaches &= block > self._above
        rows, columns = np.nonzero(reaches)
        self._parts.append(
            (
                (first + rows).astype(np.int32),
                (second + columns).astype(np.int32),
                block[rows, columns],
            )
        )
        self._held += len(rows)
        if self._held > 2 * self._limit:
            self._parts = [self._sorted()]
            self._held, self._above = self._limit, self._parts[0][2][-1]

    def _sorted(self):
        first, second, values = (np.concatenate(column) for column in zip(*self._parts))
        order = np.lexsort([second, first, -values])[: self._limit]
        return first[order], second[order], values[order]

    def result(self):
        """Returns the pairs, int32 [p, 2], and their similarities, float32 [p], most similar first."""
        if not self._parts:
            return np.zeros([0, 2], np.int32), np.zeros([0], np.float32)
        first, second, values = self._sorted()
        return np.stack([first, second], 1), values


def closest_pairs(neighbors: Neighbors, limit: int) -> list[tuple[int, int, float]]:
    """Returns the most similar pairs (i, j, similarity) with i < j, whether or not they reach the threshold.

    The result is exact if `limit` does not exceed the number k of neighbors: if j is not among the
    k nearest neighbors of i, then k pairs are at least as similar as (i, j).
    """
    count, k = neighbors.indices.shape
    first, second = np.repeat(np.arange(count), k), neighbors.indices.ravel()
    low, high, values = (
        np.minimum(first, second),
        np.maximum(first, second),
        neighbors.similarities.ravel(),
    )
    order = np.lexsort([high, low, -values])[: 2 * limit]  # Every pair occurs at most twice.
    pairs = {}
    for row in order:
        pairs.setdefault((int(low[row]), int(high[row])), float(values[row]))
    return [(*pair, value) for pair, value in pairs.items()][:limit]
