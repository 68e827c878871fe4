"""The checkpoint files of a run: listing, writing, pruning, and setting corrupt ones aside.

A checkpoint of step N is complete if its directory holds `ckpt-N.index` and all files `ckpt-N.data-<i>-of-<n>`.
TensorFlow writes the index last. Files are listed and deleted by exact name; the file `checkpoint`, which TensorFlow's
own functions read, is written but never relied on.
"""

from __future__ import annotations

import collections
import math
import os
import re

import tensorflow as tf

from runtime import console, storage
from runtime.errors import UserError, first_line

# Errors that say nothing about the content of a file.
_TRANSIENT_ERRORS = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError,
                     tf.errors.UnavailableError)
READ_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, IndexError)  # raised by TensorFlow for corrupt files
CORRUPT_DIR = "damaged"
_FILE_NAME = re.compile(r"ckpt-(0|[1-9]\d{0,17})\.(?:index|data-(\d{5})-of-(\d{5}))")
_READ_BYTES = 2**24


def _files_by_step(directory: str) -> dict[int, list[str]]:
    """Returns the names of the checkpoint files in a directory by step."""
    found = collections.defaultdict(list)
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    for name in sorted(names):
        if (match := _FILE_NAME.fullmatch(name)) and storage.is_file(os.path.join(directory, name)):
            found[int(match[1])].append(name)
    return found


def _missing_file(step: int, names: list[str]) -> str | None:
    """Returns the name of a file that the checkpoint of a step lacks, or None if it is complete."""
    if f"ckpt-{step}.index" not in names:
        return f"ckpt-{step}.index"
    counts = {int(match[3]) for name in names if (match := _FILE_NAME.fullmatch(name))[3]} or {1}
    missing = [next((name for number in range(count) if (name := f"ckpt-{step}.data-{number:05}-of-{count:05}")
                     not in names), None) for count in sorted(counts)]
    return None if None in missing else missing[0]


def list_steps(directory: str) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, in ascending order."""
    return sorted(step for step, names in _files_by_step(directory).items() if _missing_file(step, names) is None)


def checkpoint_prefix(directory: str, step: int) -> str:
    """Returns the prefix of the checkpoint of a step."""
    return os.path.join(directory, f"ckpt-{step}")


def step_from_prefix(prefix: str) -> int:
    """Returns the step in the prefix of a checkpoint, `ckpt-<step>`."""
    return int(prefix.rsplit("-", 1)[-1])


def latest_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the newest complete checkpoint in a directory, or None."""
    steps = list_steps(directory)
    return checkpoint_prefix(directory, steps[-1]) if steps else None


def save(checkpoint: tf.train.Checkpoint, directory: str, step: int, keep: int) -> str:
    """Writes a checkpoint and deletes the oldest ones.

    Args:
      checkpoint: what to write. Its `save_counter`, which files of the original have, is incremented.
      directory: where `ckpt-<step>` is written.
      step: number of the checkpoint.
      keep: number of checkpoints that remain, this one included. Incomplete checkpoints and those of later steps, which
        this run cannot have written, do not count and remain.

    Returns:
      the prefix of the checkpoint.
    """
    checkpoint.save_counter.assign_add(1)
    prefix = checkpoint.write(checkpoint_prefix(directory, step))
    steps = [other for other in list_steps(directory) if other <= step]
    _write_state(directory, steps[-keep:])
    for other in steps[:-keep]:
        remove(directory, other)
    return prefix


def remove(directory: str, step: int) -> None:
    """Deletes the files of the checkpoint of a step."""
    # The index first: without it the checkpoint does not count any more.
    for name in sorted(_files_by_step(directory)[step], key=lambda name: not name.endswith(".index")):
        tf.io.gfile.remove(os.path.join(directory, name))


def _write_state(directory, steps):
    """Writes the file `checkpoint`, in which TensorFlow's functions look for the newest one, the last of `steps`."""
    names = [f"ckpt-{step}" for step in steps]
    tf.compat.v1.train.update_checkpoint_state(directory, names[-1], names)


