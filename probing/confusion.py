"""Confusion matrix of a classifier, as a table and as a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import numpy as np
import pandas as pd

from runtime import console, storage

_MAX_CLASSES = 50  # With more classes, the picture would not be readable.


def report(
    directory: str, step: int, labels: np.ndarray, logits: np.ndarray, names: Sequence[str]
) -> None:
    """Logs the lowest accuracies of classes and, for at most 50 classes, writes confusion_<step>.csv and .png.

    Args:
      directory: directory of the files.
      step: step of the checkpoint.
      labels: int [n].
      logits: [n, classes].
      names: class names.
    """
    # Imported here because the import takes half a second.
    from sklearn import metrics

    counts = metrics.confusion_matrix(labels, logits.argmax(-1), labels=range(len(names)))
    table = pd.DataFrame(counts, names, names)
    # Classes without examples have no accuracy.
    accuracies = (pd.Series(np.diag(counts), names) / table.sum(axis=1)).dropna()
    lowest = [f"{name} {value:.3f}" for name, value in accuracies.sort_values().items()]
    console.log(f"accuracy per class, lowest first: {console.join_first(lowest)}")
    if len(names) > _MAX_CLASSES:
        return
    path = os.path.join(directory, f"confusion_{step}")
    storage.write_bytes(f"{path}.csv", table.assign(accuracy=accuracies).to_csv().encode())
    storage.write_bytes(f"{path}.png", draw(table))


def draw(table: pd.DataFrame) -> bytes:
    """Returns a PNG image of a confusion matrix (rows: classes, columns: predicted classes), in rounded percent."""
    # Imported here because the imports take half a second.
    from matplotlib import figure as mpl_figure
    from sklearn import metrics

    size = max(3 + 0.35 * len(table), 5)
    figure = mpl_figure.Figure(figsize=(size, size), layout="constrained")
    percent = 100 * table.div(table.sum(axis=1).clip(lower=1), axis=0)
    metrics.ConfusionMatrixDisplay(percent.to_numpy(), display_labels=table.index).plot(
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
