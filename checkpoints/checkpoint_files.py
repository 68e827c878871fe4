"""Checkpoint files: listing, writing, checking and pruning checkpoints.

The checkpoint of step N is complete if its directory contains `ckpt-N.index` and all files
`ckpt-N.data-<i>-of-<n>`. The index is written last. An empty index, which a crash of the machine may
leave, does not count. Files are listed and deleted by exact name. This module also writes the
`checkpoint` file for TensorFlow's functions, but never reads it itself.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re

import tensorflow as tf

from runtime import storage

# TensorFlow raises these for files that are corrupt, missing or unreadable.
READ_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
_FILE_NAME = re.compile(r"ckpt-(0|[1-9]\d{0,17})\.(?:index|data-(\d{5})-of-(\d{5}))")
_READ_BYTES = 2**24
_SCRATCH = "ckpt_"  # label of temporary directories


def _files_by_step(directory: str) -> dict[int, list[str]]:
    """Returns the names of a directory's checkpoint files, grouped by step. The index follows the data files."""
    names_by_step = collections.defaultdict(list)
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    for name in sorted(names):
        path = os.path.join(directory, name)
        match = _FILE_NAME.fullmatch(name)
        if match and storage.is_file(path):
            with contextlib.suppress(tf.errors.NotFoundError):  # Another process deleted the file.
                if match[2] or tf.io.gfile.stat(path).length:
                    names_by_step[int(match[1])].append(name)
    return names_by_step


def missing_files(directory: str) -> dict[int, str | None]:
    """Returns a dict that maps the step of each checkpoint in a directory to a missing file.

    The value is None if the checkpoint is complete.
    """
    return {
        step: _missing_file(f"ckpt-{step}", names)
        for step, names in _files_by_step(directory).items()
    }


def _missing_file(base: str, names: list[str]) -> str | None:
    counts = {int(match[3]) for name in names if (match := _FILE_NAME.fullmatch(name))[3]} or {1}
    missing = [
        [
            name
            for shard in range(count)
            if (name := f"{base}.data-{shard:05}-of-{count:05}") not in names
        ]
        for count in sorted(counts)
    ]
    if f"{base}.index" not in names:
        return f"{base}.index"
    return missing[0][0] if all(missing) else None


def list_steps(directory: str) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, in ascending order."""
    return sorted(step for step, missing in missing_files(directory).items() if not missing)


def is_readable(prefix: str) -> bool:
    """Reads all files of a checkpoint. Returns whether all of them exist, can be read, and are not empty.

    If TensorFlow cannot restore such a checkpoint, it is corrupt. The errors of TensorFlow do not
    distinguish this case from missing and unreadable files.
    """
    directory, base = os.path.split(prefix)
    names = _files_by_step(directory)[step_from_prefix(prefix)]
    try:
        return not _missing_file(base, names) and all(
            _count_bytes(os.path.join(directory, name)) for name in names
        )
    except tf.errors.OpError:
        return False


def _count_bytes(path: str) -> int:
    with tf.io.gfile.GFile(path, "rb") as file:
        return sum(len(chunk) for chunk in iter(lambda: file.read(_READ_BYTES), b""))


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


def save(checkpoint: tf.train.Checkpoint, directory: str, step: int) -> str:
    """Writes a checkpoint durably.

    On a local disk, the files are written to a temporary directory, and then renamed, the index
    last. A process that is killed therefore leaves at most a temporary directory, and data files
    without an index. In object storage, where renaming is copying, TensorFlow writes the index last.

    Args:
      checkpoint: contains the objects to write. Its `save_counter`, which the original also writes,
        is incremented.
      directory: directory for `ckpt-<step>`.
      step: the step of the checkpoint.

    Returns:
      The prefix of the checkpoint.
    """
    checkpoint.save_counter.assign_add(1)
    prefix = checkpoint_prefix(directory, step)
    if "://" in directory:
        return checkpoint.write(prefix)
    with storage.scratch_beside(prefix, _SCRATCH) as scratch:
        checkpoint.write(os.path.join(scratch, os.path.basename(prefix)))
        if os.path.exists(f"{prefix}.index"):
            os.remove(f"{prefix}.index")
        storage.rename(
            {
                os.path.join(scratch, name): os.path.join(directory, name)
                for name in sorted(os.listdir(scratch))  # The data files precede the index.
            }
        )
    return prefix


def remove_unfinished(directory: str) -> None:
    """Deletes what killed processes left in a local directory. Call this only while holding a lock on it."""
    storage.remove_scratch(directory, _SCRATCH)


def prune(directory: str, step: int, keep: int) -> None:
    """Deletes old checkpoints, and writes the `checkpoint` file, from which TensorFlow reads the latest step.

    Args:
      directory: directory of the checkpoints.
      step: step of the newest checkpoint of the run. Incomplete checkpoints and checkpoints of
        later steps, which the run did not write, are neither counted nor deleted.
      keep: number of checkpoints to keep.
    """
    steps = [other for other in list_steps(directory) if other <= step]
    if steps:
        # The file contains names relative to `directory`. TensorFlow accepts these names only if
        # `directory` is an absolute path; otherwise, it converts paths that start with `directory`
        # to such names.
        names = [
            f"ckpt-{other}" if os.path.isabs(directory) else checkpoint_prefix(directory, other)
            for other in steps[-keep:]
        ]
        tf.compat.v1.train.update_checkpoint_state(directory, names[-1], names)
    for other in steps[:-keep]:
        remove(directory, other)


def remove(directory: str, step: int) -> None:
    """Deletes the checkpoint files of a step."""
    # Delete the index first, so that a partially deleted checkpoint counts as incomplete.
    for name in reversed(_files_by_step(directory)[step]):
        tf.io.gfile.remove(os.path.join(directory, name))
