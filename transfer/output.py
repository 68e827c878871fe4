"""The inputs and the output directory of a transfer evaluation, and files with predictions."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

import checks
import metrics
import model as model_lib
from checkpoints import computed_from, inspection, loading
from checkpoints.lock import Lock
from config import Config, settings_with
from runtime import console, signals, storage
from runtime.errors import UserError, first_line
from runtime.paths import slug
from sources import datasets, image_checks
from sources.files import FileSource
from sources.source import Source
from transfer import measures, tasks
from transfer.tasks import Task


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The network, the data and the output directory of a transfer evaluation.

    Attributes:
      protocol: `linear`, `finetune` or `scratch`.
      checkpoint: path of the weights, of a single checkpoint even if newer ones appear.
      task: the `Task`, with the splits that are used.
      config: settings for extracting features. `model_dir` is the output directory.
      source: the opened data set.
      weights: digest of the weights, or None for `scratch`.
      trained_examples: number of test examples that were also used for training.
    """

    protocol: str
    checkpoint: str
    task: Task
    config: Config
    source: Source
    weights: str | None
    trained_examples: int

    def load_network(self) -> keras.Model:
        """Builds the network and loads its encoder and, if the checkpoint contains one, its projection head."""
        model = model_lib.build_model(self.config, None)
        loaded = loading.load_parts(model, self.checkpoint, ("encoder",))
        console.log_lines(loaded.file.notes)
        return model

    def settings(self, config: Config, **others: object) -> dict:
        """Returns everything that affects the results of `config`, to identify them.

        Returns:
          A JSON-serializable dict of the settings that differ from their defaults, except for paths
          of weights, a description of the data, and `others`.
        """
        excluded = (*settings_with("output", "no_effect"), "checkpoint", "eval_batch_size")
        settings = {
            name: value
            for name, value in config.settings().items()
            if name not in excluded and value != getattr(Config, name)
        }
        if isinstance(self.source, FileSource):
            others["files"] = self.source.files_digest()
        return dict(settings, data=self.source.describe_data(), **others)

    @contextlib.contextmanager
    def open_output_dir(self) -> Iterator[Lock]:
        """Creates and locks the output directory, checks the images, and yields the lock.

        Raises `UserError` if the directory is in use or if images are unusable.
        """
        storage.makedirs(self.config.model_dir)
        with Lock(self.config.model_dir, "--out") as lock:
            image_checks.check_images(self.config, self.source)
            with image_checks.naming_unusable(self.source, FileSource.paths):
                yield lock

    def write_results(
        self, labels: np.ndarray, scores: np.ndarray, results: dict, record: dict | None = None
    ) -> None:
        """Writes predictions.npz and result.json to the output directory, and prints the results.

        `record` describes what `scores` are computed from (see `computed_from`), by default the
        checkpoint.
        """
        task, out = self.task, self.config.model_dir
        value = measures.measure(task.metric, labels, scores)
        storage.write_arrays(os.path.join(out, "predictions.npz"), labels=labels, logits=scores)
        interval = ""
        if task.metric == "top_1":  # The other metrics are not fractions of images.
            interval = " [{:.4f}, {:.4f}]".format(*metrics.wilson_interval(value, len(labels)))
        path = os.path.join(out, "result.json")
        record = record or computed_from.describe(
            self.config.replace(train_split=task.trainval_split, eval_split=task.test),
            self.source,
            self.weights,
            None,
            self.trained_examples,
        )
        storage.write_json(
            path,
            dict(
                results,
                task=task.title,
                metric=task.metric,
                test=value,
                checkpoint=self.checkpoint,
                computed_from=dict(record, eval_protocol=self.protocol),
            ),
        )
        console.log(
            console.format_table(
                f"transfer to {task.title} ({self.protocol})",
                [
                    (task.metric.replace("_", " "), f"{value:.4f}{interval}"),
                    *(
                        (name.replace("_", " "), f"{number:.3g}")
                        for name, number in results.items()
                        if name != "validation"
                    ),
                    ("checkpoint", self.checkpoint),
                    ("test examples", len(labels)),
                    ("results", path),
                ],
            )
        )


