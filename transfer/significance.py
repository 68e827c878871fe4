"""Permutation test on two sets of predictions (paper, B.8.1)."""

from __future__ import annotations

import argparse

import numpy as np

from runtime import console
from runtime.errors import UserError
from transfer import measures, output

NUM_PERMUTATIONS = 100_000  # number of samples from the null distribution


def permutation_test(
    correct: np.ndarray, other_correct: np.ndarray, labels: np.ndarray | None = None
) -> dict[str, float]:
    """Uses a permutation test to check whether two models' accuracies differ significantly (paper, B.8.1).

    Under the null hypothesis, the models' predictions for an example are exchangeable, so the sign
    of their difference is random. Examples with differences of the same magnitude share a single
    binomial draw.

    Args:
      correct: [n] in [0, 1], correctness of the first model's predictions, usually as booleans.
      other_correct: correctness of the second model's predictions, in the same form as `correct`.
      labels: int [n]. If set, mean per-class accuracies are compared, and otherwise accuracies over
        all examples.

    Returns:
      A dict with `difference`, the difference in accuracy (first minus second), and `p`, the
      two-sided p-value: the fraction of permutations with at least this absolute difference. For
      accuracies over all examples, `p` approximates the p-value of the exact McNemar test.
    """
    _, classes, sizes = np.unique(
        np.zeros(len(correct)) if labels is None else labels,
        return_inverse=True,
        return_counts=True,
    )
    differences = np.subtract(correct, other_correct, dtype=np.float64)
    differences /= sizes[classes] * len(sizes)
    random, permuted = np.random.default_rng(0), np.zeros(NUM_PERMUTATIONS)
    for size, count in zip(*np.unique(np.round(np.abs(differences), 15), return_counts=True)):
        permuted += size * (2 * random.binomial(count, 0.5, NUM_PERMUTATIONS) - count)
    # The margin absorbs rounding errors in the sums.
    is_extreme = np.abs(permuted) >= abs(differences.sum()) - 1e-12
    return dict(difference=float(differences.sum()), p=float(is_extreme.mean()))


def compare(
    labels: np.ndarray, scores: np.ndarray, other_scores: np.ndarray, metric: str
) -> dict[str, float]:
    """Runs `permutation_test` on two models' scores [n, classes] for the same examples.

    Average precision is not a mean of per-example scores, so multi-label predictions are compared
    by accuracy instead.
    """
    if labels.ndim == 2:
        correct, other_correct = (
            np.where(labels >= 0, (model_scores > 0) == labels, 0).sum(1) / (labels >= 0).sum(1)
            for model_scores in (scores, other_scores)
        )
    else:
        correct, other_correct = scores.argmax(1) == labels, other_scores.argmax(1) == labels
    return permutation_test(correct, other_correct, labels if metric == "mean_per_class" else None)


def run_compare(arguments: argparse.Namespace) -> None:
    """Compares the two prediction files given in the parsed arguments and prints the result."""
    (labels, scores), (other_labels, other_scores) = (
        output.read_predictions(path) for path in (arguments.first, arguments.second)
    )
    if not np.array_equal(labels, other_labels):
        raise UserError(
            f"{arguments.second}: the predictions are for different examples. Use the same split."
        )
    is_multi_label = labels.ndim == 2
    if is_multi_label and arguments.metric:
        raise UserError(
            f"--metric={arguments.metric}: there are multiple labels per example. Remove the flag."
        )
    metric = "mean_average_precision" if is_multi_label else arguments.metric or "top_1"
    result = compare(labels, scores, other_scores, metric)
    compared = "accuracy" if is_multi_label else metric.replace("_", " ")
    conclusion = "is not significant" if result["p"] > 0.05 else "is significant"
    console.log(
        console.format_table(
            f"{len(labels)} examples, {NUM_PERMUTATIONS} permutations",
            [
                (arguments.first, f"{measures.measure(metric, labels, scores):.4f}"),
                (arguments.second, f"{measures.measure(metric, labels, other_scores):.4f}"),
                None,
                (f"difference in {compared}", f"{result['difference']:+.4f}"),
                ("p-value", f"{result['p']:.5f}"),
                ("significance level 0.05", f"the difference {conclusion}"),
            ],
        )
    )
