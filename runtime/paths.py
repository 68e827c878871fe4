"""Checks user-supplied paths, and converts text to file names."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence

from runtime.errors import UserError


def slug(text: str) -> str:
    """Converts text to a file name by replacing all characters except letters, digits, "-" and "." with "_"."""
    return re.sub(r"[^\w.-]", "_", text)


def hashed_name(name: str, values: Mapping[str, object]) -> str:
    """Returns `name`, an underscore, and 8 hexadecimal digits of the SHA-256 of JSON-serializable values.

    Directories have such names, so that the same settings lead to the same directory.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return f"{name}_{digest[:8]}"


def without_directories(path: str) -> str:
    """Returns folder:PATH or list:PATH with only the last component of the path, and any other text unchanged."""
    match = re.fullmatch(r"(.*?(?:folder|list):)(.*)", path, re.DOTALL)
    return match[1] + os.path.basename(match[2].rstrip("/")) if match else path


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the project's directory
REMOTE_SCHEMES = ("gs",)
TABLES, PAGES = (".npz", ".csv", ".parquet"), (".html", ".htm")  # suffixes of output files
_PATTERN_CHARACTERS = "*?[\\"
# Surrogates stand for non-UTF-8 bytes.
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_path(flag: str, path: str, allow_patterns: bool = False) -> str:
    """Checks the path that a flag specifies, and returns it with `~` expanded.

    TensorFlow interprets checkpoint prefixes as glob patterns, so pruning checkpoints in
    `runs/run*` would also delete those in `runs/run1`. Paths with pattern characters are therefore
    rejected before anything is read or written.

    Args:
      flag: name of the flag (without dashes) or of the positional argument (in capitals), for error
        messages.
      path: a local path or a gs:// path.
      allow_patterns: whether to accept pattern characters, which is safe if files are always read
        by exact name.

    Raises:
      UserError: the path is empty, contains pattern or control characters, is not valid UTF-8, or
        is on unsupported storage.
    """
    flag = flag if flag.isupper() else f"--{flag}"
    if not path.strip():
        raise UserError(
            f"{flag}={path}: the path is empty. Specify a directory or a file, or remove the flag."
        )
    if _CONTROL_CHARACTERS.search(path):
        raise UserError(
            f"{flag}={path!a}: the path contains control characters or is not valid UTF-8. Use"
            " another path."
        )
    scheme, separator, _ = path.partition("://")
    if separator and scheme not in REMOTE_SCHEMES:
        raise UserError(f"{flag}={path}: {scheme}:// is not supported. Use a local path or gs://.")
    patterns = [character for character in _PATTERN_CHARACTERS if character in path]
    if patterns and not allow_patterns:
        raise UserError(
            f"{flag}={path}: the path contains {' '.join(patterns)}, which TensorFlow interprets as"
            f" a glob pattern. Use a path without {' '.join(_PATTERN_CHARACTERS)}."
        )
    return os.path.expanduser(path)


def check_weights_path(flag: str, path: str) -> str:
    """Checks a path to weights in the same way as `check_path`. Returns TF Hub handles (https://...) unchanged."""
    return path if path.startswith(("http://", "https://")) else check_path(flag, path)


def check_paths(arguments: argparse.Namespace, *flags: str) -> None:
    """Replaces the value of each flag with the result of `check_path` (`check_weights_path` for `--checkpoint`)."""
    for flag in flags:
        path = getattr(arguments, flag)
        if path is not None:
            setattr(
                arguments,
                flag,
                (check_weights_path if flag == "checkpoint" else check_path)(flag, path),
            )


def check_input(path: str) -> str:
    """Returns the local path of an image or a folder, with `~` expanded. Raises `UserError` if it does not exist."""
    path = check_path("INPUT", path, allow_patterns=True)
    if "://" in path:
        raise UserError(f"INPUT={path}: only local paths are supported here. Use a local path.")
    if not os.path.lexists(path):
        raise UserError(f"INPUT={path}: no such file or folder. Check the path.")
    return path


def check_folder(path: str) -> None:
    """Raises `UserError` if the folder in `--dataset=folder:PATH` does not exist."""
    if not os.path.isdir(os.path.expanduser(path)):
        raise UserError(f"--dataset=folder:{path}: the directory does not exist. Check the path.")


def check_out(out: str, suffixes: Sequence[str]) -> str:
    """Returns the absolute path of a new output file. Raises `UserError` if the file cannot be written.

    Args:
      out: value of `--out`. The caller creates missing parent directories.
      suffixes: the allowed suffixes.
    """
    out = check_path("out", out)
    if "://" in out:
        raise UserError(f"--out={out}: only local paths are supported here. Use a local path.")
    out = os.path.abspath(out)
    if os.path.splitext(out)[1].lower() not in suffixes:
        raise UserError(
            f"--out={out}: unsupported format. Use a file name that ends in"
            f" {' or '.join(suffixes)}."
        )
    check_writable_parent("--out", out)
    if os.path.lexists(out):
        raise UserError(f"--out={out}: the path exists. Use another path, or delete this one.")
    return out


def check_writable_parent(flag: str, path: str | None) -> None:
    """Raises `UserError` if no file can be created at `path`, even after its missing parents are created.

    Ignores None and remote paths. `flag` is the name of the flag, with dashes, for error messages.
    """
    if not path or "://" in path:
        return
    directory = os.path.dirname(path.rstrip("/")) or "."
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory) or "."
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(
            f"{flag}={path}: {directory} is not a writable directory. Fix its permissions, or choose"
            " another directory."
        )