def repair(directory: str) -> None:
    """Makes `latest_checkpoint` return a readable checkpoint. Call it only while holding the lock of the directory.

    Corrupt checkpoints that are newer than the newest good one are moved to `directory/damaged`. Incomplete ones, which
    may be in the middle of being copied, are logged and left alone.

    Raises:
      UserError: there are only checkpoints that cannot be used, only those of another program, or a file cannot be
        read at the moment.
    """
    files = _files_by_step(directory)
    others = [name for name in tf.io.gfile.listdir(directory)
              if name.endswith(".index") and not _FILE_NAME.fullmatch(name)]
    if others and not files:
        raise UserError(f"--model_dir={directory}: {others[0]} is a checkpoint of another program. Pass it as "
                        "--checkpoint, and choose another --model_dir.")
    missing = {step: name for step, names in files.items() if (name := _missing_file(step, names))}
    steps = [step for step in sorted(files) if step not in missing]
    for step, name in sorted(missing.items()):
        console.log(f"warning: ckpt-{step} is incomplete and not used: {name} is missing from {directory}")
    while steps and (reason := find_corruption(checkpoint_prefix(directory, steps[-1]))):
        step = steps.pop()
        place = _set_aside(directory, step, files[step])
        if not steps:
            raise UserError(f"--model_dir={directory}: ckpt-{step} is corrupt ({reason}) and was moved to {place}; no "
                            "other complete checkpoint exists. Run the same command again to train from scratch.")
        console.log(f"warning: ckpt-{step} is corrupt ({reason}) and was moved to {place}. Resuming from "
                     f"ckpt-{steps[-1]}.")
    if steps:
        _write_state(directory, steps)
    elif missing:
        step, name = max(missing.items())
        raise UserError(f"--model_dir={directory}: ckpt-{step} is incomplete ({name} is missing), and there is no "
                        f"complete checkpoint. Copy the missing file, or move the files ckpt-{step}.* away to train "
                        "from scratch.")


def find_corruption(prefix: str) -> str | None:
    """Returns why the tensors of a complete checkpoint cannot be read, or None if all checksums are right.

    A checkpoint counts as corrupt only if all bytes of its files could be read, before and after TensorFlow rejected
    them twice, so that an error of the disk, the network or the permissions is not mistaken for corruption.

    Raises:
      UserError: the files cannot be read at the moment.
    """
    size = _read_bytes(prefix)
    reason = _read_tensors(prefix, size)
    if reason is None:
        return None
    _read_bytes(prefix)
    return _read_tensors(prefix, size)


def _read_tensors(prefix, data_bytes):
    """Reads all tensors, each of which has a checksum. Returns the first error as text, or None."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        for name, shape in shapes.items():
            if math.prod(shape) * (dtypes[name].size or 1) > data_bytes:
                return f"{name} has shape {shape}, which is larger than the file"  # TensorFlow would allocate it.
            reader.get_tensor(name)
    except _TRANSIENT_ERRORS as error:
        raise _unreadable(prefix, error) from error
    except READ_ERRORS as error:
        return first_line(error)
    return None


def _read_bytes(prefix):
    """Reads all files of a checkpoint and returns the size of its data files in bytes. Raises `UserError`."""
    directory, size = os.path.dirname(prefix), 0
    try:
        for name in _files_by_step(directory)[step_from_prefix(prefix)]:
            with tf.io.gfile.GFile(os.path.join(directory, name), "rb") as file:
                while part := file.read(_READ_BYTES):
                    size += 0 if name.endswith(".index") else len(part)
    except tf.errors.OpError as error:
        raise _unreadable(prefix, error) from error
    return size


def _unreadable(prefix, error):
    return UserError(f"--model_dir={os.path.dirname(prefix)}: {os.path.basename(prefix)} cannot be read at the moment "
                     f"({first_line(error)}). Restore access to it, and run the same command again.")


def _set_aside(directory, step, names):
    """Moves the files of a checkpoint to a new directory and returns that."""
    number, place = 0, os.path.join(directory, CORRUPT_DIR, f"ckpt-{step}")
    while tf.io.gfile.exists(place):
        number += 1
        place = os.path.join(directory, CORRUPT_DIR, f"ckpt-{step}_{number}")
    tf.io.gfile.makedirs(place)
    # The index first: without it the checkpoint does not count any more.
    for name in sorted(names, key=lambda name: not name.endswith(".index")):
        tf.io.gfile.rename(os.path.join(directory, name), os.path.join(place, name))
    return place
