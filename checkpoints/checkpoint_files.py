"""Checkpoint files: listing, writing and pruning checkpoints, and moving corrupt ones to a separate directory.

The checkpoint of step N is complete if its directory contains `ckpt-N.index` and all files
`ckpt-N.data-<i>-of-<n>`. TensorFlow writes the index last. Files are listed and deleted by exact
name. This module also writes the `checkpoint` file for TensorFlow's functions, but never reads it
itself.
"""

from __future__ import annotations

import collections
import math
import os
import re

import tensorflow as tf

from runtime import console, storage
from runtime.errors import UserError, first_line

# These errors do not indicate that a file is corrupt.
_TRANSIENT_ERRORS = (
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
)
# TensorFlow raises these for corrupt files.
READ_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
CORRUPT_DIR = "damaged"
_FILE_NAME = re.compile(r"ckpt-(0|[1-9]\d{0,17})\.(?:index|data-(\d{5})-of-(\d{5}))")
_READ_BYTES = 2**24


def _files_by_step(directory: str) -> dict[int, list[str]]:
    """Returns the names of a directory's checkpoint files, grouped by step."""
    names_by_step = collections.defaultdict(list)
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    for name in sorted(names):
        if (match := _FILE_NAME.fullmatch(name)) and storage.is_file(os.path.join(directory, name)):
            names_by_step[int(match[1])].append(name)
    return names_by_step


def _missing_file(step: int, names: list[str]) -> str | None:
    """Returns the name of a file that is missing from a step's checkpoint, or None if the checkpoint is complete."""
    if f"ckpt-{step}.index" not in names:
        return f"ckpt-{step}.index"
    counts = {int(match[3]) for name in names if (match := _FILE_NAME.fullmatch(name))[3]} or {1}
    missing = [
        next(
            (
                name
                for shard in range(count)
                if (name := f"ckpt-{step}.data-{shard:05}-of-{count:05}") not in names
            ),
            None,
        )
        for count in sorted(counts)
    ]
    return None if None in missing else missing[0]


def list_steps(directory: str) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, in ascending order."""
    return sorted(
        step
        for step, names in _files_by_step(directory).items()
        if _missing_file(step, names) is None
    )


def checkpoint_prefix(directory: str, step: int) -> str:
    """Returns the prefix of a step's checkpoint."""
    return os.path.join(directory, f"ckpt-{step}")


def step_from_prefix(prefix: str) -> int:
    """Returns the step number in a checkpoint prefix that ends with `ckpt-<step>`."""
    return int(prefix.rsplit("-", 1)[-1])


def latest_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the newest complete checkpoint in a directory, or None."""
    steps = list_steps(directory)
    return checkpoint_prefix(directory, steps[-1]) if steps else None


def save(checkpoint: tf.train.Checkpoint, directory: str, step: int, keep: int) -> str:
    """Writes a checkpoint and deletes old ones.

    Args:
      checkpoint: contains the objects to write. Its `save_counter`, which the original also writes,
        is incremented.
      directory: directory for `ckpt-<step>`.
      step: the step of the checkpoint.
      keep: number of checkpoints to keep, including this one. Incomplete checkpoints and
        checkpoints of later steps, which this run did not write, are neither counted nor deleted.

    Returns:
      The prefix of the checkpoint.
    """
    checkpoint.save_counter.assign_add(1)
    prefix = checkpoint.write(checkpoint_prefix(directory, step))
    steps = [other for other in list_steps(directory) if other <= step]
    _write_state(directory, steps[-keep:])
    for other in steps[:-keep]:
        remove(directory, other)
    return prefix


def remove(directory: str, step: int) -> None:
    """Deletes the checkpoint files of a step."""
    # Delete the index first, so that a partially deleted checkpoint counts as incomplete.
    for name in sorted(
        _files_by_step(directory)[step], key=lambda name: not name.endswith(".index")
    ):
        tf.io.gfile.remove(os.path.join(directory, name))


def _write_state(directory, steps):
    """Writes the `checkpoint` file, from which TensorFlow's functions read the latest step (`steps[-1]`)."""
    # The file contains names relative to `directory`. TensorFlow accepts these names only if
    # `directory` is an absolute path; otherwise, it converts paths that start with `directory` to
    # such names.
    names = [
        f"ckpt-{step}" if os.path.isabs(directory) else checkpoint_prefix(directory, step)
        for step in steps
    ]
    tf.compat.v1.train.update_checkpoint_state(directory, names[-1], names)


