"""The output directory of a transfer evaluation: settings, digests, predictions and results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from checkpoints import inspection, weight_files
from checkpoints.lock import Lock
from checkpoints.weight_files import WeightFile
from config import Config, settings_with
from runtime import console, signals, storage
from runtime.errors import UserError, first_line
from runtime.paths import slug
from sources import datasets, image_checks
from sources.folders import FolderSource
from sources.source import Source
from transfer import measures, tasks
from transfer.tasks import Task

_SETTINGS = "settings.json"
# files in --out
_RESULTS = ("features_*.npz", "sweep.json", "rate_*", "best_*", "predictions.npz", "result.json")
_READ_BYTES = 2**24
_MAX_NAME_BYTES = 150  # Maximum length of the data set's name in the default value of --out.


def resolve_inputs(
    protocol: str, arguments: argparse.Namespace
) -> tuple[Task, Config, Source, dict]:
    """Resolves the checkpoint, the data set and its splits.

    Args:
      protocol: `linear`, `finetune` or `scratch`.
      arguments: parsed command line.

    Returns:
      The `Task`, the `Config` for extracting features, the opened `Source`, and a JSON-serializable
      dict of all settings that affect the results.

    Raises:
      UserError: the checkpoint, the data set or a split cannot be used.
    """
    task, file = (
        tasks.task_from_arguments(arguments),
        weight_files.open_weights(arguments.checkpoint),
    )
    network = inspection.inspect_checkpoint(arguments.checkpoint, arguments.image_size).config
    out = arguments.out or os.path.join(
        "runs", "transfer", f"{protocol}_{_short_name(arguments.task or task.dataset)}"
    )
    config = Config(**{name: getattr(network, name) for name in settings_with("network")}).replace(
        **{name: getattr(arguments, name) for name in settings_with("data_access")},
        mode="eval",
        lineareval_while_pretraining=False,
        dataset=task.dataset,
        eval_center_crop=False,
        eval_batch_size=arguments.batch_size,
        model_dir=out,
    )
    with signals.interruptible():
        source = datasets.open_source(config.dataset, config.data_dir)
    task = _adapt_splits(task, source, arguments)
    if source.num_classes is None:
        raise UserError(
            f"--dataset={task.dataset}: the data set has no labels. Use a data set with labels (in"
            " an image folder, one sub-folder per class)."
        )
    if source.multi_label != (task.metric == "mean_average_precision"):
        labels, remedy = (
            ("multiple labels", "mean_average_precision")
            if source.multi_label
            else ("one label", "top_1 or mean_per_class")
        )
        raise UserError(
            f"--metric={task.metric}: {source.name} has {labels} per example. Use {remedy}."
        )
    examples = {
        flag: datasets.check_split(source, flag, split)
        for flag, split in (
            ("train", task.train_split),
            ("validation", task.validation_split),
            ("test", task.test),
        )
    }
    # Features do not depend on the batch size.
    batch_size = None if protocol == "linear" else arguments.batch_size
    settings = dict(
        command=protocol,
        weights=f"step {file.step}, content {weights_digest(file)}",
        examples=examples,
        batch_size=batch_size,
        data=source.describe_data(),
        files=(
            image_checks.files_digest(source.paths()) if isinstance(source, FolderSource) else None
        ),
        **{
            name: getattr(arguments, name, None)
            for name in ("image_size", "steps", "flags", "seed", "corrupt_images")
        },
        **dataclasses.asdict(task),
    )
    return task, config, source, json.loads(json.dumps(settings))


def _short_name(dataset):
    """Returns a data set's name in a form that can be used in a directory name."""
    name = slug(dataset)
    too_long = len(name.encode()) > _MAX_NAME_BYTES
    return f"{name[-_MAX_NAME_BYTES // 4 :]}_{json_digest(dataset)}" if too_long else name


def _adapt_splits(task, source, arguments):
    """Returns the task with its default splits adapted to the user's own data set.

    A `validation` split is used for model selection. If `train` is the only split, its last fifth
    becomes the test split, and the last fifth of the remaining examples becomes the validation
    split.
    """
    if (
        arguments.dataset
        and source.split_names == ["train"]
        and not (arguments.train or arguments.validation or arguments.test)
    ):
        console.log(
            f"train: train[:64%], validation: train[64%:80%], test: train[80%:] ({source.name} has"
            " only a train split)"
        )
        return dataclasses.replace(
            task, train="train[:64%]", validation="train[64%:80%]", test="train[80%:]"
        )
    if arguments.dataset is None or task.validation is not None or not task.train.isidentifier():
        return task
    if "validation" not in source.split_names or "validation" in task.test:
        return task
    console.log(f"using the validation split of {source.name} for model selection")
    return dataclasses.replace(task, validation="validation")


def weights_digest(file: WeightFile) -> str:
    """Returns a digest of a checkpoint's weights.

    This is a hash of the PyTorch file or, in other formats, of the index file, which contains the
    checksums of all tensors.
    """
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(file.path if file.is_torch else f"{file.path}.index", "rb") as content:
        while block := content.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()[:16]


