"""Files in a run directory: settings, data description and classes from the start of the run, and temporary files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import time

import tensorflow as tf

from checkpoints import weight_files
from config import Config, select_settings, settings_with
from runtime import console, storage
from runtime.errors import UserError, first_line
from sources import classes
from sources.source import Source

_FLAGS, _DATA = "flags.json", "data.json"
# Key in flags.json; the number of steps also depends on the number of training examples.
_LAST_STEP = "last_step"
_RECENT_SECONDS = 600  # Newer temporary files may belong to a running evaluation.
_SHARDS_DIR = re.compile(r"ckpt-\d+_temp")
_SHARD = re.compile(r"part-\d{5}-of-\d{5}\.(index|data-\d{5}-of-\d{5})(\.tempstate\d+)?")
_TEMPORARY_FILE = re.compile(
    r"ckpt-\d+\.(index|data-\d{5}-of-\d{5})\.tempstate\d+|checkpoint\.tmp[0-9a-f]{32}"
    rf"|.+\.\d+{re.escape(storage.TEMPORARY_SUFFIX)}"
)


def check_writable(directory: str) -> None:
    """Creates a run directory. Raises `UserError` if files cannot be written to it."""
    try:
        tf.io.gfile.makedirs(directory)
        if "://" not in directory:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"test")  # Creating an empty file succeeds even on a full disk.
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"--model_dir={directory}: the directory cannot be written to ({reason}). Fix its"
            " permissions, free up disk space, or choose another directory."
        ) from error


def remove_temporary_files(directory: str) -> None:
    """Deletes temporary files left by killed processes. Call this function only while holding the directory lock.

    Deletes only files with names that TensorFlow or this program uses, and skips directories that
    contain other files. Recent temporary files are kept, because a running evaluation may own them.
    """
    for name in tf.io.gfile.listdir(directory):
        name = name.rstrip("/")
        path = os.path.join(directory, name)
        if os.path.islink(path):
            continue
        if _SHARDS_DIR.fullmatch(name) and tf.io.gfile.isdir(path):
            _remove_shards(path)
        elif (
            _TEMPORARY_FILE.fullmatch(name)
            and not tf.io.gfile.isdir(path)
            and (
                not name.endswith(storage.TEMPORARY_SUFFIX)
                or time.time() - tf.io.gfile.stat(path).mtime_nsec / 1e9 > _RECENT_SECONDS
            )
        ):
            tf.io.gfile.remove(path)


def _remove_shards(directory):
    """Deletes the directory of a partially written checkpoint, unless it contains other files."""
    names = tf.io.gfile.listdir(directory)
    if all(_SHARD.fullmatch(name) for name in names):
        for name in names:
            tf.io.gfile.remove(os.path.join(directory, name))
        tf.io.gfile.rmtree(directory)


# ------------------------------------------------------------------------------------------------------- settings


def read_flags(directory: str) -> dict | None:
    """Returns the settings in flags.json, or None if the file is missing or corrupt."""
    content = storage.read_json(os.path.join(directory, _FLAGS))
    return None if content is None else select_settings(content)


def read_last_step(directory: str) -> int | None:
    """Returns the last training step of the run, or None if flags.json does not contain it."""
    last_step = storage.read_json(os.path.join(directory, _FLAGS), default={}).get(_LAST_STEP)
    return last_step if type(last_step) is int and last_step > 0 else None


def write_flags(
    directory: str,
    config: Config,
    class_names: list[str] | None,
    multi_label: bool = False,
    last_step: int | None = None,
) -> None:
    """Writes flags.json and classes.json."""
    flags = dataclasses.asdict(config)
    storage.write_json(
        os.path.join(directory, _FLAGS),
        flags if last_step is None else {**flags, _LAST_STEP: last_step},
    )
    storage.write_json(
        os.path.join(directory, weight_files.CLASSES_FILE),
        dict(names=class_names, multi_label=True) if multi_label else class_names,
    )


def copy_flags(
    config: Config, class_names: list[str] | None, multi_label: bool, directory: str
) -> None:
    """Copies the training run's flags.json and classes.json to `directory`, or writes them if they are missing."""
    write_flags(directory, config, class_names, multi_label)
    for name in (_FLAGS, weight_files.CLASSES_FILE):
        content = storage.read_json(os.path.join(config.model_dir, name), (dict, list))
        if content is not None:
            storage.write_json(os.path.join(directory, name), content)


