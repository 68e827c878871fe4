"""Transfer to other data sets (paper, 4.3 and B.8): protocol, grids and significance."""

from __future__ import annotations

import numpy as np

import metrics

DRAWS = 100_000


def permutation_test(hits, other_hits, labels=None, draws=DRAWS, seed=0):
    """How likely two equally good models would differ as much as these two do (paper, B.8.1).

    Under the null hypothesis, the two predictions of an example may be exchanged. Only examples that one model alone
    has right then count, each for either of them with probability 1/2; so their numbers are drawn from binomials.

    Args:
      hits: [n] booleans, whether the first model is right.
      other_hits: the same of the second.
      labels: [n] integers, to compare the mean per-class accuracies; None: accuracies.
      draws: samples of the null distribution.
      seed: of the draws.

    Returns:
      dict: `difference` of the accuracies (first minus second), and `p`, the share of draws that differ at least as
      much, in either direction. For accuracies that is the exact McNemar test's, but for the draws.
    """
    hits, other_hits = np.asarray(hits, bool), np.asarray(other_hits, bool)
    classes = np.zeros(len(hits), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    sizes, apart = np.bincount(classes), np.bincount(classes, hits != other_hits).astype(int)
    difference = metrics.mean_per_class_accuracy(hits, classes) - metrics.mean_per_class_accuracy(other_hits, classes)
    random = np.random.default_rng(seed)
    drawn = sum((2 * random.binomial(count, 0.5, draws) - count) / size for count, size in zip(apart, sizes) if count)
    as_far = np.abs(drawn / len(sizes)) >= abs(difference) - 1e-12  # As sums of fractions round.
    return dict(difference=difference, p=float(np.mean(np.broadcast_to(as_far, draws))))
