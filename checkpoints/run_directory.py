"""Files in a run directory: settings, data description and classes from the start of the run, and temporary files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import time
from typing import Any

import tensorflow as tf

from checkpoints import checkpoint_files, weight_files
from checkpoints import lock as lock_lib
from config import Config, select_settings
from runtime import signals, storage
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


def _remove_shards(directory: str) -> None:
    """Deletes the directory of a partially written checkpoint, unless it contains other files."""
    names = tf.io.gfile.listdir(directory)
    if all(_SHARD.fullmatch(name) for name in names):
        for name in names:
            tf.io.gfile.remove(os.path.join(directory, name))
        tf.io.gfile.rmtree(directory)


# ------------------------------------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What every part of a run needs.

    Attributes:
      config: settings, completed for the data and the run directory.
      source: the data set.
      strategy: the strategy of this process.
      is_chief: whether this process writes checkpoints, results and messages.
      stop: handler of stop signals. When any worker receives a signal, training saves a checkpoint
        and raises `errors.Stopped`.
      lock: lock on `config.model_dir`, held by the chief while it trains; otherwise, None.
    """

    config: Config
    source: Source
    strategy: tf.distribute.Strategy
    is_chief: bool
    stop: signals.StopSignals
    lock: lock_lib.Lock | None = None

    def replace(self, **changes: Any) -> RunContext:
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def check_lock(self) -> None:
        """Raises `UserError` if `model_dir` was removed or replaced. Call this before writing to it."""
        if self.lock is not None:
            self.lock.check()


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run recorded in its directory when it started. All attributes are empty if there is no run.

    Attributes:
      settings: settings from flags.json, keyed by name.
      last_step: last training step, which also depends on the number of training examples.
      data: result of `Source.describe_data`.
      class_names: names of the classes.
      has_checkpoints: whether the directory contains checkpoints.
      network: settings of the network in the weights to evaluate or to fine-tune; see
        `checks.adopt`.
      network_path: the run or checkpoint that `network` describes.
    """

    settings: dict = dataclasses.field(default_factory=dict)
    last_step: int | None = None
    data: dict = dataclasses.field(default_factory=dict)
    class_names: list[str] | None = None
    has_checkpoints: bool = False
    network: dict = dataclasses.field(default_factory=dict)
    network_path: str | None = None


def _read(directory: str, name: str) -> dict:
    return storage.read_own_json(os.path.join(directory, name)) or {}


def read_flags(directory: str) -> dict | None:
    """Returns the settings in flags.json, or None if there is no such file.

    Raises:
      UserError: the file is corrupt.
    """
    content = _read(directory, _FLAGS)
    return select_settings(content, os.path.join(directory, _FLAGS)) if content else None


def read_run(directory: str | None) -> Recorded:
    """Reads what the run in `directory` recorded, except for its network.

    Raises:
      UserError: one of the files is corrupt.
    """
    if directory is None:
        return Recorded()
    last_step = _read(directory, _FLAGS).get(_LAST_STEP)
    return Recorded(
        settings=read_flags(directory) or {},
        last_step=last_step if isinstance(last_step, int) else None,
        data=_read(directory, _DATA),
        class_names=weight_files.read_classes(directory)[0],
        has_checkpoints=bool(checkpoint_files.list_steps(directory)),
    )


def write_flags(
    directory: str,
    config: Config,
    class_names: list[str] | None,
    multi_label: bool = False,
    last_step: int | None = None,
) -> None:
    """Writes flags.json and classes.json."""
    flags = config.settings()
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


def setting_changes(config: Config, recorded: Recorded) -> dict[str, str]:
    """Returns a text for each setting that differs from the recorded one, keyed by name."""
    now = config.settings() if recorded.settings else {}
    before = {**{name: getattr(Config, name) for name in now}, **recorded.settings}
    return {
        name: f"--{name}={before[name]} (now {now[name]})"
        for name in now
        if before[name] != now[name]
    }


# ----------------------------------------------------------------------------------------------------------- data


def write_start(context: RunContext, directory: str, last_step: int) -> None:
    """Writes flags.json, classes.json and data.json, which describe the start of a run."""
    source = context.source
    write_flags(directory, context.config, source.class_names, source.multi_label, last_step)
    storage.write_json(os.path.join(directory, _DATA), source.describe_data())


def data_changes(config: Config, source: Source, recorded: Recorded) -> list[str]:
    """Returns one line of text for each difference between the data and classes now and at the start of the run."""
    changes = _data_changes(recorded.data, json.loads(json.dumps(source.describe_data())))
    before = recorded.class_names
    if config.has_linear_head and before is not None and before != source.class_names:
        text = classes.differences(source.class_names, before, "the data set", "the run")
        changes.append(f"classes ({text})")
    return changes


def _data_changes(before: dict, now: dict) -> list[str]:
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
