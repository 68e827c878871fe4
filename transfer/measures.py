"""Metrics for the transfer data sets, as functions of labels and scores."""

from __future__ import annotations

import math

import numpy as np

import metrics
from runtime.errors import UserError

RESULT_KEYS = {  # name -> key in run.py's result.json
    "top_1": metrics.LINEAR_TOP_1,
    "mean_per_class": metrics.MEAN_PER_CLASS,
    "mean_average_precision": metrics.MEAN_PRECISION,
}


def measure(metric: str, labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the value of a metric, in [0, 1].

    Args:
      metric: key of `RESULT_KEYS`.
      labels: int [n], or int [n, classes] with values 1, 0 and -1 (unknown).
      scores: float [n, classes]; -inf for classes without a fitted classifier.
    """
    return check_defined(metric, metrics.linear_results(labels, scores)[RESULT_KEYS[metric]])


def check_defined(metric: str, value: float) -> float:
    """Returns the value of a metric. Raises `UserError` if it is NaN (mAP without positive examples)."""
    if math.isnan(value):
        raise UserError(
            f"--metric={metric}: the value is NaN, because no label is 1. Use other splits."
        )
    return value
