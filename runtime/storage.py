"""Reads small files and writes them atomically, on a local disk or in Google Cloud Storage (gs://)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runtime.errors import UserError, first_line

# Prefix of the temporary directories in which files are written before they are renamed.
TEMP_PREFIX = ".simclr_unfinished_"
NOTHING_WRITTEN = "nothing was written; run the same command again"
# Longer names are truncated, because temporary file names are limited to 255 bytes.
_MAX_NAME_BYTES = 200
TEMPORARY_SUFFIX = ".simclr_tmp"  # after the name of the file and the process ID


def write_json(path: str, content: dict | list) -> None:
    """Writes `content` to a JSON file atomically (see `write_bytes`)."""
    write_bytes(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def write_arrays(path: str, **arrays: Any) -> None:
    """Writes arrays to a .npz file atomically (see `write_bytes`)."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file atomically and creates its directory if necessary. If writing fails, the old content is kept.

    Raises:
      UserError: the file cannot be written, for example because the disk is full.
    """
    directory, name = os.path.split(path)
    name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    temporary = os.path.join(directory, f"{name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        if directory:
            tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(content)
        tf.io.gfile.rename(temporary, path, overwrite=True)
    except tf.errors.OpError as error:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(temporary)  # Otherwise, the temporary file would waste disk space.
        raise UserError(
            f"{path}: the file cannot be written ({first_line(error)}). Free disk space or fix the "
            "permissions, and run the same command again."
        ) from error


@contextlib.contextmanager
def scratch_beside(path: str) -> Iterator[str]:
    """Yields a temporary directory next to a local path, from which files can be renamed to it."""
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=directory) as scratch:
        yield scratch


@contextlib.contextmanager
def replacing(*paths: str) -> Iterator[list[str]]:
    """Yields a temporary path for each local path, and renames the files in order if no error occurs."""
    with scratch_beside(paths[0]) as scratch:
        temporary_paths = [os.path.join(scratch, str(index)) for index in range(len(paths))]
        yield temporary_paths
        for temporary_path, path in zip(temporary_paths, paths):
            os.replace(temporary_path, path)


def check_new(flag: str, path: str) -> None:
    """Raises `UserError` if the path exists, unless it is an empty directory."""
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
        expected type.

    Raises:
      UserError: the file exists but cannot be read, for example because of its permissions.
    """
    try:
        if not is_file(path):
            return default
        with tf.io.gfile.GFile(path, "rb") as file:
            content = json.loads(file.read())
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
            f"{path}: the file is corrupt. Restore it from a copy, or use another directory."
        )
    return content


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
