"""The output directory of a transfer evaluation: settings, digests, predictions, results."""

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
_RESULTS = ("features_*.npz", "sweep.json", "rate_*", "best_*", "predictions.npz", "result.json")  # names in --out
_NAME_BYTES = 150  # most bytes of a data set's name in the default of --out


def resolve_inputs(kind: str, arguments: argparse.Namespace) -> tuple[tasks.Task, Config, Source, dict]:
    """Returns the `Task`, the `Config` of frozen features, the `Source`, and all settings that results depend on.

    The settings are a dict of JSON's types.

    Raises `UserError` for the checkpoint, the data and its splits.
    """
    task, file = tasks.task_of(arguments), weight_files.open_weights(arguments.checkpoint)
    network = inspection.inspect_checkpoint(arguments.checkpoint, arguments.image_size).config
    out = arguments.out or os.path.join("runs", "transfer", f"{kind}_{_short(arguments.task or task.dataset)}")
    config = Config(**{name: getattr(network, name) for name in settings_with("network")}).replace(
        **{name: getattr(arguments, name) for name in settings_with("data_access")}, mode="eval",
        lineareval_while_pretraining=False, dataset=task.dataset, eval_center_crop=False,
        eval_batch_size=arguments.batch_size, model_dir=out)
    with signals.interruptible():
        source = datasets.open_source(config.dataset, config.data_dir, config.follow_links)
    task = _with_validation(task, source, arguments)
    if source.num_classes is None:
        raise UserError(f"--dataset={task.dataset} has no labels: sort its images into one sub-folder a class")
    if source.multi_label != (task.metric == "mean_average_precision"):
        raise UserError(f"--metric={task.metric} does not fit {source.name}: use mean_average_precision where examples "
                        "have several labels, else another")
    examples = {flag: datasets.check_split(source, flag, split) for flag, split in (
        ("train", task.train_split), ("validation", task.validation_split), ("test", task.test))}
    batch_size = None if kind == "linear" else arguments.batch_size  # Features do not depend on it.
    settings = dict(
        command=kind, weights=f"step {file.step}, content {digest_of_weights(file)}", examples=examples,
        batch_size=batch_size,
        data=source.describe_data(),
        files=image_checks.files_digest(source.paths()) if isinstance(source, FolderSource) else None,
        **{name: getattr(arguments, name, None) for name in ("image_size", "steps", "flags", "seed", "corrupt_images",
                                                      "max_image_pixels")},
        **dataclasses.asdict(task))
    return task, config, source, json.loads(json.dumps(settings))


def _short(dataset):
    """The name of a data set as a part of a file's name."""
    name = slug(dataset)
    too_long = len(name.encode()) > _NAME_BYTES
    return f"{name[-_NAME_BYTES // 4:]}_{digest_of_json(dataset)}" if too_long else name


def _with_validation(task, source, arguments):
    """The task of one's own data, with their validation split, if there is one."""
    if arguments.dataset is None or task.validation is not None or not task.train.isidentifier():
        return task
    if "validation" not in source.split_names or "validation" in task.test:
        return task
    console.log(f"{source.name} has a validation split, which chooses settings")
    return dataclasses.replace(task, validation="validation")


def digest_of_weights(file: WeightFile) -> str:
    """Changes with the weights of a `weight_files.WeightFile`: its index has checksums of all tensors."""
    with tf.io.gfile.GFile(f"{file.path}.index", "rb") as index:
        return hashlib.sha256(index.read()).hexdigest()[:16]


