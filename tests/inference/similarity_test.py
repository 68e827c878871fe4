"""Tests that compare the search for similar vectors with a search in the full similarity matrix."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from inference import similarity


def clustered(count, width, seed=0):
    """Returns normalized float32 vectors [count, width] around five random centers, in random order."""
    random = np.random.default_rng(seed)
    centers = random.normal(size=[5, width])
    return similarity.normalize(
        centers[random.integers(0, 5, count)] + 0.3 * random.normal(size=[count, width])
    )


def naive(vectors, k):
    """Finds neighbors and the pairs that they form in the full similarity matrix, in float64.

    Returns:
      The neighbor indices, the similarities of the neighbors, and a list of pairs (i, j,
      similarity), most similar first.
    """
    vectors = np.float64(vectors)
    matrix = vectors @ vectors.T
    np.fill_diagonal(matrix, -np.inf)
    order = np.argsort(-matrix, axis=1, kind="stable")[:, : min(k, len(matrix) - 1)]
    pairs = {tuple(sorted((row, int(other)))) for row in range(len(order)) for other in order[row]}
    pairs = sorted(((i, j, matrix[i, j]) for i, j in pairs), key=lambda pair: -pair[2])
    return order, np.take_along_axis(matrix, order, 1), pairs


def test_normalized_vectors_have_unit_length_and_zero_vectors_are_kept():
    vectors = np.array([[3, 4], [0, 0], [1e30, 1e30], [1e-12, 0], [-5, 0]], np.float32)
    expected = [[0.6, 0.8], [0, 0], [0.5**0.5, 0.5**0.5], [1, 0], [-1, 0]]
    assert_allclose(similarity.normalize(vectors), expected, rtol=1e-6)
    assert vectors[0, 0] == 3  # The argument is not changed.


@pytest.mark.parametrize("count, k", [(60, 7), (60, 59), (3, 10), (1, 5)])
def test_search_matches_the_full_similarity_matrix(count, k):
    vectors = clustered(count, 8)
    found = similarity.search(vectors, k, 0.9)
    indices, similarities, pairs = naive(vectors, k)
    assert_array_equal(found.indices, indices)
    assert_allclose(found.similarities, similarities, atol=1e-6)
    assert [tuple(pair) for pair in found.pairs] == [pair[:2] for pair in pairs]
    assert_allclose(found.pair_similarities, [pair[2] for pair in pairs], atol=1e-6)
    assert found.num_pairs == sum(pair[2] >= 0.9 for pair in pairs)


def test_duplicates_are_neighbors_but_a_vector_is_not_its_own_neighbor():
    vectors = clustered(50, 6)
    vectors[[13, 40]] = vectors[2]
    found = similarity.search(vectors, 4, 1.0)
    assert not (found.indices == np.arange(50)[:, None]).any()
    for row, others in {2: {13, 40}, 13: {2, 40}, 40: {2, 13}}.items():
        assert set(found.indices[row, :2]) == others
    # With a threshold of 1, pairs of identical vectors are found despite rounding errors.
    assert {tuple(pair) for pair in found.pairs[:3]} == {(2, 13), (2, 40), (13, 40)}
    assert found.num_pairs == 3 and found.similarities.max() <= 1


def test_zero_vectors_have_similarity_zero():
    vectors = similarity.normalize(np.eye(6, dtype=np.float32) * [1, 1, 1, 0, 0, 1])
    found = similarity.search(vectors, 5, 0.0)
    assert (found.similarities == 0).all() and found.num_pairs == 15