def resolve_inputs(arguments: argparse.Namespace) -> Inputs:
    """Resolves the checkpoint, the data set and its splits from the parsed arguments.

    Raises:
      UserError: the checkpoint, the data set or a split cannot be used.
    """
    task = tasks.task_from_arguments(arguments)
    given = storage.without_none(dict(image_size=arguments.image_size, ft_proj_selector=0))
    info = inspection.inspect_checkpoint(arguments.checkpoint, given)
    network = info.config
    name = slug(arguments.task or task.dataset)[-40:]  # File names are limited to 255 bytes.
    recorded = {name: getattr(network, name) for name in settings_with("network", "pixels")}
    access = {name: getattr(arguments, name) for name in settings_with("data_access")}
    config = Config(**recorded).replace(
        **storage.without_none(access),
        mode="eval",
        lineareval_while_pretraining=False,
        dataset=task.dataset,
        eval_center_crop=False,
        eval_batch_size=arguments.batch_size,
        model_dir=arguments.out or os.path.join("runs", "transfer", f"{arguments.protocol}_{name}"),
    )
    with signals.interruptible():
        source = datasets.open_configured(config)
    task = _adapt_splits(task, source, arguments)
    if config.white_level == "auto":
        config = config.replace(white_level=image_checks.find_white_level(source, task.train))
        source.conversion = config.conversion
    if source.num_classes is None:
        raise UserError(
            f"--dataset={task.dataset}: the data set has no labels. Use a data set with labels (in"
            " an image folder, one sub-folder per class)."
        )
    if source.multi_label != (task.metric == "mean_average_precision"):
        supported = "mean_average_precision" if source.multi_label else "top_1 or mean_per_class"
        raise UserError(
            f"--metric={task.metric}: the metric does not fit the labels of {source.name}. Use"
            f" {supported}."
        )
    for flag, split in task.splits.items():
        datasets.check_split(source, flag, split)
    train, validation, test = task.splits.values()
    checks.count_overlap(source, "validation", validation, [train])
    weights = None
    weights_splits = []
    if arguments.protocol != "scratch":
        weights = info.file.digest()
        weights_splits = checks.weights_split(source, info.trained_on, network.train_split)
    count = checks.count_overlap(source, "test", test, [train, validation, *weights_splits])
    return Inputs(arguments.protocol, info.file.location, task, config, source, weights, count)


def _adapt_splits(task: Task, source: Source, arguments: argparse.Namespace) -> Task:
    """Returns the task with its default splits adapted to the user's own data set.

    A `validation` split is used for model selection. If `train` is the only split, its last fifth
    becomes the test split, and the last fifth of the remaining examples becomes the validation
    split.
    """
    names = source.split_names
    if not arguments.dataset:
        return task
    if names == ["train"] and not (arguments.train or arguments.validation or arguments.test):
        splits = dict(train="train[:64%]", validation="train[64%:80%]", test="train[80%:]")
        console.log(
            f"train: train[:64%], validation: train[64%:80%], test: train[80%:] ({source.name} has"
            " only a train split)"
        )
        return dataclasses.replace(task, **splits)
    if task.validation is None and "validation" in names and "validation" not in task.test:
        console.log(f"using the validation split of {source.name} for model selection")
        return dataclasses.replace(task, validation="validation")
    return task


def read_predictions(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads a prediction file written by this program or by run.py.

    Args:
      path: .npz file with the arrays `labels` and `logits`.

    Returns:
      labels: int64 [n], or int64 [n, classes] with values 1, 0 and -1 (unknown).
      logits: float [n, classes]; -inf for classes that could not be fitted.

    Raises:
      UserError: the file is unreadable or empty, or an array has an invalid type, shape or value.
    """
    labels, logits = read_arrays(path, "labels", "logits")
    if not (
        labels.dtype.kind in "iu"
        and logits.ndim == 2
        and labels.shape == logits.shape[: labels.ndim]
        and labels.reshape(len(logits), -1).max(1).min() >= 0
        and np.isfinite(logits.max(1)).all()
    ):
        raise UserError(
            f"{path}: expected integer labels [n] from 0, or [n, classes] with values 1, 0 and -1, and"
            " logits [n, classes] without NaN and Inf. Create the file again, or use another one."
        )
    return labels.astype(np.int64), logits


def read_arrays(path: str, *names: str) -> Any:
    """Returns a list of the named arrays in a .npz file. Raises `UserError` if they cannot be read."""
    try:
        # By default, NumPy rejects pickles, which could execute code.
        with tf.io.gfile.GFile(path, "rb") as file, np.load(file) as content:
            return [content[name] for name in names]
    except Exception as error:  # Corrupt archives raise errors from zlib, zipfile or NumPy.
        raise UserError(
            f"{path}: the arrays {', '.join(names)} cannot be read ({first_line(error)}). Check the"
            " path, or delete the file and create it again."
        ) from error
