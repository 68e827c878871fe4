"""The directory of a run: the settings, data and classes that it was started with, temporary files."""

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
_YOUNG_SECONDS = 600  # age in seconds below which temporary files may belong to a running evaluation
_PARTS_DIR = re.compile(r"ckpt-\d+_temp")
_PART = re.compile(r"part-\d{5}-of-\d{5}\.(index|data-\d{5}-of-\d{5})(\.tempstate\d+)?")
_LEFTOVERS = re.compile(
    r"ckpt-\d+\.(index|data-\d{5}-of-\d{5})\.tempstate\d+|checkpoint\.tmp[0-9a-f]{32}"
    r"|((flags|classes|images|data|result(_\d+)?)\.json|predictions_\d+\.npz)\.\d+\.tmp")


def check_writable(directory: str) -> None:
    """Creates the directory of a run. Raises `UserError` if files cannot be written there."""
    try:
        tf.io.gfile.makedirs(directory)
        if "://" not in directory:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"room for a byte?")
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"--model_dir={directory} cannot be written to ({reason}): make room, or choose another"
                        ) from error


def remove_temporary_files(directory: str) -> None:
    """Removes temporary files of killed writers. Call it only while holding the lock of the directory.

    Only files with the exact names that TensorFlow's and this program's writers use are removed, never a directory with
    other content. Recent temporary files of results are kept: a running evaluation may own them.
    """
    for name in tf.io.gfile.listdir(directory):
        name = name.rstrip("/")
        path = os.path.join(directory, name)
        if os.path.islink(path):
            continue
        if _PARTS_DIR.fullmatch(name) and tf.io.gfile.isdir(path):
            _remove_parts(path)
        elif _LEFTOVERS.fullmatch(name) and not tf.io.gfile.isdir(path) and (
                not name.endswith(".tmp") or time.time() - tf.io.gfile.stat(path).mtime_nsec / 1e9 > _YOUNG_SECONDS):
            tf.io.gfile.remove(path)


def _remove_parts(directory):
    """Removes the parts of a checkpoint that was being written, and their directory if it holds nothing else."""
    names = tf.io.gfile.listdir(directory)
    if all(_PART.fullmatch(name) for name in names):
        for name in names:
            tf.io.gfile.remove(os.path.join(directory, name))
        tf.io.gfile.rmtree(directory)  # Empty.


# ------------------------------------------------------------------------------------------------------- settings


def read_flags(directory: str) -> dict | None:
    """Returns the settings in flags.json, or None if there is no such file or it is corrupt."""
    content = storage.read_json(os.path.join(directory, _FLAGS))
    return None if content is None else select_settings(content)


def check_no_user_files(directory: str) -> None:
    """Raises `UserError` if a directory without checkpoints has files of the user under the names of a run's files."""
    if (read_flags(directory) or {}).get("train_mode") is not None:
        return  # A run was started here, and wrote no checkpoint yet.
    for name in (_FLAGS, weight_files.CLASSES_FILE, _DATA, "views.png"):
        if tf.io.gfile.exists(os.path.join(directory, name)):
            raise UserError(f"--model_dir={directory}: {name} was not written by a run, and would be replaced. Choose "
                            "another directory, or move it.")


def write_flags(directory: str, config: Config, class_names: list[str] | None, multi_label: bool = False) -> None:
    """Writes flags.json and classes.json."""
    storage.write_json(os.path.join(directory, _FLAGS), dataclasses.asdict(config))
    storage.write_json(os.path.join(directory, weight_files.CLASSES_FILE),
                       dict(names=class_names, multi_label=True) if multi_label else class_names)


def copy_flags(config: Config, class_names: list[str] | None, multi_label: bool, directory: str) -> None:
    """Writes both to `directory`: the training's, where `config.model_dir` has them, rather than an evaluation's."""
    write_flags(directory, config, class_names, multi_label)
    for name in (_FLAGS, weight_files.CLASSES_FILE):
        known = storage.read_json(os.path.join(config.model_dir, name), (dict, list))
        if known is not None:
            storage.write_json(os.path.join(directory, name), known)


def check_flags(config: Config) -> None:
    """Compares the settings of a resumed run with those that it was started with; logs a change of its length.

    Raises:
      UserError: a setting that must not change differs, and `allow_flag_changes` is off.
    """
    known = read_flags(config.model_dir)
    if known is None:
        console.log(f"warning: {config.model_dir} has no readable {_FLAGS}: it cannot be told whether this is the run "
                     "that was begun there")
        return
    now = dataclasses.asdict(config)
    before = {field.name: known.get(field.name, field.default) for field in dataclasses.fields(Config)}
    changes = {name: f"--{name}={before[name]} (now {now[name]})" for name in now if before[name] != now[name]}
    refused = [changes[name] for name in settings_with("identity", "order") if name in changes]
    if refused and not config.allow_flag_changes:
        raise UserError(f"--model_dir={config.model_dir} was begun with {', '.join(refused)}: give the same flags, "
                        "choose another directory, or accept the change with --allow_flag_changes")
    if refused:
        console.log(f"--allow_flag_changes: the run was begun with {', '.join(refused)}")
    for name in settings_with("length"):
        if name in changes:
            console.log(f"the run was begun with {changes[name]}: the learning-rate schedule changes with it")


# ----------------------------------------------------------------------------------------------------------- data


def write_data(directory: str, source: Source) -> None:
    """Writes data.json, which describes the data that a run was started with."""
    storage.write_json(os.path.join(directory, _DATA), source.describe_data())


def check_data(config: Config, source: Source) -> None:
    """Compares the data and the classes of a resumed run with those that it was started with.

    Raises:
      UserError: they differ, and `allow_flag_changes` is off.
    """
    described = storage.read_json(os.path.join(config.model_dir, _DATA))
    if described is None or not isinstance(described.get("splits"), dict):
        console.log(f"warning: {config.model_dir} has no readable {_DATA}: it cannot be checked whether the data "
                     "changed since the run was started")
        described = {}
    changes = _data_changes(described, json.loads(json.dumps(source.describe_data())))
    before, _ = weight_files.read_classes(config.model_dir)
    if config.has_linear_head and before is not None and before != source.class_names:
        changes.append(f"classes ({classes.differences(source.class_names, before, 'the data set', 'the run')})")
    if not changes:
        return
    text = (f"--dataset={config.dataset}: the data changed since the run in {config.model_dir} was started: "
            f"{'; '.join(changes)}")
    if not config.allow_flag_changes:
        raise UserError(f"{text}. Restore the data, choose another --model_dir, or accept the change with "
                        "--allow_flag_changes.")
    console.log(f"--allow_flag_changes: {text}")


def _data_changes(before, now):
    """Lists the differences between two results of `Source.describe_data` as text; none if nothing is known before."""
    changes = []
    for name, value in before.items():
        if name == "splits":
            changes += [f"{split} has {now['splits'].get(split, 0)} examples ({count} at the start)"
                        for split, count in value.items() if now["splits"].get(split) != count]
            changes += [f"split {split} is new" for split in now["splits"] if split not in value]
        elif name == "files" and value != now.get(name):
            changes.append("the names or sizes of its files")
        elif name not in ("classes", "files") and value != now.get(name):
            changes.append(f"{name} {now.get(name)} ({value} at the start)")
    return changes
