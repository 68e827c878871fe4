"""Finds image files in a directory tree, and checks their contents using a bounded amount of memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import io
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent import futures
from typing import TypeVar

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, PngImagePlugin, TiffImagePlugin

from runtime import progress
from runtime.errors import UserError, first_line

with contextlib.suppress(ImportError):
    import pillow_heif  # Optional package for HEIC files.

    pillow_heif.register_heif_opener()

_T = TypeVar("_T")
Image.init()
# Larger images, or frames of animations, are not decoded: decoding requires up to 25 bytes per pixel.
MAX_PIXELS = 100_000_000
Image.MAX_IMAGE_PIXELS = None  # `MAX_PIXELS` replaces Pillow's limit.
# Suffix -> Pillow's name for the format. Files in other formats are not opened, since some decoders
# run other programs.
_FORMAT_OF_SUFFIX = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".gif": "GIF",
    ".bmp": "BMP",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".avif": "AVIF",
    ".heic": "HEIF",
    ".heif": "HEIF",
}
IMAGE_SUFFIXES = tuple(suffix for suffix, name in _FORMAT_OF_SUFFIX.items() if name in Image.OPEN)
_FORMATS = tuple(dict.fromkeys(_FORMAT_OF_SUFFIX[suffix] for suffix in IMAGE_SUFFIXES))
# Some programs store long texts in PNG files.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
# Exif orientation -> Pillow's method that makes the image upright.
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG = b"\x89PNG"
# Archivers and file systems create these folders.
_IGNORED_FOLDERS = ("__MACOSX", "@eaDir", "lost+found")
# Files and images that exceed these sizes are read and decoded one at a time, under
# `_large_image_lock`.
_LARGE_BYTES, _LARGE_PIXELS = 2**24, 2**24
_large_image_lock = threading.RLock()
_BATCH = 256  # Number of files that are submitted to the thread pool at a time.
# Maximum encoded size of a pixel (four uncompressed 16-bit channels), and an allowance for
# metadata.
_BYTES_PER_PIXEL, _METADATA_BYTES = 8, 2**24


class UnusableImage(Exception):
    """Raised if an image file is unusable. The message states the reason."""


# --------------------------------------------------------------------------------------------------------- search


@dataclasses.dataclass(frozen=True)
class Folder:
    """A directory that was searched for images.

    Attributes:
      path: path relative to the directory where the search started.
      images: sorted names of the image files in the directory.
      folders: sub-folders with images at any depth, sorted by name.
      empty: sorted names of the sub-folders without images.
    """

    path: str
    images: list[str]
    folders: list[Folder]
    empty: list[str]

    @property
    def name(self) -> str:
        """Name of the directory, without its parents."""
        return os.path.basename(self.path)

    def files(self) -> Iterator[str]:
        """Yields the relative paths of all images, at any depth."""
        yield from (os.path.join(self.path, name) for name in self.images)
        for folder in self.folders:
            yield from folder.files()


@dataclasses.dataclass(frozen=True)
class Search:
    """Result of `search`.

    Attributes:
      folder: the directory where the search started.
      others: number of other files that are not hidden, by suffix, most frequent first.
      runs: relative paths of the run directories, which are not searched, because a run's figures
        would otherwise become training data when the run resumes.
    """

    folder: Folder
    others: dict[str, int]
    runs: list[str]


def is_image_name(name: str) -> bool:
    """Returns whether a file name has the suffix of a supported format and is not hidden."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _is_run_directory(names: Collection[str]) -> bool:
    """Returns whether files are those of a `model_dir`, or of the `--out` directory of a transfer evaluation."""
    has_settings = "flags.json" in names or "result.json" in names
    return has_settings and (
        "train.lock" in names or any(name.startswith("ckpt-") for name in names)
    )


