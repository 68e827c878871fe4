"""Permutation test of two sets of predictions (paper, B.8.1)."""

from __future__ import annotations

import argparse

import numpy as np

from runtime import console
from runtime.errors import UserError
from transfer import measures, output

DRAWS = 100_000


# ------------------------------------------------------------------------------------------------------ significance


def permutation_test(right: np.ndarray, other_right: np.ndarray, labels: np.ndarray | None = None, draws: int = DRAWS,
                     seed: int = 0) -> dict[str, float]:
    """How likely two equally good models would differ as much as these two do (paper, B.8.1).

    Under the null hypothesis, the two predictions of an example may be exchanged, so that the sign of its difference
    is that of a coin. Differences of one size are drawn together, by a binomial.

    Args:
      right: [n] in [0, 1], how far the first model is right; booleans, as a rule.
      other_right: the same of the second.
      labels: [n] integers, to compare the means of the classes' accuracies; None: accuracies.
      draws: samples of the null distribution.
      seed: of the draws.

    Returns:
      dict: `difference` of the accuracies (first minus second), and `p`, the share of draws that differ at least as
      much, in either direction. For accuracies that is the exact McNemar test's, but for the draws.
    """
    classes = np.zeros(len(right), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    sizes = np.bincount(classes)
    parts = (np.asarray(right, np.float64) - np.asarray(other_right, np.float64)) / (sizes[classes] * len(sizes))
    random, drawn = np.random.default_rng(seed), np.zeros(draws)
    for size, count in zip(*np.unique(np.round(np.abs(parts), 15), return_counts=True)):
        drawn += size * (2 * random.binomial(count, 0.5, draws) - count)
    as_far = np.abs(drawn) >= abs(parts.sum()) - 1e-12  # As sums of fractions round.
    return dict(difference=float(parts.sum()), p=float(as_far.mean()))


def compare(labels: np.ndarray, scores: np.ndarray, other_scores: np.ndarray, metric: str, draws: int = DRAWS
           ) -> dict[str, float]:
    """`permutation_test` of two models' scores [n, classes] for the same examples.

    Average precisions cannot be exchanged example by example: labels [n, classes] are compared by accuracy.
    """
    if labels.ndim == 2:
        rights = [np.where(labels >= 0, (each > 0) == labels, 0).sum(1) / (labels >= 0).sum(1)
                  for each in (scores, other_scores)]
    else:
        rights = [each.argmax(1) == labels for each in (scores, other_scores)]
    return permutation_test(*rights, labels if metric == "mean_per_class" else None, draws)


def run_compare(arguments: argparse.Namespace) -> None:
    """Compares the two files of predictions of parsed arguments."""
    (labels, scores), (other_labels, other_scores) = (
        output.read_predictions(path) for path in (arguments.first, arguments.second))
    if labels.shape != other_labels.shape or (labels != other_labels).any():
        raise UserError(f"{arguments.first} and {arguments.second} are not of the same examples: evaluate both on the "
                        "same split")
    if labels.ndim == 2 and arguments.metric:
        raise UserError(f"--metric={arguments.metric} is for one label an example, and {arguments.first} has several: "
                        "leave it out, they are compared by accuracy")
    metric = "mean_average_precision" if labels.ndim == 2 else arguments.metric or "top_1"
    values = [measures.measure(metric, labels, each) for each in (scores, other_scores)]
    found = compare(labels, scores, other_scores, metric)
    by = "accuracy" if labels.ndim == 2 else metric.replace("_", " ")
    told = "is not significant" if found["p"] > 0.05 else "is significant"
    console.log(console.format_table(f"{len(labels)} examples, {DRAWS} permutations", [
        *((path, f"{value:.4f}") for path, value in zip((arguments.first, arguments.second), values)), None,
        (f"difference of {by}", f"{found['difference']:+.4f}"), ("p", f"{found['p']:.5f}"),
        ("at 0.05", f"the difference {told}")]))
