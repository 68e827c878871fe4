"""Reads small files and writes them atomically, on a local disk or in Google Cloud Storage (gs://)."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pathlib
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runtime.errors import UserError, first_line
from runtime.paths import check_writable_parent

# Prefix of the names of temporary files and directories, which are renamed when they are complete.
TEMP_PREFIX = ".simclr_unfinished_"
_CHECKSUM, _PREFIX = "checksum", "crc32:"
NOTHING_WRITTEN = "nothing was written; run the same command again"


def write_json(path: str, content: dict | list, has_checksum: bool = True) -> None:
    """Writes `content` to a JSON file atomically (see `write_bytes`). By default, adds a checksum to a dict."""
    if has_checksum and isinstance(content, dict):
        content = json.loads(json.dumps(content))  # The keys may be numbers.
        content[_CHECKSUM] = _checksum(content)
    write_bytes(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _checksum(content: dict) -> str:
    return f"{_PREFIX}{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_arrays(path: str, **arrays: Any) -> None:
    """Writes arrays to a .npz file atomically (see `write_bytes`)."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file atomically and durably, and creates its directory if necessary.

    If writing fails, the old content is kept. Object storage replaces whole objects, so paths with
    `://` are written directly.

    Raises:
      UserError: the file cannot be written, for example because the disk is full.
    """
    directory = os.path.dirname(path)
    try:
        makedirs(directory)
        if "://" in path:
            with tf.io.gfile.GFile(path, "wb") as file:
                file.write(content)
            return
        # Unlike `tempfile`, `open` gives the file the permissions that the umask allows.
        temporary = os.path.join(directory, f"{TEMP_PREFIX}{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(content)
            rename({temporary: path})
        except BaseException:
            with contextlib.suppress(OSError):  # The file may not exist.
                os.remove(temporary)
            raise
    except (OSError, tf.errors.OpError) as error:
        raise UserError(
            f"{path}: the file cannot be written ({getattr(error, 'strerror', None) or first_line(error)})."
            " Free disk space or fix the permissions, and run the same command again."
        ) from error


def makedirs(directory: str) -> None:
    """Creates a directory and its parents if necessary. The umask determines the permissions."""
    if "://" in directory:
        tf.io.gfile.makedirs(directory)
    elif directory:
        os.makedirs(directory, exist_ok=True)  # TensorFlow would not allow the group to write.


def event_writer(directory: str) -> tf.summary.SummaryWriter:
    """Returns a writer of TensorBoard events, and creates the directory if necessary."""
    makedirs(directory)
    return tf.summary.create_file_writer(directory)


def rename(targets: Mapping[str, str]) -> None:
    """Renames local files or directories in order, so that they survive a power failure.

    The contents are written to the disk before the first renaming, and the directory of the last
    target after the last one.

    Args:
      targets: dict mapping paths to new paths in a single directory.
    """
    for path in targets:
        for entry in (*pathlib.Path(path).rglob("*"), pathlib.Path(path)):
            _sync(entry)
    for path, target in targets.items():
        os.replace(path, target)
    _sync(os.path.dirname(os.path.abspath(target)))


def _sync(path: str | os.PathLike) -> None:
    """Writes a local file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync directories.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_beside(path: str, label: str = "") -> Iterator[str]:
    """Yields a temporary directory next to a local path, from which files can be renamed to it.

    The name of the directory starts with `TEMP_PREFIX` and `label`. If it cannot be deleted, it is
    left to `remove_scratch`, so that the first error is reported.
    """
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=TEMP_PREFIX + label, dir=directory, ignore_cleanup_errors=True
    ) as scratch:
        yield scratch


def remove_scratch(directory: str, label: str = "") -> None:
    """Deletes the directories that killed processes left behind (see `scratch_beside`).

    Call this function only while holding a lock that excludes other processes with this label.
    """
    for path in pathlib.Path(directory).glob(f"{TEMP_PREFIX}{label}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


@contextlib.contextmanager
def replacing(*paths: str) -> Iterator[list[str]]:
    """Yields a temporary path for each local path, and renames the files in order if no error occurs."""
    with scratch_beside(paths[0]) as scratch:
        temporary_paths = [os.path.join(scratch, str(index)) for index in range(len(paths))]
        yield temporary_paths
        rename(dict(zip(temporary_paths, paths)))


def check_new(flag: str, path: str) -> None:
    """Raises `UserError` if the path exists, unless it is an empty directory, or if it cannot be created."""
    check_writable_parent(flag, path)
    is_empty = tf.io.gfile.isdir(path) and not tf.io.gfile.listdir(path)
    if os.path.islink(path) or tf.io.gfile.exists(path) and not is_empty:
        raise UserError(f"{flag}={path}: the path exists. Use another path, or delete this one.")


def is_file(path: str) -> bool:
    """Returns whether a path is a regular file or a link to one. Opening other files, such as FIFOs, may block."""
    return (
        tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)
        if "://" in path
        else os.path.isfile(path)
    )


def read_json(path: str, expected_type: type | tuple[type, ...] = dict, default: Any = None) -> Any:
    """Returns the contents of a JSON file.

    Args:
      path: path of the file.
      expected_type: type of the content, or a tuple of types.
      default: value to return if the file does not exist, is not valid JSON, or does not have the
        expected type or checksum.

    Raises:
      UserError: the file exists but cannot be read, for example because of its permissions.
    """
    try:
        if not is_file(path):
            return default
        with tf.io.gfile.GFile(path, "rb") as file:
            content = json.loads(file.read())
        # Files that a person or the original wrote have no checksum.
        for name, value in list(content.items()) if isinstance(content, dict) else ():
            # The key itself may be corrupt.
            is_checksum = name == _CHECKSUM or str(value).startswith(_PREFIX)
            if is_checksum and content.pop(name) != _checksum(content):
                return default
    except (ValueError, RecursionError, tf.errors.NotFoundError):
        # Parsing deeply nested lists raises RecursionError. The file may disappear after `is_file`.
        return default
    except tf.errors.OpError as error:
        raise UserError(
            f"{path}: the file cannot be read ({first_line(error)}). Make the file readable, or"
            " remove it."
        ) from error
    return content if isinstance(content, expected_type) else default


def read_own_json(path: str, expected_type: type | tuple[type, ...] = dict) -> Any:
    """Returns the contents of a JSON file that this program wrote and whose contents affect results.

    Returns None if the file is missing or empty. A crash of the machine may leave an empty file.

    Raises:
      UserError: the file is corrupt or cannot be read.
    """
    if not is_file(path) or not tf.io.gfile.stat(path).length:
        return None
    content = read_json(path, expected_type, default=NotImplemented)
    if content is NotImplemented:
        raise UserError(
            f"{path}: the file is corrupt, or was changed. Restore it from a copy, remove its checksum"
            " if you changed it on purpose, or use another directory."
        )
    return content


def without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a dict whose values are not None."""
    return {name: value for name, value in content.items() if value is not None}


def is_list_of_strings(value: Any) -> bool:
    """Returns whether a value from a JSON file is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def write_scalars(
    writer: tf.summary.SummaryWriter, step: int, scalars: Mapping[str, float]
) -> None:
    """Writes a step's scalars to TensorBoard and flushes the writer."""
    with writer.as_default(step=step):
        for name, value in scalars.items():
            tf.summary.scalar(name, value)
    writer.flush()
