"""Checks of all images of a folder before a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from config import Config
from runtime import console, storage
from runtime.errors import UserError
from sources import image_files
from sources.folders import FolderSource
from sources.source import Source

_IMAGES = "images.json"
_NAMED = 10  # images that a message names


def check_images(config: Config, source: Source, is_chief: bool) -> None:
    """Checks all images of a folder, and applies `--corrupt_images` to those that cannot be used.

    All files are read. With a `model_dir`, the result is stored in its images.json and reused until a file changes.

    Raises:
      UserError: images cannot be used, and `--corrupt_images=error` or no image is left.
    """
    if not isinstance(source, FolderSource):
        return
    paths, path = source.paths(), config.model_dir and os.path.join(config.model_dir, _IMAGES)
    checked = dict(digest=files_digest(paths), max_image_pixels=config.max_image_pixels)
    known = path and storage.read_json(path)
    if not isinstance(known, dict) or not isinstance(known.get("unusable"), dict) or known != {**known, **checked}:
        known = dict(checked, unusable=image_files.find_unusable(paths, config.max_image_pixels))
        if path and is_chief and config.mode != "eval":
            storage.write_json(path, known)
    unusable = known["unusable"]
    if not unusable:
        return
    named = [f"{os.path.relpath(path, source.root)} ({reason})" for path, reason in unusable.items()][:_NAMED]
    named += [f"and {len(unusable) - _NAMED} more"] if len(unusable) > _NAMED else []
    text = f"{len(unusable)} of {len(paths)} images cannot be used: {', '.join(named)}"
    if config.corrupt_images == "error" or len(unusable) == len(paths):
        raise UserError(f"--dataset={config.dataset}: {text}. Repair or remove them, or leave them out with "
                        "--corrupt_images=skip.")
    known_to_miss = source.describe_missing_classes()
    source.exclude(unusable)
    if is_chief:
        for line in [f"left out: {text}", *source.describe_missing_classes()]:
            if line not in known_to_miss:
                console.log(line)


def files_digest(paths: Iterable[str]) -> str:
    """Changes with the names, sizes and times of files."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
            line = f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}\n"
        except OSError:  # A link to nothing: an image that cannot be used.
            line = f"{path}|\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
