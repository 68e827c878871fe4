"""Files in a run directory: settings, data description and classes from the start of the run, and temporary files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
import time

import tensorflow as tf

from checkpoints import checkpoint_files, weight_files
from config import Config, select_settings
from runtime import storage
from runtime.errors import UserError, first_line
from sources import classes
from sources.source import Source

_FLAGS, _DATA = "flags.json", "data.json"
# Key in flags.json; the number of steps also depends on the number of training examples.
_LAST_STEP = "last_step"
_INITIAL_WEIGHTS = "initial_weights"
_RECENT_SECONDS = 600  # Newer temporary files may belong to a running evaluation.
_TEMPORARY_FILE = re.compile(
    rf"{re.escape(storage.TEMP_PREFIX)}[0-9a-f]{{16}}|checkpoint\.tmp[0-9a-f]{{32}}"
)


def check_writable(directory: str) -> None:
    """Creates a run directory. Raises `UserError` if files cannot be written to it."""
    try:
        storage.makedirs(directory)
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

    Deletes only what has names that TensorFlow or this program uses. Recent temporary files are
    kept, because a running evaluation may own them.
    """
    checkpoint_files.remove_unfinished(directory)
    for name in tf.io.gfile.listdir(directory):
        path = os.path.join(directory, name)
        if (
            _TEMPORARY_FILE.fullmatch(name)
            and not os.path.islink(path)
            and storage.is_file(path)
            and time.time() - tf.io.gfile.stat(path).mtime_nsec / 1e9 > _RECENT_SECONDS
        ):
            tf.io.gfile.remove(path)


def contains(model_dir: str, path: str) -> bool:
    """Returns whether the weights at `path` belong to the run in `model_dir`: its checkpoints, best/ or SavedModels."""
    place = os.path.relpath(os.path.realpath(os.path.dirname(path)), os.path.realpath(model_dir))
    own = r"\.|(?!\.\.)([^/]+/)?(best|saved_model/\d+/variables)"  # With --eval_name, one level deeper.
    return bool(re.fullmatch(own, place))


# ------------------------------------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run recorded in its directory when it started. All attributes are empty if there is no run.

    Attributes:
      settings: settings from flags.json, keyed by name.
      last_step: last training step, which also depends on the number of training examples.
      data: result of `Source.describe_data`.
      class_names: names of the classes.
      has_checkpoints: whether the directory contains checkpoints.
      initial_weights: path, digest and training data of the weights that the run started from
        (`--checkpoint`), or of the teacher.
      network: settings of the network in the weights to evaluate or to fine-tune; see
        `checks.adopt`.
      network_path: the run or checkpoint that `network` describes.
      trained_on: `description_digest` of the data that the network was trained on, if known.
    """

    settings: dict = dataclasses.field(default_factory=dict)
    last_step: int | None = None
    data: dict = dataclasses.field(default_factory=dict)
    class_names: list[str] | None = None
    has_checkpoints: bool = False
    initial_weights: dict | None = None
    network: dict = dataclasses.field(default_factory=dict)
    network_path: str | None = None
    trained_on: str | None = None


def _read(directory: str, name: str) -> dict:
    return storage.read_own_json(os.path.join(directory, name)) or {}


def read_flags(directory: str) -> dict:
    """Returns the settings in flags.json, or an empty dict if there is no such file.

    Raises:
      UserError: the file is corrupt.
    """
    return select_settings(_read(directory, _FLAGS), os.path.join(directory, _FLAGS))


def read_run(directory: str | None) -> Recorded:
    """Reads what the run in `directory` recorded, except for its network.

    Raises:
      UserError: one of the files is corrupt.
    """
    if directory is None:
        return Recorded()
    flags = _read(directory, _FLAGS)
    return Recorded(
        settings=select_settings(flags, os.path.join(directory, _FLAGS)),
        last_step=flags.get(_LAST_STEP),
        initial_weights=flags.get(_INITIAL_WEIGHTS),
        data=_read(directory, _DATA),
        class_names=weight_files.read_classes(directory)[0],
        has_checkpoints=bool(checkpoint_files.list_steps(directory)),
    )


def copy_start(model_dir: str, directory: str) -> None:
    """Copies the files that describe the start of a run to another directory."""
    for name in (_FLAGS, weight_files.CLASSES_FILE, _DATA):
        path = os.path.join(model_dir, name)
        if storage.is_file(path):
            storage.write_bytes(os.path.join(directory, name), tf.io.read_file(path).numpy())


def setting_changes(config: Config, recorded: Recorded) -> dict[str, str]:
    """Returns a text for each setting that differs from the recorded one, keyed by name."""
    now = config.settings() if recorded.settings else {}
    before = {**Config().settings(), **recorded.settings}
    return {
        name: f"--{name}={before[name]} (now {now[name]})"
        for name in now
        if before[name] != now[name]
    }


# ----------------------------------------------------------------------------------------------------------- data


def description_digest(description: dict) -> str | None:
    """Returns 16 hexadecimal digits of the SHA-256 of a result of `Source.describe_data`, or None if it is empty."""
    if not description:
        return None
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def training_data(directory: str) -> str | None:
    """Returns the `description_digest` of the data that a run was trained on, or None if data.json is missing."""
    return description_digest(_read(directory, _DATA))


def write_start(
    config: Config,
    source: Source,
    directory: str,
    last_step: int,
    initial_weights: dict | None = None,
) -> None:
    """Writes flags.json, classes.json and data.json, which describe the start of a run."""
    for name, content in {
        _FLAGS: {**config.settings(), _LAST_STEP: last_step, _INITIAL_WEIGHTS: initial_weights},
        weight_files.CLASSES_FILE: dict(names=source.class_names, multi_label=source.multi_label),
        _DATA: source.describe_data(),
    }.items():
        storage.write_json(os.path.join(directory, name), content)


def data_changes(config: Config, source: Source, recorded: Recorded) -> list[str]:
    """Returns one line of text for each difference between the data and classes now and at the start of the run."""
    now, changes = json.loads(json.dumps(source.describe_data())), []
    for name, before in recorded.data.items():
        value = now.get(name)
        if value == before or name == "classes":
            continue
        if name == "splits":
            changes += [
                f"{split} has {value.get(split, 0)} examples ({count} at the start)"
                for split, count in before.items()
                if value.get(split) != count
            ]
            changes += [f"split {split} is new" for split in value if split not in before]
        elif name == "files":
            changes.append("the names or sizes of the files differ")
        else:
            changes.append(f"{name} {value} ({before} at the start)")
    before = recorded.class_names
    if config.has_linear_head and before is not None and before != source.class_names:
        text = classes.differences(source.class_names, before, "the data set", "the run")
        changes.append(f"classes ({text})")
    return changes