def search(root: str | os.PathLike[str]) -> Search:
    """Searches a directory for image files, at any depth.

    Skips hidden folders, folders created by archivers and file systems, and run directories. Follows
    links, but visits each directory once and none that contains `root`, because links may form
    cycles.

    Raises:
      UserError: a directory cannot be read.
    """
    # A link to a directory that contains `root` is part of a cycle.
    visited = {str(parent) for parent in pathlib.Path(root).resolve().parents}
    others, runs = collections.Counter(), []

    def visit(path):
        directory = os.path.join(root, path)
        if (real_path := os.path.realpath(directory)) in visited:
            return None
        visited.add(real_path)
        files, children = [], []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    # The targets of links to images are not examined, because this would take long.
                    is_folder = entry.is_dir(follow_symlinks=not is_image_name(entry.name))
                    (children if is_folder else files).append(entry.name)
        except OSError as error:
            raise _unreadable(directory, error) from error
        if path and _is_run_directory(files):
            runs.append(path)
            return None
        images = sorted(name for name in files if is_image_name(name))
        others.update(
            os.path.splitext(name)[1].lower() or "no suffix"
            for name in set(files).difference(images)
            if not name.startswith(".")
        )
        folders, empty = [], []
        for name in sorted(children):
            if name.startswith(".") or name in _IGNORED_FOLDERS:
                continue
            folder = visit(os.path.join(path, name))
            if folder is not None:
                is_empty = not (folder.images or folder.folders)
                (empty if is_empty else folders).append(name if is_empty else folder)
        return Folder(path, images, folders, empty)

    folder = visit("")
    return Search(folder, dict(others.most_common()), sorted(runs))


def find_images(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the sorted paths of all image files that `search` finds."""
    return sorted(os.path.join(folder, path) for path in search(folder).folder.files())


# -------------------------------------------------------------------------------------------------------- decoding


def load(path: tf.Tensor) -> tf.Tensor:
    """Reads an image file, and converts the content if necessary (see `convert`). Can be used in graph mode.

    JPEG and PNG files without Exif data are not converted. For all other files, `convert` is
    called.

    Args:
      path: string scalar.

    Returns:
      String scalar: the content of an image file that TensorFlow can decode.
    """
    content = tf.io.read_file(path)
    is_png = tf.strings.substr(content, 0, len(_PNG)) == _PNG
    has_exif = tf.strings.regex_full_match(content, r"\C*(Exif|eXIf)\C*")

    def convert_array(array):
        # `array` is a 0-dimensional array in eager mode, and bytes in a graph.
        return convert(array.item() if isinstance(array, np.ndarray) else array)

    return tf.cond(
        (tf.io.is_jpeg(content) | is_png) & ~has_exif,
        lambda: content,
        lambda: tf.ensure_shape(
            tf.numpy_function(convert_array, [content], tf.string, stateful=False), []
        ),
    )


def convert(content: bytes) -> bytes:
    """Converts the content of an image file to a format that TensorFlow can decode.

    Returns JPEG and PNG files unchanged, unless their Exif data specify that the image must be
    rotated or mirrored for display. Decodes other files with Pillow, and returns the image, or the
    first frame of an animation, as a BMP file.

    Raises:
      UnusableImage: the image is corrupt, or the type of its pixels is not supported.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            has_exif = b"Exif" in content or b"eXIf" in content
            if image.format in ("JPEG", "MPO", "PNG") and not (
                has_exif and _orientation(image) in _TRANSPOSITIONS
            ):
                return content
            bitmap = io.BytesIO()
            # Some of Pillow's decoders rotate the image and then remove the orientation tag.
            image.load()
            method = _TRANSPOSITIONS.get(_orientation(image))
            image = to_rgb(image)
            (image if method is None else image.transpose(method)).save(bitmap, "BMP")
            return bitmap.getvalue()
    except (UnusableImage, MemoryError):
        raise
    except Exception as error:  # Pillow raises exceptions of many types for corrupt files.
        raise UnusableImage("truncated or corrupt") from error


def _orientation(image: Image.Image) -> int | None:
    """Returns the Exif orientation of an image, or None if the orientation is not specified."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        # Pillow raises exceptions of many types for malformed Exif data, which other programs
        # ignore.
        return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any type to 8-bit RGB. Raises `UnusableImage` if the range of its pixels is unknown."""
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit values instead of scaling them.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnusableImage("32-bit pixels of unknown range; convert the image to JPEG or PNG")
    return image.convert("RGB")


# --------------------------------------------------------------------------------------------------------- checks


@contextlib.contextmanager
def checked_content(path: str) -> Iterator[bytes]:
    """Returns a context manager that checks an image file's size and header and yields its content for `convert`.

    Decode the image inside the `with` block: large images are then processed one at a time, which
    bounds memory use regardless of the number of threads.

    Args:
      path: a local path or a gs:// path.

    Raises:
      UnusableImage: the file is not a usable image.
      UserError: the file cannot be read because of permissions or a disk error.
    """
    size = _file_size(path)
    if size == 0:
        raise UnusableImage("empty")
    if size > _BYTES_PER_PIXEL * MAX_PIXELS + _METADATA_BYTES:
        raise UnusableImage(f"{size} bytes, too many for {MAX_PIXELS} pixels")
    with contextlib.ExitStack() as stack:
        if size > _LARGE_BYTES:
            stack.enter_context(_large_image_lock)
        try:
            with (tf.io.gfile.GFile if "://" in path else open)(path, "rb") as file:
                pixels = _count_pixels(file)
                file.seek(0)
                content = file.read() if pixels <= MAX_PIXELS else b""
        except (OSError, tf.errors.OpError) as error:
            raise _unreadable(path, error) from error
        if pixels > MAX_PIXELS:
            raise UnusableImage(f"{pixels} pixels, more than the limit of {MAX_PIXELS}")
        if pixels > _LARGE_PIXELS:
            stack.enter_context(_large_image_lock)
        yield content


def why_unusable(path: str) -> str | None:
    """Decodes an image file and returns the reason why it is unusable, or None if it is usable.

    Raises `UserError` if the file cannot be read.
    """
    try:
        with checked_content(path) as content:
            tf.io.decode_image(convert(content), channels=3, expand_animations=False)
    except UnusableImage as error:
        return str(error)
    except tf.errors.OpError:
        return "truncated or corrupt"
    return None


def find_unusable(paths: list[str]) -> dict[str, str]:
    """Decodes all files and returns a dict that maps the path of each unusable file to the reason."""
    # After a signal, `closing` cancels the queued calls.
    with contextlib.closing(map_paths(why_unusable, paths)) as reasons:
        checks = progress.track(zip(paths, reasons), len(paths), "checking images")
        return {path: reason for path, reason in checks if reason}


def map_paths(function: Callable[[str], _T], paths: list[str]) -> Generator[_T, None, None]:
    """Yields the results of a function for each path, in order. Uses several threads."""
    with futures.ThreadPoolExecutor() as pool:
        for start in range(0, len(paths), _BATCH):
            yield from pool.map(function, paths[start : start + _BATCH])


def _file_size(path: str) -> int:
    try:
        path.encode()
        if "://" in path:
            return tf.io.gfile.stat(path).length
        status = os.stat(path)
    except UnicodeEncodeError as error:
        raise UnusableImage("file name is not UTF-8") from error
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.NotFoundError) or getattr(error, "errno", None) in (
            errno.ENOENT,
            errno.ELOOP,
        ):
            raise UnusableImage("broken link" if os.path.islink(path) else "missing") from error
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnusableImage("not a regular file")  # Opening a FIFO would block.
    return status.st_size