def json_digest(content: Any) -> str:
    """Returns a digest of a JSON-serializable value, such as a dict of settings."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def open_output_dir(config: Config, source: Source, settings: dict) -> Iterator[str]:
    """Creates and locks the output directory, writes the settings to it, and yields its path.

    Raises `UserError` if the directory is in use, if it contains results computed with different
    settings, or if images are unusable.
    """
    out = config.model_dir
    try:
        tf.io.gfile.makedirs(out)
    except tf.errors.OpError as error:
        raise UserError(
            f"--out={out}: the directory cannot be created ({first_line(error)}). Use another "
            "directory."
        ) from error
    with Lock(out, "--out"):
        _check_settings(out, settings)
        image_checks.check_images(config, source, is_chief=True)
        storage.write_json(os.path.join(out, _SETTINGS), settings)
        yield out


def _check_settings(out, settings):
    """Raises `UserError` if a directory contains results computed with different or unknown settings."""
    previous = storage.read_json(os.path.join(out, _SETTINGS))
    if previous is None or previous.get("command") not in ("linear", *tasks.GRIDS):
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(out))
        results = [
            name
            for name in names
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _RESULTS)
        ]
        if _SETTINGS in names:
            raise UserError(
                f"--out={out}: {_SETTINGS} is corrupt or belongs to another program. Use another "
                "directory."
            )
        if results:
            raise UserError(
                f"--out={out}: {_SETTINGS} is missing, so the checkpoint and data used for "
                f"{results[0]} are unknown. Use another directory."
            )
    elif previous != settings:
        name = next(
            name for name in {**settings, **previous} if previous.get(name) != settings.get(name)
        )
        raise UserError(
            f"--out={out}: the existing results were computed with {name}={previous.get(name)}, "
            f"not {settings.get(name)}. Use another directory, or delete this one."
        )


def check_digest(path: str, digest: str | None, expected: str) -> None:
    """Raises `UserError` if the digest stored in a file differs from that of the current settings."""
    if digest != expected:
        raise UserError(
            f"{path}: the file was written with different settings, data or weights. Delete it, or"
            " use another --out."
        )


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
    problem = find_label_problem(labels)
    if problem is None and (logits.ndim != 2 or logits.shape[: labels.ndim] != labels.shape):
        problem = f"the shapes of labels {labels.shape} and logits {logits.shape} do not match"
    if problem is None and not logits.size:
        problem = "the file has no examples or no classes"
    if problem is None and logits.dtype.kind != "f":
        problem = f"logits have type {logits.dtype}, not a floating-point type"
    if problem is None and not (logits.max(1) < np.inf).all():
        # The comparison is also false for NaN.
        problem = "logits contain NaN or Inf"
    if problem is None and (logits.max(1) == -np.inf).any():
        problem = "all logits of an example are -Inf"
    if problem is not None:
        raise UserError(f"{path}: {problem}. Recreate the file, or use another one.")
    return labels.astype(np.int64), logits


def find_label_problem(labels: np.ndarray) -> str | None:
    """Returns a description of the problem with an array of labels, or None if the labels are valid."""
    if labels.dtype.kind not in "iu" or labels.ndim not in (1, 2):
        return f"labels are {labels.dtype} {labels.shape}, not integers [n] or [n, classes]"
    if not labels.size:
        return None
    lowest, highest = (0, 2**62) if labels.ndim == 1 else (-1, 1)
    if labels.min() < lowest or labels.max() > highest:
        expected = "1, 0 and -1" if labels.ndim == 2 else "0 and above"
        return f"label values range from {labels.min()} to {labels.max()}; expected {expected}"
    if labels.ndim == 2 and (labels.max(1) < 0).any():
        return "an example has no known label"
    return None


def read_arrays(path: str, *names: str) -> list[np.ndarray]:
    """Reads the named arrays from a .npz file. Raises `UserError` if this fails."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = np.load(file)  # By default, NumPy rejects pickles, which could execute code.
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise ValueError("not a .npz file")
            with content:
                return [content[name] for name in names]
    except Exception as error:  # Corrupt archives raise errors from zlib, zipfile or NumPy.
        raise UserError(
            f"{path}: the arrays {', '.join(names)} cannot be read ({first_line(error)}). Delete"
            " the file, or use another one."
        ) from error


def write_results(
    title: str, task: Task, out: str, labels: np.ndarray, scores: np.ndarray, results: dict
) -> None:
    """Writes predictions.npz and result.json, and prints the results."""
    value = measures.measure(task.metric, labels, scores)
    storage.write_arrays(os.path.join(out, "predictions.npz"), labels=labels, logits=scores)
    storage.write_json(
        os.path.join(out, "result.json"),
        dict(results, task=task.title, metric=task.metric, test=value),
    )
    selected = [
        (name.replace("_", " "), f"{results[name]:.3g}")
        for name in ("l2", "learning_rate", "weight_decay")
        if name in results
    ]
    console.log(
        console.format_table(
            f"{title} on {task.title}",
            [
                (task.metric.replace("_", " "), f"{value:.4f}"),
                *selected,
                ("test examples", len(labels)),
                ("results", os.path.join(out, "result.json")),
            ],
        )
    )