def digest_of_json(content: Any) -> str:
    """A digest of a value of JSON's types, such as settings."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def open_output_dir(config: Config, source: Source, settings: dict) -> Iterator[str]:
    """Creates and locks the directory of the results, writes the settings to it, and yields its path.

    Raises `UserError` if it belongs to other settings, or is in use, or for images that cannot be used.
    """
    out = config.model_dir
    try:
        tf.io.gfile.makedirs(out)
    except tf.errors.OpError as error:
        raise UserError(f"--out={out}: the directory cannot be created ({first_line(error)}). Name another "
                        "directory.") from error
    with Lock(out, "--out"):
        _check_begun(out, settings)
        image_checks.check_images(config, source, is_chief=True)
        storage.write_json(os.path.join(out, _SETTINGS), settings)
        yield out


def _check_begun(out, settings):
    """Raises `UserError` if a directory has results of other settings, or of settings that are not known."""
    begun = storage.read_json(os.path.join(out, _SETTINGS))
    if begun is None or begun.get("command") not in ("linear", *tasks.GRIDS):
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(out))
        found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _RESULTS)]
        if _SETTINGS in names:
            raise UserError(f"--out={out}: its {_SETTINGS} is not one of a transfer, or is corrupt. Name another "
                            "directory.")
        if found:
            raise UserError(f"--out={out}: it holds {found[0]}, but no {_SETTINGS} with the checkpoint and the data of "
                            "these results. Name another directory.")
    elif begun != settings:
        name = next(name for name in {**settings, **begun} if begun.get(name) != settings.get(name))
        raise UserError(f"--out={out} was begun with {name} {begun.get(name)} (now {settings.get(name)}): name another "
                        "directory, or remove this one")


def check_digest(path: str, found: str, digest: str) -> None:
    """Raises `UserError` if a file was written with other settings."""
    if found != digest:
        raise UserError(f"{path}: it was written with other settings, data or weights. Remove it, or name another "
                        "--out.")


def read_predictions(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of predictions, of this program or of run.py.

    Args:
      path: of a .npz file with `labels` and `logits`.

    Returns:
      labels: int64 [n], or [n, classes] of 1, 0 and -1 (unknown).
      logits: float [n, classes]; -inf for classes that were not learnt.

    Raises:
      UserError: the file cannot be read, or is empty, or its arrays are of other types or shapes, or contain NaN.
    """
    labels, logits = read_arrays(path, "labels", "logits")
    problem = problem_of_labels(labels)
    if problem is None and (logits.ndim != 2 or logits.shape[:labels.ndim] != labels.shape):
        problem = f"labels {labels.shape} and logits {logits.shape} do not fit"
    if problem is None and not logits.size:
        problem = "there are no examples, or no classes"
    if problem is None and logits.dtype.kind != "f":
        problem = f"logits are {logits.dtype}, not floating-point numbers"
    if problem is None and not (logits.max(1) < np.inf).all():  # Also false for NaN.
        problem = "logits contain NaN or infinity"
    if problem is None and (logits.max(1) == -np.inf).any():
        problem = "logits of an example are all -infinity"
    if problem is not None:
        raise UserError(f"{path}: {problem}. Write the predictions again, or name another file.")
    return labels.astype(np.int64), logits


def problem_of_labels(labels: np.ndarray) -> str | None:
    """Why an array is not one of labels, as text; None if it is."""
    if labels.dtype.kind not in "iu" or labels.ndim not in (1, 2):
        return f"labels are {labels.dtype} {labels.shape}, not integers [n] or [n, classes]"
    if not labels.size:
        return None
    lowest, highest = (0, 2**62) if labels.ndim == 1 else (-1, 1)
    if labels.min() < lowest or labels.max() > highest:
        return f"labels are {labels.min()} to {labels.max()}, not {'1, 0 or -1' if labels.ndim == 2 else '0 or above'}"
    if labels.ndim == 2 and (labels.max(1) < 0).any():
        return "an example has no known label"
    return None


def read_arrays(path: str, *names: str) -> list[np.ndarray]:
    """Arrays of a .npz file. Raises `UserError`."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = np.load(file)  # Without pickles, which could run code.
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise ValueError("not a .npz file")
            with content:
                return [content[name] for name in names]
    except Exception as error:  # A corrupt archive raises errors of many types: zlib's, zipfile's, NumPy's.
        raise UserError(f"{path} cannot be read as a file of {', '.join(names)} ({first_line(error)}): "
                        "remove it, or name another") from error


def write_results(title: str, task: Task, out: str, labels: np.ndarray, scores: np.ndarray, results: dict) -> None:
    """Writes predictions and results, and prints the results."""
    value = measures.measure(task.metric, labels, scores)
    storage.write_arrays(os.path.join(out, "predictions.npz"), labels=labels, logits=scores)
    storage.write_json(os.path.join(out, "result.json"), dict(results, task=task.title, metric=task.metric, test=value))
    chosen = [(name.replace("_", " "), f"{results[name]:.3g}") for name in ("l2", "learning_rate", "weight_decay")
              if name in results]
    console.log(console.format_table(f"{title} to {task.title}", [
        (task.metric.replace("_", " "), f"{value:.4f}"), *chosen, ("test examples", len(labels)),
        ("results", os.path.join(out, "result.json"))]))
