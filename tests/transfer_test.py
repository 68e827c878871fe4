"""Transfer: significance."""

import numpy as np
import pytest
from scipy import stats

import transfer


def draw_hits(count, share, other_share, seed=0):
    random = np.random.default_rng(seed)
    return random.random(count) < share, random.random(count) < other_share


@pytest.mark.parametrize("count, share, other_share", [(40, 0.6, 0.7), (1000, 0.8, 0.82), (1000, 0.5, 0.5), (9, 0, 1)])
def test_the_permutation_test_is_mcnemars(count, share, other_share):
    hits, other_hits = draw_hits(count, share, other_share)
    only_first, only_second = (hits & ~other_hits).sum(), (other_hits & ~hits).sum()
    exact = stats.binomtest(int(only_first), int(only_first + only_second)).pvalue
    found = transfer.permutation_test(hits, other_hits)
    assert found["difference"] == pytest.approx(hits.mean() - other_hits.mean())
    assert found["p"] == pytest.approx(exact, abs=4 * np.sqrt(0.25 / transfer.DRAWS))


def test_per_class_accuracies_are_permuted_example_by_example():
    random = np.random.default_rng(1)
    labels = random.choice(4, 60, p=[0.1, 0.2, 0.3, 0.4])
    hits, other_hits = draw_hits(60, 0.75, 0.6, seed=2)

    def mean_per_class(values):
        return np.mean([values[labels == label].mean() for label in range(4)])

    observed, drawn = mean_per_class(hits) - mean_per_class(other_hits), []
    for _ in range(4000):
        swap = random.random(60) < 0.5
        pair = np.where(swap, other_hits, hits), np.where(swap, hits, other_hits)
        drawn.append(mean_per_class(pair[0]) - mean_per_class(pair[1]))
    expected = np.mean(np.abs(drawn) >= abs(observed) - 1e-12)
    found = transfer.permutation_test(hits, other_hits, labels)
    assert found["difference"] == pytest.approx(observed)
    assert found["p"] == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 4000))


def test_equal_models_do_not_differ():
    hits, _ = draw_hits(50, 0.5, 0.5)
    assert transfer.permutation_test(hits, hits) == dict(difference=0.0, p=1.0)
