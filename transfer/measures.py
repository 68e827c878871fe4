"""The metrics of the transfer data sets, as functions of labels and scores."""

from __future__ import annotations

import numpy as np

import evaluate
import metrics
from runtime.errors import UserError

RESULT_KEYS = {  # name -> where run.py's results have it
    "top_1": evaluate.LINEAR_TOP_1, "mean_per_class": evaluate.MEAN_PER_CLASS,
    "mean_average_precision": evaluate.MEAN_PRECISION,
}
METRICS = {  # name -> function of labels [n] or [n, classes] and scores [n, classes]
    "top_1": lambda labels, scores: float(np.mean(scores.argmax(1) == labels)),
    "mean_per_class": lambda labels, scores: metrics.mean_per_class_accuracy(
        scores.argmax(1) == labels, np.unique(labels, return_inverse=True)[1]),
    "mean_average_precision": metrics.mean_average_precision_11,
}


def measure(metric: str, labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns a metric, in [0, 1].

    Args:
      metric: name in `METRICS`.
      labels: int [n], or [n, classes] of 1, 0 and -1.
      scores: float [n, classes]; -inf for classes that were not learnt.

    Raises:
      UserError: the scores contain NaN, or the metric is NaN.
    """
    shown = labels.ndim == 1 or (labels == 1).any()  # The mean of average precisions is over classes with examples.
    if not shown or np.isnan(scores).any():
        reason = "the scores contain NaN" if shown else "no label is 1"
        raise UserError(f"--metric={metric}: it is NaN, since {reason}. Use another checkpoint, or other splits.")
    return METRICS[metric](labels, scores)
