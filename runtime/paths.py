"""Checks of paths that users pass, and names of files."""

from __future__ import annotations

import argparse
import contextlib
import os
import re

from runtime.errors import UserError


def slug(text: str) -> str:
    """Returns a text as the name of a file: letters, digits, - and . stay, other characters become _."""
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in text)


_PATTERN_CHARACTERS = "*?[\\"
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # Surrogates are bytes that are not UTF-8.


def check_path(flag: str, path: str, allow_patterns: bool = False) -> str:
    """Returns the path that a flag names, with `~` expanded.

    TensorFlow reads the prefix of a checkpoint as a pattern: pruning the checkpoints of `runs/run*` would delete those
    of `runs/run1`. Such paths are refused before anything is read or written.

    Args:
      flag: name of the flag, without dashes, for the error; or of a positional argument, in capitals.
      path: a local path, or one on gs://.
      allow_patterns: whether characters of patterns are allowed: for files that are only read, by their exact names.

    Raises:
      UserError: the path is empty, has a character of a pattern, is not valid UTF-8, or is on storage that TensorFlow
        does not support.
    """
    flag = flag if flag.isupper() else f"--{flag}"
    if not path.strip():
        raise UserError(f"{flag}={path}: the path is empty. Name a directory or a file, or remove the flag.")
    if _CONTROL_CHARACTERS.search(path):
        raise UserError(f"{flag}={path!a}: the path has control characters or is not valid UTF-8. Rename it.")
    scheme, separator, _ = path.partition("://")
    if separator and scheme != "gs":
        raise UserError(f"{flag}={path}: {scheme}:// is not supported. Use a local path or gs://.")
    used = [character for character in _PATTERN_CHARACTERS if character in path]
    if used and not allow_patterns:
        raise UserError(f"{flag}={path}: the path contains {' '.join(used)}, which TensorFlow reads as a pattern for "
                        f"several files. Use a path without {' '.join(_PATTERN_CHARACTERS)}.")
    return os.path.expanduser(path)


def check_weights_path(flag: str, path: str) -> str:
    """Returns `check_path` of a path to weights, or a TF Hub handle (https://...) as it is."""
    return path if path.startswith(("http://", "https://")) else check_path(flag, path)


def check_paths(arguments: argparse.Namespace, *flags: str) -> None:
    """Replaces the paths in the attributes `flags` of parsed arguments by those that `check_path` returns.

    Handles of TF Hub, which `--checkpoint` takes, stay as they are. Raises `UserError`.
    """
    for flag in flags:
        path = getattr(arguments, flag)
        if path is not None:
            setattr(arguments, flag, (check_weights_path if flag == "checkpoint" else check_path)(flag, path))


def check_writable_parent(flag: str, path: str | None) -> None:
    """Raises `UserError` if nothing can be created at `path` (None: no check)."""
    if not path or "://" in path:
        return
    directory = os.path.dirname(path.rstrip("/"))
    if not os.access(directory or ".", os.W_OK | os.X_OK):
        reason = "is not a writable directory" if os.path.exists(directory) else "does not exist"
        raise UserError(f"{flag}={path}: {directory or '.'} {reason}. Create it, or choose another one.")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
    except OSError as error:  # The name is too long, or its directory is a file.
        raise UserError(f"{flag}={path}: {error.strerror}. Use another name.") from error