def check_flags(config: Config) -> None:
    """Compares a resumed run's settings with its initial settings, and logs changes to the training length.

    Raises:
      UserError: a setting that must not change differs, and `allow_flag_changes` is False.
    """
    recorded = read_flags(config.model_dir)
    if recorded is None:
        console.log(
            f"warning: {config.model_dir} has no readable {_FLAGS}, so the program cannot check "
            "whether the flags have changed since the run was started"
        )
        return
    now = dataclasses.asdict(config)
    before = {
        field.name: recorded.get(field.name, field.default) for field in dataclasses.fields(Config)
    }
    changes = {
        name: f"--{name}={before[name]} (now {now[name]})"
        for name in now
        if before[name] != now[name]
    }
    refused = [changes[name] for name in settings_with("identity", "order") if name in changes]
    if refused and not config.allow_flag_changes:
        raise UserError(
            f"--model_dir={config.model_dir}: the run was started with {', '.join(refused)}. Pass"
            " the same flags, choose another directory, or accept the change with"
            " --allow_flag_changes."
        )
    if refused:
        console.log(
            f"warning: the run was started with {', '.join(refused)}; accepted because of"
            " --allow_flag_changes"
        )
    for name in settings_with("length"):
        if name in changes:
            console.log(
                f"the run was started with {changes[name]}: the learning-rate schedule changes"
                " accordingly"
            )


# ----------------------------------------------------------------------------------------------------------- data


def write_data(directory: str, source: Source) -> None:
    """Writes data.json, which describes the data at the start of a run."""
    storage.write_json(os.path.join(directory, _DATA), source.describe_data())


def check_data(config: Config, source: Source) -> None:
    """Compares a resumed run's data and classes with those at the start of the run.

    Raises:
      UserError: the data or the classes differ, and `allow_flag_changes` is False.
    """
    described = storage.read_json(os.path.join(config.model_dir, _DATA))
    if described is None or not isinstance(described.get("splits"), dict):
        console.log(
            f"warning: {config.model_dir} has no readable {_DATA}, so the program cannot check "
            "whether the data has changed since the run was started"
        )
        described = {}
    changes = _data_changes(described, json.loads(json.dumps(source.describe_data())))
    before, _ = weight_files.read_classes(config.model_dir)
    if config.has_linear_head and before is not None and before != source.class_names:
        changes.append(
            "classes"
            f" ({classes.differences(source.class_names, before, 'the data set', 'the run')})"
        )
    if not changes:
        return
    text = (
        f"--dataset={config.dataset}: the data has changed since the run in {config.model_dir} was"
        f" started: {'; '.join(changes)}"
    )
    if not config.allow_flag_changes:
        raise UserError(
            f"{text}. Restore the data, choose another --model_dir, or accept the change with "
            "--allow_flag_changes."
        )
    console.log(f"warning: {text}; accepted because of --allow_flag_changes")


def _data_changes(before, now):
    """Returns one line of text for each difference between two results of `Source.describe_data`."""
    changes = []
    for name, value in before.items():
        if name == "splits":
            changes += [
                f"{split} has {now['splits'].get(split, 0)} examples ({count} at the start)"
                for split, count in value.items()
                if now["splits"].get(split) != count
            ]
            changes += [f"split {split} is new" for split in now["splits"] if split not in value]
        elif name == "files" and value != now.get(name):
            changes.append("the names or sizes of the files differ")
        elif name not in ("classes", "files") and value != now.get(name):
            changes.append(f"{name} {now.get(name)} ({value} at the start)")
    return changes