def _count_pixels(file: io.BufferedReader | tf.io.gfile.GFile) -> int:
    """Returns the number of pixels that Pillow will allocate for an open file. Reads only the header.

    Raises:
      UnusableImage: the file is corrupt, or is not an image in a supported format.
    """
    header = file.read(32)
    try:
        if header[8:16] == b"WEBPVP8X":  # Pillow allocates the canvas when it opens the file.
            return (int.from_bytes(header[24:27], "little") + 1) * (
                int.from_bytes(header[27:30], "little") + 1
            )
        file.seek(0)
        with Image.open(file, formats=_FORMATS) as image:
            tags = getattr(image, "tag_v2", {})  # TIFF tiles may be larger than the image.
            tile = tags.get(TiffImagePlugin.TILEWIDTH, 0) * tags.get(TiffImagePlugin.TILELENGTH, 0)
            return max(image.width * image.height, tile)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises exceptions of many types for corrupt headers.
        if isinstance(error, tf.errors.OpError) or getattr(error, "errno", None):
            raise
        if any(accepts and accepts(header) is True for _, accepts in map(Image.OPEN.get, _FORMATS)):
            raise UnusableImage("truncated or corrupt") from error
        raise UnusableImage(
            f"not an image in a supported format ({', '.join(_FORMATS)})"
        ) from error


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{path}: the file or directory cannot be read"
        f" ({getattr(error, 'strerror', None) or first_line(error)}). Fix the cause, and run the"
        " same command again."
    )
