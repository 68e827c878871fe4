"""Metrics for the transfer data sets, as functions of labels and scores."""

from __future__ import annotations

import numpy as np

import metrics
import metrics
from runtime.errors import UserError

RESULT_KEYS = {  # name -> key in run.py's result.json
    "top_1": metrics.LINEAR_TOP_1,
    "mean_per_class": metrics.MEAN_PER_CLASS,
    "mean_average_precision": metrics.MEAN_PRECISION,
}
METRICS = {  # name -> function of scores [n, classes] and labels, which are [n] or [n, classes]
    "top_1": lambda labels, scores: float(np.mean(scores.argmax(1) == labels)),
    "mean_per_class": lambda labels, scores: metrics.mean_per_class_accuracy(
        scores.argmax(1) == labels, np.unique(labels, return_inverse=True)[1]
    ),
    "mean_average_precision": metrics.mean_average_precision_11,
}


def measure(metric: str, labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the value of a metric, in [0, 1].

    Args:
      metric: key of `METRICS`.
      labels: int [n], or int [n, classes] with values 1, 0 and -1 (unknown).
      scores: float [n, classes]; -inf for classes without a fitted classifier.

    Raises:
      UserError: the scores contain NaN, or the metric is NaN.
    """
    # mAP averages over classes with positive examples.
    has_positives = labels.ndim == 1 or (labels == 1).any()
    if not has_positives or np.isnan(scores).any():
        reason = "the scores contain NaN" if has_positives else "no label is 1"
        raise UserError(
            f"--metric={metric}: the value is NaN because {reason}. Use another checkpoint or "
            "other splits."
        )
    return METRICS[metric](labels, scores)