def repair(directory: str) -> None:
    """Moves corrupt checkpoints to another directory, so that `latest_checkpoint` returns a readable one.

    Call this function only while holding the directory lock. Corrupt checkpoints that are newer
    than the newest readable one are moved to `directory/damaged`. Incomplete checkpoints are logged
    but kept, because a copy may still be in progress.

    Raises:
      UserError: no checkpoint is usable, all checkpoints are from another program, or a file is
        temporarily unreadable.
    """
    files = _files_by_step(directory)
    foreign = [
        name
        for name in tf.io.gfile.listdir(directory)
        if name.endswith(".index") and not _FILE_NAME.fullmatch(name)
    ]
    if foreign and not files:
        raise UserError(
            f"--model_dir={directory}: {foreign[0]} is a checkpoint from another program. Pass it"
            " as --checkpoint, and choose another --model_dir."
        )
    missing = {step: name for step, names in files.items() if (name := _missing_file(step, names))}
    steps = [step for step in sorted(files) if step not in missing]
    for step, name in sorted(missing.items()):
        console.log(
            f"warning: ckpt-{step} is incomplete and is ignored: {name} is missing from {directory}"
        )
    while steps and (reason := find_corruption(checkpoint_prefix(directory, steps[-1]))):
        step = steps.pop()
        new_directory = _move_to_corrupt_dir(directory, step, files[step])
        if not steps:
            raise UserError(
                f"--model_dir={directory}: ckpt-{step} is corrupt ({reason}) and was moved to"
                f" {new_directory}; no other complete checkpoint exists. Run the same command again"
                " to train from scratch."
            )
        console.log(
            f"warning: ckpt-{step} is corrupt ({reason}) and was moved to {new_directory}. Resuming"
            f" from ckpt-{steps[-1]}."
        )
    if steps:
        _write_state(directory, steps)
    elif missing:
        step, name = max(missing.items())
        raise UserError(
            f"--model_dir={directory}: ckpt-{step} is incomplete ({name} is missing), and no"
            f" complete checkpoint exists. Copy the missing file, or move the files ckpt-{step}.*"
            " to another directory to train from scratch."
        )


def find_corruption(prefix: str) -> str | None:
    """Returns the reason why a complete checkpoint is corrupt, or None if all checksums in the checkpoint are correct.

    To avoid mistaking transient I/O or permission errors for corruption, a checkpoint counts as
    corrupt only if TensorFlow rejects it twice although all bytes of its files are readable.

    Raises:
      UserError: the files are temporarily unreadable.
    """
    size = _read_bytes(prefix)
    reason = _read_tensors(prefix, size)
    if reason is None:
        return None
    _read_bytes(prefix)
    return _read_tensors(prefix, size)


def _read_tensors(prefix, data_bytes):
    """Reads all tensors to verify their checksums. Returns the first error message, or None."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        for name, shape in shapes.items():
            if math.prod(shape) * (dtypes[name].size or 1) > data_bytes:
                # Reading the tensor would allocate memory for its full shape.
                return f"{name} has shape {shape}, which requires more bytes than the file contains"
            reader.get_tensor(name)
    except _TRANSIENT_ERRORS as error:
        raise _unreadable_error(prefix, error) from error
    except READ_ERRORS as error:
        return first_line(error)
    return None


def _read_bytes(prefix):
    """Reads all files of a checkpoint and returns the total size of its data files in bytes."""
    directory, size = os.path.dirname(prefix), 0
    try:
        for name in _files_by_step(directory)[step_from_prefix(prefix)]:
            with tf.io.gfile.GFile(os.path.join(directory, name), "rb") as file:
                while chunk := file.read(_READ_BYTES):
                    size += 0 if name.endswith(".index") else len(chunk)
    except tf.errors.OpError as error:
        raise _unreadable_error(prefix, error) from error
    return size


def _unreadable_error(prefix, error):
    return UserError(
        f"--model_dir={os.path.dirname(prefix)}: {os.path.basename(prefix)} is temporarily"
        f" unreadable ({first_line(error)}). Restore access to it and run the same command again."
    )


def _move_to_corrupt_dir(directory, step, names):
    """Moves the files of a checkpoint to a new directory and returns the path of that directory."""
    suffix, new_directory = 0, os.path.join(directory, CORRUPT_DIR, f"ckpt-{step}")
    while tf.io.gfile.exists(new_directory):
        suffix += 1
        new_directory = os.path.join(directory, CORRUPT_DIR, f"ckpt-{step}_{suffix}")
    tf.io.gfile.makedirs(new_directory)
    # Move the index first, so that a partially moved checkpoint counts as incomplete.
    for name in sorted(names, key=lambda name: not name.endswith(".index")):
        tf.io.gfile.rename(os.path.join(directory, name), os.path.join(new_directory, name))
    return new_directory
