"""Checks all images in a folder before training starts."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable

from config import Config
from runtime import console, storage
from runtime.errors import UserError
from sources import image_files
from sources.files import FileSource
from sources.source import Source

_CHECK_FILE = "images.json"
_SAMPLE, _MAX_SAMPLE = 32, 2000  # numbers of images whose largest values are read
_VERSION = 3  # Increase this number when a code change affects which images are usable.


def check_images(config: Config, source: Source, is_chief: bool) -> None:
    """Decodes all images in a folder and applies `--corrupt_images` to the unusable ones.

    If `model_dir` is set, the result is stored in images.json in that directory and reused until a
    file changes.

    Raises:
      UserError: some images are unusable and `--corrupt_images=error` is set, or all images are
        unusable.
    """
    if not isinstance(source, FileSource):
        return
    paths, path = source.paths(), config.model_dir and os.path.join(config.model_dir, _CHECK_FILE)
    inputs: dict = dict(
        digest=files_digest(paths), version=_VERSION, conversion=repr(source.conversion)
    )
    result = None
    with contextlib.suppress(UserError):  # An unreadable file is rewritten.
        result = path and storage.read_json(path)
    if not result or result != {**result, **inputs}:
        result = dict(inputs, unusable=image_files.find_unusable(paths, source.conversion))
        if path and is_chief and config.mode != "eval":
            storage.write_json(path, result)
    unusable = result["unusable"]
    if not unusable:
        return
    names = [
        f"{os.path.relpath(path, source.root)} ({reason})" for path, reason in unusable.items()
    ]
    problem = f"{len(unusable)} of {len(paths)} images cannot be used: {console.join_first(names)}"
    stops = config.corrupt_images == "error"
    if stops or len(unusable) == len(paths):
        raise UserError(
            f"--dataset={config.dataset}: {problem}. Fix or remove them"
            f"{', or skip them with --corrupt_images=skip' * stops}."
        )
    source.exclude(unusable)
    if is_chief:
        console.log(f"skipped: {problem}")


def find_white_level(config: Config, source: Source) -> str | None:
    """Returns the value of `--white_level` for the images of the training split, or None if all have 8 bits."""
    largest, _ = source.largest_values(config.train_split, _MAX_SAMPLE)
    return f"{largest:g}" if largest else None


def describe_values(config: Config, source: Source) -> list[str]:
    """Returns a line if training images would be much darker than their largest value."""
    largest, possible = source.largest_values(config.train_split, _SAMPLE)
    if config.white_level or largest > possible / 4 or not largest:
        return []
    return [
        f"the sampled images have values up to {largest:g}, but white is {possible:g}, so they are"
        " almost black. Set --white_level=auto"
    ]


def files_digest(paths: Iterable[str]) -> str:
    """Returns a hash of the names, sizes and modification times of files."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
            line = f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}\n"
        except OSError:  # The path is a broken link, which `find_unusable` reports.
            line = f"{path}|\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
