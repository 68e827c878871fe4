"""Tests that compare the blocked similarity search with a search in the full similarity matrix."""

import itertools

import numpy as np
import pytest

from inference import similarity


def clustered(count, width, seed=0):
    """Returns normalized float32 vectors [count, width] around five random centers, in random order."""
    random = np.random.default_rng(seed)
    centers = random.normal(size=[5, width])
    return similarity.normalize(
        centers[random.integers(0, 5, count)] + 0.3 * random.normal(size=[count, width])
    )


def naive(vectors, k, threshold):
    """Finds neighbors and similar pairs in the full similarity matrix, in float64.

    Returns:
      The neighbor indices, the similarities of the neighbors, and a list of pairs (i, j,
      similarity).
    """
    matrix = np.asarray(vectors, np.float64) @ np.asarray(vectors, np.float64).T
    pairs = [
        (i, j, matrix[i, j])
        for i, j in itertools.combinations(range(len(matrix)), 2)
        if matrix[i, j] >= threshold
    ]
    np.fill_diagonal(matrix, -np.inf)
    order = np.argsort(-matrix, axis=1, kind="stable")[:, : min(k, len(matrix) - 1)]
    return order, np.take_along_axis(matrix, order, 1), sorted(pairs, key=lambda pair: -pair[2])


def test_normalized_vectors_have_unit_length_and_zero_vectors_are_kept():
    vectors = np.array([[3, 4], [0, 0], [1e30, 1e30], [1e-30, 0], [-5, 0]], np.float32)
    expected = [[0.6, 0.8], [0, 0], [0.5**0.5, 0.5**0.5], [1, 0], [-1, 0]]
    np.testing.assert_allclose(similarity.normalize(vectors), expected, rtol=1e-6)
    assert vectors[0, 0] == 3  # The argument is not changed.


@pytest.mark.parametrize(
    "count, k, block_rows",
    [
        (60, 7, 16),
        (64, 7, 16),
        (65, 7, 16),
        (60, 7, 60),
        (60, 7, 1),
        (60, 7, 1000),
        (60, 59, 16),
        (60, 100, 13),
        (3, 10, 2),
        (2, 1, 2),
        (33, 1, 32),
    ],
)
def test_search_matches_the_full_similarity_matrix(count, k, block_rows):
    vectors = clustered(count, 8)
    found = similarity.search(vectors, k, 0.9, block_rows=block_rows)
    indices, similarities, pairs = naive(vectors, k, 0.9)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_allclose(found.similarities, similarities, atol=1e-6)
    assert {tuple(pair) for pair in found.pairs} == {
        pair[:2] for pair in pairs
    } and found.num_pairs == len(pairs)
    np.testing.assert_allclose(found.pair_similarities, [pair[2] for pair in pairs], atol=1e-6)
    assert (
        found.indices.dtype == found.pairs.dtype == np.int32
        and found.similarities.dtype == np.float32
    )


@pytest.mark.parametrize("block_rows", [1, 3, 4, 100])
def test_equally_similar_neighbors_with_the_smallest_indices_are_selected(block_rows):
    # The similarities of these vectors are exact in float32.
    signs = np.array(list(itertools.product([0.5, -0.5], repeat=4)), np.float32)
    vectors = signs[np.random.default_rng(0).integers(0, 16, 40)]
    found = similarity.search(vectors, 9, 0.5, block_rows=block_rows)
    indices, similarities, pairs = naive(vectors, 9, 0.5)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_array_equal(found.similarities, similarities)
    expected = sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))
    assert [tuple(pair) for pair in found.pairs] == [pair[:2] for pair in expected]


def test_duplicates_are_neighbors_but_a_vector_is_not_its_own_neighbor():
    vectors = clustered(50, 6)
    vectors[[13, 40]] = vectors[2]
    found = similarity.search(vectors, 4, 1.0, block_rows=16)
    assert not (found.indices == np.arange(50)[:, None]).any()
    for row, others in {2: {13, 40}, 13: {2, 40}, 40: {2, 13}}.items():
        assert set(found.indices[row, :2]) == others
    # With a threshold of 1, pairs of identical vectors are found despite rounding errors.
    assert {tuple(pair) for pair in found.pairs} == {
        (2, 13),
        (2, 40),
        (13, 40),
    } and found.num_pairs == 3
    assert found.similarities.max() <= 1


def test_zero_vectors_have_similarity_zero():
    vectors = similarity.normalize(np.eye(6, dtype=np.float32) * [1, 1, 1, 0, 0, 1])
    found = similarity.search(vectors, 3, 0.0, block_rows=4)
    assert (
        np.isfinite(found.similarities).all()
        and (found.similarities == 0).all()
        and found.num_pairs == 15
    )


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_vectors_have_no_neighbors(count):
    found = similarity.search(np.ones([count, 3], np.float32), 5, 0.5)
    assert (
        found.indices.shape == (count, 0) and found.num_pairs == 0 and found.pairs.shape == (0, 2)
    )
    assert similarity.closest_pairs(found, 4) == []


@pytest.mark.parametrize("max_pairs", [1, 10, 300])
def test_only_the_most_similar_pairs_are_kept_but_all_are_counted(max_pairs):
    vectors = clustered(60, 8)
    pairs = naive(vectors, 1, 0.5)[2]
    assert len(pairs) > 300
    found = similarity.search(vectors, 1, 0.5, max_pairs=max_pairs, block_rows=16)
    assert [tuple(pair) for pair in found.pairs] == [pair[:2] for pair in pairs[:max_pairs]]
    assert found.num_pairs == len(pairs)


def test_identical_vectors_do_not_exceed_the_maximum_number_of_pairs():
    found = similarity.search(np.ones([100, 1], np.float32), 3, 0.9, max_pairs=50, block_rows=16)
    assert found.num_pairs == 100 * 99 // 2 and len(found.pairs) == 50
    assert len({tuple(pair) for pair in found.pairs}) == 50


def test_closest_pairs_are_found_without_a_threshold():
    vectors = clustered(60, 8)
    vectors[7] = vectors[31]
    found = similarity.search(vectors, 12, 2.0, block_rows=16)
    assert found.num_pairs == 0
    pairs = naive(vectors, 1, -1)[2][:12]
    closest = similarity.closest_pairs(found, 12)
    assert closest[0][:2] == (7, 31) and [pair[:2] for pair in closest] == [
        pair[:2] for pair in pairs
    ]
    np.testing.assert_allclose(
        [pair[2] for pair in closest], [pair[2] for pair in pairs], atol=1e-6
    )
