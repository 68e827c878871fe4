"""Log of a training run: header, views.png, progress, TensorBoard events, history.csv and curves.png."""

from __future__ import annotations

import collections
import csv
import io
import json
import math
import os
from collections.abc import Mapping

import pandas as pd
import tensorflow as tf

import data
import metrics
import model as model_lib
import simclr
from config import Config
from runtime import console, devices, progress, storage
from runtime.errors import UserError, first_line
from sources.source import Source

_HISTORY, _CURVES = "history.csv", "curves.png"
_SECONDS_BETWEEN_ROWS = 10.0
_SECONDS_BETWEEN_DRAWINGS = 60.0  # Drawing takes about a second.
_PREVIEW_EXAMPLES = 8
_PREVIEW_PIXELS = 96  # minimum side length of a view in the preview
_COLLAPSED_STD = 0.01  # The encoder has collapsed if train/embedding_std is below this value.


class TrainingLog:
    """Log of the scalars of a training run: on the terminal, in TensorBoard, history.csv and curves.png.

    Rows that an earlier process wrote to history.csv are kept up to the current step.

    Attributes:
      skipped_steps: number of steps with float16 gradient overflow since the last start or resume.
      writer: writer of TensorBoard events.
    """

    def __init__(
        self,
        directory: str,
        step: int,
        config: Config,
        num_steps: int = 0,
        num_examples: int = 1,
        is_chief: bool = True,
    ):
        """Opens the log.

        Args:
          directory: directory of the run.
          step: number of completed steps.
          config: settings of the run, which TensorBoard shows as text.
          num_steps: number of steps at the end of training.
          num_examples: number of training examples.
          is_chief: whether this process shows the progress and writes history.csv and curves.png.
        """
        self._directory, self._is_chief = directory, is_chief
        self._batch_size, self._num_examples = config.train_batch_size, num_examples
        self._rows = [row for row in read_history(directory) if row["step"] <= step]
        self._since_drawing = self._since_row = progress.stopwatch()
        self._head_name = config.head_name
        levels = metrics.chance_levels(config, config.train_batch_size)
        self._chance_levels = {f"train/{name}": value for name, value in levels.items()}
        self._step, self._results = step, {}
        self.skipped_steps, self._is_collapsed = 0, False
        self._means = metrics.MeanMetrics()
        self._progress = progress.Progress(
            step, num_steps, self._batch_size, is_chief and step < num_steps
        )
        self.writer = storage.event_writer(os.path.join(directory, "train"))
        settings = [
            f"| {name} | {json.dumps(value)} |" for name, value in config.settings().items()
        ]
        with self.writer.as_default(step=step):
            tf.summary.text("flags", "\n".join(["| flag | value |", "|---|---|", *settings]))

    @property
    def images_per_second(self) -> float:
        """Mean rate, excluding compilation and saving."""
        return self._progress.images_per_second

    def update(self, step: int, means: Mapping[str, float], seconds: float, timed: bool) -> None:
        """Adds the steps since the previous update, and shows the progress.

        Args:
          step: number of completed steps.
          means: the scalars' means over the new steps.
          seconds: duration of the new steps.
          timed: False if `seconds` includes compilation.
        """
        count, self._step = step - self._step, step
        self._progress.update(
            step, seconds, metrics.short_labels({**means, **self._results}), timed
        )
        self.skipped_steps += round(count * means.get("train/skipped_steps", 0.0))
        self._means.add({**means, "seconds_per_step": seconds / count} if timed else means, count)

    def write_row(self, is_saved: bool, is_last: bool) -> None:
        """Adds a row with the means since the previous row, at most every 10 seconds unless `is_saved` is True.

        If a checkpoint was saved, also writes the files. Warns if the encoder has collapsed.
        """
        if not is_saved and self._since_row() <= _SECONDS_BETWEEN_ROWS:
            return
        means, self._since_row = self._means.means(), progress.stopwatch()
        self._means.clear()
        means["epoch"] = self._step * self._batch_size / self._num_examples
        if "seconds_per_step" in means:
            means["images_per_second"] = self._batch_size / means.pop("seconds_per_step")
        self.add(self._step, means)
        spread, was_collapsed = means.get("train/embedding_std", 1.0), self._is_collapsed
        self._is_collapsed = spread < _COLLAPSED_STD
        if self._is_chief and self._is_collapsed and not was_collapsed:
            console.log(
                f"warning: the encoder has collapsed. At step {self._step}, all images have nearly"
                f" the same projection (train/embedding_std {spread:.4f}; 1 means an even spread in"
                " all directions). Try a lower --learning_rate or another --temperature."
            )
        if is_saved:
            self.write(is_last)

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
        self._results = {name: value for name, value in results.items() if isinstance(value, float)}
        row = {"step": step, **self._results}
        # When a run resumes, the evaluation of its last step may be repeated.
        self._rows = [
            other for other in self._rows if other["step"] != step or other.keys() != row.keys()
        ] + [row]
        self.write(is_last=True)

    def write(self, is_last: bool) -> None:
        """Writes history.csv. Also writes curves.png, at most once a minute unless `is_last` is True.

        If a file cannot be written, logs a warning instead of raising an error, because training
        must continue.
        """
        if not self._is_chief:
            return
        table = pd.DataFrame(self._rows).to_csv(index=False)
        try:
            storage.write_bytes(os.path.join(self._directory, _HISTORY), table.encode())
            if is_last or self._since_drawing() >= _SECONDS_BETWEEN_DRAWINGS:
                curves = draw_curves(self._rows, self._chance_levels, self._head_name)
                storage.write_bytes(os.path.join(self._directory, _CURVES), curves)
                self._since_drawing = progress.stopwatch()
        except UserError as error:
            console.log(f"warning: {error}")

    def close(self) -> None:
        """Closes the progress bar."""
        self._progress.close()


