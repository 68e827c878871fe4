"""Log of a training run in its directory: TensorBoard events, history.csv and curves.png."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Mapping

import tensorflow as tf

from runtime import console, storage
from runtime.errors import UserError, first_line

FILES = _HISTORY, _CURVES = "history.csv", "curves.png"
_SECONDS_BETWEEN_DRAWINGS = 60.0  # Drawing takes about a second.

# Maps panel titles to dicts that map names of scalars to labels. Panels without data are not drawn.
_PANELS = {
    "contrastive loss": {"train/contrast_loss": "training", "eval/contrast_loss": "evaluation"},
    "contrastive accuracy": {"train/contrast_acc": "training", "eval/contrast_acc": "evaluation"},
    "loss of the linear head": {"train/supervised_loss": "training"},
    "accuracy of the linear head": {
        "train/supervised_acc": "training",
        "eval/label_top_1_accuracy": "evaluation",
    },
    "accuracy of the nearest neighbors": {
        "eval/knn_top_1_accuracy": "10 neighbors",
        "eval/knn_weighted_top_1_accuracy": "200 neighbors, weighted",
    },
    "11-point mAP of the linear head": {"eval/label_mean_average_precision": "evaluation"},
    "learning rate": {"learning_rate": "learning rate"},
}


class TrainingLog:
    """Scalars of a training run, which are written to TensorBoard, history.csv and curves.png."""

    def __init__(self, directory: str, step: int, settings: Mapping[str, object]):
        """Opens the log.

        Args:
          directory: directory of the run. Rows that an earlier process wrote are kept up to `step`.
          step: number of completed steps.
          settings: settings of the run, which TensorBoard shows as text.
        """
        self._directory = directory
        self._rows = [row for row in read_history(directory) if row["step"] <= step]
        self._drawn_at = time.monotonic()
        self.writer = tf.summary.create_file_writer(os.path.join(directory, "train"))
        with self.writer.as_default(step=step):
            tf.summary.text(
                "flags",
                "\n".join(
                    [
                        "| flag | value |",
                        "|---|---|",
                        *(f"| {name} | {json.dumps(value)} |" for name, value in settings.items()),
                    ]
                ),
            )

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of a step, and writes them to TensorBoard."""
        self._rows.append({"step": step, **scalars})
        try:
            storage.write_scalars(self.writer, step, scalars)
        except tf.errors.OpError as error:  # A failed TensorBoard write must not stop training.
            console.log(
                f"warning: TensorBoard events for step {step} could not be written"
                f" ({first_line(error)})"
            )

    def add_results(self, step: int, results: Mapping[str, float]) -> None:
        """Adds the results of an evaluation, and writes history.csv and curves.png, but no TensorBoard events."""
        row = {
            "step": step,
            **{name: value for name, value in results.items() if name != "global_step"},
        }
        # When a run resumes, the evaluation of its last step is repeated.
        self._rows = [
            other for other in self._rows if other["step"] != step or other.keys() != row.keys()
        ] + [row]
        self.write(is_last=True)

    def write(self, is_last: bool) -> None:
        """Writes history.csv. Also writes curves.png, at most once a minute unless `is_last` is True.

        If a file cannot be written, logs a warning instead of raising an error, because training
        must continue.
        """
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        text = io.StringIO()
        rows = csv.DictWriter(text, names, lineterminator="\n")
        rows.writeheader()
        rows.writerows(self._rows)
        draws = is_last or time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS
        try:
            storage.write_bytes(os.path.join(self._directory, _HISTORY), text.getvalue().encode())
            if draws:
                storage.write_bytes(os.path.join(self._directory, _CURVES), draw_curves(self._rows))
                self._drawn_at = time.monotonic()
        except UserError as error:
            console.log(f"warning: {error}")


def read_history(directory: str) -> list[dict[str, float]]:
    """Returns the rows of history.csv as dicts of `step` and scalars. Invalid lines are skipped.

    Raises `UserError` if the file cannot be read.
    """
    path = os.path.join(directory, _HISTORY)
    if not storage.is_file(path):
        return []
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            lines = [line.split(",") for line in file.read().decode(errors="replace").splitlines()]
    except tf.errors.OpError as error:
        raise UserError(
            f"{path}: the file cannot be read ({first_line(error)}). Make it readable, or"
            " remove it."
        ) from error
    history = []
    for line in lines[1:]:
        try:
            values = {name: float(value) for name, value in zip(lines[0], line) if value}
            history.append({**values, "step": int(values["step"])})
        except (ValueError, KeyError, OverflowError):  # The line was edited or is incomplete.
            continue
    return history


def draw_curves(rows: list[dict[str, float]]) -> bytes:
    """Returns a PNG image with one panel per metric. Each item of `rows` is a dict with a step and its metrics."""
    # Imported here because the import takes half a second.
    from matplotlib import figure as mpl_figure

    names = {name for row in rows for name in row}
    panels = {title: lines for title, lines in _PANELS.items() if names & lines.keys()}
    columns, lines_of_panels = max(min(len(panels), 3), 1), max(math.ceil(len(panels) / 3), 1)
    figure = mpl_figure.Figure(figsize=(4.5 * columns, 3.2 * lines_of_panels), layout="constrained")
    for index, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(lines_of_panels, columns, index + 1)
        for name, label in lines.items():
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                marker = "o" if name.startswith("eval/") or len(points) == 1 else None
                axes.plot(*zip(*points), label=label, marker=marker, markersize=4)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()
