"""Confusion matrix of a classifier, as a table and as a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import numpy as np
import pandas as pd

from runtime import console, storage

_MAX_CLASSES = 50  # With more classes, the picture would not be readable.


def count(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns how many examples of each class (rows) are classified as each class (columns).

    Args:
      labels: int [n].
      logits: [n, classes].

    Returns:
      int64 [classes, classes].
    """
    num_classes = logits.shape[-1]
    pairs = labels * num_classes + logits.argmax(-1)
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def report(directory: str, step: int, counts: np.ndarray, names: Sequence[str]) -> None:
    """Logs the lowest accuracies of classes and, for at most 50 classes, writes confusion_<step>.csv and .png."""
    table = pd.DataFrame(counts, names, names)
    present = counts.sum(1) > 0
    accuracies = pd.Series(
        np.diag(counts)[present] / counts.sum(1)[present], np.array(names)[present]
    )
    lowest = [f"{name} {value:.3f}" for name, value in accuracies.sort_values().items()]
    console.log(f"accuracy per class, lowest first: {console.join_first(lowest)}")
    if len(names) > _MAX_CLASSES:
        return
    path = os.path.join(directory, f"confusion_{step}")
    storage.write_bytes(f"{path}.csv", table.assign(accuracy=accuracies).to_csv().encode())
    storage.write_bytes(f"{path}.png", draw(table))


def draw(table: pd.DataFrame) -> bytes:
    """Returns a PNG image of a confusion matrix. The numbers are rounded percentages of the class."""
    # Imported here because the imports take half a second.
    from matplotlib import figure as mpl_figure
    from sklearn import metrics

    size = max(3 + 0.35 * len(table), 5)
    figure = mpl_figure.Figure(figsize=(size, size), layout="constrained")
    percent = 100 * table.to_numpy() / np.maximum(table.sum(axis=1).to_numpy()[:, np.newaxis], 1)
    display = metrics.ConfusionMatrixDisplay(percent, display_labels=table.index)
    display.plot(
        ax=figure.add_subplot(),
        cmap="Blues",
        colorbar=False,
        xticks_rotation=90,
        values_format=".0f",
        text_kw={"fontsize": 7},
    )
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100)
    return picture.getvalue()