def read_history(directory: str) -> list[dict[str, float]]:
    """Returns the rows of history.csv as dicts of `step` and scalars, or an empty list if they cannot be parsed."""
    try:
        with tf.io.gfile.GFile(os.path.join(directory, _HISTORY)) as file:
            return [
                {
                    **{name: float(value) for name, value in row.items() if value},
                    "step": int(row["step"]),
                }
                for row in csv.DictReader(file.read().splitlines())
            ]
    except (tf.errors.NotFoundError, csv.Error, ValueError, KeyError, TypeError):
        return []


def draw_curves(
    rows: list[dict[str, float]], chance_levels: Mapping[str, float], head_name: str
) -> bytes:
    """Returns a PNG image with one panel per metric, and dashed lines at chance level.

    Args:
      rows: dicts with a step and its metrics.
      chance_levels: chance levels of metrics that `rows` does not contain, keyed by the metric.
      head_name: see `Config.head_name`.
    """
    # Imported here because the import takes half a second.
    from matplotlib import figure as mpl_figure

    table, panels = pd.DataFrame(rows), collections.defaultdict(list)
    suffix, levels = metrics.CHANCE, dict(chance_levels)
    for row in rows:
        levels |= {key.removesuffix(suffix): row[key] for key in row if key.endswith(suffix)}
    for metric in metrics.METRICS:
        if metric.panel and metric.key in table:
            panels[metric.panel].append(metric)
    columns, lines_of_panels = max(min(len(panels), 3), 1), max(math.ceil(len(panels) / 3), 1)
    figure = mpl_figure.Figure(figsize=(4.5 * columns, 3.2 * lines_of_panels), layout="constrained")
    for index, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines_of_panels, columns, index)
        for metric in lines:
            points = table[["step", metric.key]].dropna().to_numpy()
            marker = "o" if metric.key.startswith("eval/") or len(points) == 1 else None
            label = "evaluation" if metric.label == title else metric.label
            label = label.replace("linear head", head_name)
            (line,) = axes.plot(*points.T, label=label, marker=marker, markersize=4)
            if metric.key in levels:
                axes.axhline(
                    levels[metric.key],
                    linestyle="--",
                    linewidth=1,
                    color=line.get_color(),
                    label=f"chance level ({label})",
                )
        axes.set_title(title.replace("linear head", head_name), fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


# ------------------------------------------------------------------------------------ at the start of a run


def log_header(
    config: Config,
    model: model_lib.Model,
    steps: model_lib.Steps,
    num_examples: int,
    directory: str,
    strategy: tf.distribute.Strategy,
) -> None:
    """Logs the network and the schedule of a run that is about to train."""
    weights = sum(variable.shape.num_elements() for variable in model.trainable_variables) / 1e6
    micro_batches = (
        f" in micro-batches of {config.micro_batch_size}" if config.micro_batch_size else ""
    )
    console.log(
        f"network: {config.network_name}, {weights:.1f} million trainable parameters,"
        f" {config.image_size} x {config.image_size} pixels, batch size"
        f" {config.train_batch_size}{micro_batches}"
    )
    peak = model_lib.build_schedule(config, num_examples).peak
    console.log(
        f"training: {steps.train} steps"
        f" ({steps.train * config.train_batch_size / num_examples:.3g} epochs), learning rate"
        f" {peak:.3g} after {steps.warmup} warm-up steps; examples: {directory}/views.png"
    )
    total = model.count_params()
    # A checkpoint also contains the optimizer's values for each trainable weight.
    slots = weights * 1e6 * (2 if config.optimizer == "adam" else 1)
    count = min(config.keep_checkpoint_max, math.ceil(steps.train / steps.checkpoint))
    size = 4e-9 * (count * (total + slots) + (1 + config.keep_best) * total)
    console.log(f"disk space: {size:.1f} GB for the SavedModel and checkpoints ({count})")
    if config.mode == "train" and not config.eval_epochs:
        console.log("nothing will be evaluated; --mode=train_then_eval evaluates the last step")
    if levels := metrics.chance_levels(config, config.train_batch_size):
        text = ", ".join(f"{name} {value:.3g}" for name, value in levels.items())
        console.log(f"chance level during training: {text}")
    is_compiled = devices.compiles_step(config.jit_compile, strategy)
    console.log(f"compiling the training step{' with XLA' if is_compiled else ''}")


def _fit(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes an image to fit into a square, and pads it. Returns float32 [size, size, 3] in [0, 1]."""
    shape = [max(1, round(side * size / max(image.shape[:2]))) for side in image.shape[:2]]
    resized = tf.image.convert_image_dtype(
        tf.cast(tf.image.resize(image, shape, antialias=True), tf.uint8), tf.float32
    )
    return tf.image.resize_with_crop_or_pad(resized, size, size)


def write_preview(
    config: Config, source: Source, directory: str, writer: tf.summary.SummaryWriter
) -> None:
    """Writes a grid of images to views.png and to TensorBoard. Each column shows an image with its views below it."""
    count = min(_PREVIEW_EXAMPLES, source.num_examples(config.train_split))
    images, _ = next(
        iter(data.build_view_pairs(config, source, config.train_split, config.seed, count))
    )
    originals = [
        _fit(source.decode(item), config.image_size)
        for _, item, _ in source.records(config.train_split).take(count)
    ]
    rows = [tf.stack(originals), *simclr.views(images, config, 0)]
    scale = -(-_PREVIEW_PIXELS // config.image_size)
    images = tf.concat([tf.cast(row, tf.float32) for row in rows], 0)
    images = tf.repeat(tf.repeat(images, scale, axis=1), scale, axis=2)
    images = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]], constant_values=1.0)
    rows = tf.split(images, len(rows))
    grid = tf.concat([tf.concat(tf.unstack(row), axis=1) for row in rows], axis=0)
    grid = tf.image.convert_image_dtype(grid, tf.uint8, saturate=True)
    storage.write_bytes(os.path.join(directory, "views.png"), tf.io.encode_png(grid).numpy())
    with writer.as_default(step=0):
        tf.summary.image("views", grid[tf.newaxis])
