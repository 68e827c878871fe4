"""Checks the images in a folder before training starts, and names those that cannot be read later."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator

import tensorflow as tf

from config import Config
from runtime import console, devices, storage, workers
from runtime.errors import UserError, first_line
from sources import image_files
from sources.files import FileSource
from sources.source import Source

_SAMPLE, _MAX_SAMPLE = 32, 2000  # numbers of images whose pixels are read
_MANY_IMAGES = 50_000  # Of larger data sets, only a sample is decoded.
_VERSION = 4  # Increase this number when a code change affects which images are usable.
# Errors of TensorFlow for files that are missing, unreadable or corrupt.
_READ_ERRORS = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnknownError,
)


def check_images(
    config: Config, source: Source, strategy: tf.distribute.Strategy | None = None
) -> None:
    """Checks all images in a folder, and applies `--corrupt_images` to the unusable ones.

    All images are decoded, unless there are more than 50,000 and `--corrupt_images=error` is set: then
    the headers and ends of all files are read, and the pixels of 2,000. `naming_unusable` reports
    others that cannot be decoded when they are read. With several workers, only the chief reads files.

    Raises:
      UserError: some images are unusable and `--corrupt_images=error` is set, or all images are
        unusable.
    """
    if not isinstance(source, FileSource):
        return
    strategy = strategy or tf.distribute.get_strategy()
    is_chief = devices.is_chief(strategy)
    text = json.dumps(_find_unusable(config, source)) if is_chief else ""
    unusable = json.loads(workers.broadcast(text, strategy))
    if not unusable:
        return
    num_images = len(source.paths())
    problem = f"{len(unusable)} of {num_images} images cannot be used: {_join(source, unusable)}"
    stops = config.corrupt_images == "error"
    if stops or len(unusable) == num_images:
        skip = ", or skip them with --corrupt_images=skip" if stops else ""
        raise UserError(f"--dataset={config.dataset}: {problem}. Fix or remove them{skip}.")
    source.exclude(unusable)
    if is_chief:
        console.log(f"skipped: {problem}")


def _join(source: FileSource, notes: dict[str, str]) -> str:
    """Returns the first paths, relative to the root of the data set, each with its note."""
    return console.join_first(
        [f"{os.path.relpath(path, source.root)} ({note})" for path, note in notes.items()]
    )


def _find_unusable(config: Config, source: FileSource) -> dict[str, str]:
    """Returns a dict that maps the path of each unusable file to the reason.

    The result is kept in the user's cache directory and reused until a file changes. Only unusable
    files are checked again, because a missing package may have been installed.
    """
    paths = source.paths()
    decode = functools.partial(image_files.why_unusable, conversion=source.conversion)
    decodes_all = len(paths) <= _MANY_IMAGES or config.corrupt_images == "skip"
    inputs = f"{_VERSION} {decodes_all} {source.conversion} {source.files_digest()}"
    cache = os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "simclr-tf2",
        f"images_{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.json",
    )
    with contextlib.suppress(UserError):  # An unreadable file is rewritten.
        unusable = storage.read_json(cache)
        if unusable is not None:
            return image_files.find_unusable([*unusable], decode)
    sample = set(paths if decodes_all else source.labeled_paths()[0][:_MAX_SAMPLE])

    def check(path):
        if path not in sample and image_files.looks_complete(path):
            return None
        return decode(path)

    unusable = image_files.find_unusable(paths, check)
    if not decodes_all:
        console.log(
            f"checked the headers of {len(paths):,} images and the pixels of {len(sample):,}; the"
            " others are checked when they are read (--corrupt_images=skip decodes all images first)"
        )
    with contextlib.suppress(UserError, OSError):  # The home directory may be read-only.
        storage.write_json(cache, unusable)
    return unusable


def find_white_level(source: Source, train_split: str) -> str | None:
    """Returns the value of `--white_level` for the images of the training split, or None if all have 8 bits."""
    largest, _ = source.largest_values(train_split, _MAX_SAMPLE)
    return f"{largest:g}" if largest else None


def describe_pages(config: Config, source: Source) -> list[str]:
    """Returns a line if some of the first training images have several pages or frames."""
    if not isinstance(source, FileSource):
        return []
    paths = source.labeled_paths(config.train_split)[0]
    paths = [path for path in paths if path.lower().endswith(image_files.PAGED_SUFFIXES)]
    counts = zip(paths, image_files.map_paths(image_files.count_pages, paths[:_MAX_SAMPLE]))
    paged = {path: str(count) for path, count in counts if count > 1}
    if not paged:
        return []
    return [f"only the first page or frame of {len(paged)} images is used: {_join(source, paged)}"]


def describe_values(config: Config, source: Source) -> list[str]:
    """Returns a line if training images would be much darker than their largest value."""
    largest, possible = source.largest_values(config.train_split, _SAMPLE)
    if config.white_level or largest > possible / 4 or not largest:
        return []
    return [
        f"the sampled images have values up to {largest:g}, but white is {possible:g}, so they are"
        " almost black. Set --white_level=auto"
    ]


@contextlib.contextmanager
def naming_unusable(
    source: Source, paths: Callable[[FileSource], list[str]], save: Callable[[], str] = str
) -> Iterator[None]:
    """Returns a context manager that reports which image TensorFlow could not read.

    Args:
      source: the data set that is read inside the `with` block.
      paths: returns the paths of the images of `source`, in the order in which they are read.
      save: called before the error is raised. Returns a text for its message.

    Raises:
      UserError: an image is unusable.
    """
    try:
        yield
    except _READ_ERRORS as error:
        if not isinstance(source, FileSource):
            raise
        console.log(f"searching for the image that could not be read ({first_line(error)})")
        decode = functools.partial(image_files.why_unusable, conversion=source.conversion)
        names = paths(source)
        for name, reason in zip(names, image_files.map_paths(decode, names)):
            if reason:
                raise UserError(
                    f"--dataset={source.name}: an image cannot be used:"
                    f" {_join(source, {name: reason})}.{save()} Fix or remove the image, or set"
                    " --corrupt_images=skip, and run the same command again."
                ) from error
        raise
