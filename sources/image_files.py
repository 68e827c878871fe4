"""Finds image files in a directory tree, and checks their contents using a bounded amount of memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import io
import logging
import os
import pathlib
import stat
import struct
import threading
import unicodedata
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent import futures
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
import tifffile
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from config import DEFAULT_CONVERSION, Conversion
from runtime import progress
from runtime.errors import UserError, first_line
from runtime.pipelines import PARALLEL_CALLS

with contextlib.suppress(ImportError):
    import pillow_heif  # Optional package for HEIC files.

    pillow_heif.register_heif_opener()

_T = TypeVar("_T")
Image.init()
# Larger images, or frames of animations, are not decoded: decoding requires up to 25 bytes per pixel.
MAX_PIXELS = 100_000_000
# Pillow raises an error above twice this number, also for images within files such as icons, and warns below.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# Formats of which Pillow has no decoder, or one that runs other programs.
_NO_FORMATS = {"EPS", "WMF", "MPEG", "BUFR", "GRIB", "HDF5"}
_FORMATS = tuple(name for name in Image.OPEN if name not in _NO_FORMATS)
IMAGE_SUFFIXES = tuple(
    suffix for suffix, name in Image.registered_extensions().items() if name in _FORMATS
)
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # Errors are reported as `UnusableImage`.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)
# Some programs store long texts in PNG files.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
_ROTATED = range(2, 9)  # Exif orientations of images that must be rotated or mirrored
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of segments with the image size
# First two bytes of a file -> marker that its last `_END_BYTES` bytes contain.
_END_MARKERS, _END_BYTES = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}, 64
_TIFF = b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"  # first bytes
# Formats of which only the first page or frame is used.
PAGED_SUFFIXES = (".tif", ".tiff", ".gif", ".webp", ".apng")
# Archivers and file systems create these folders.
_IGNORED_NAMES = ("__MACOSX", "@eaDir", "lost+found")
# Files and images that exceed these sizes are read and decoded one at a time, under
# `_large_image_lock`.
_LARGE_BYTES, _LARGE_PIXELS = 2**24, 2**24
_large_image_lock = threading.RLock()
_BATCH = 256  # number of files that are submitted to the threads at a time


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
      empty: sub-folders without images, sorted by name.
    """

    path: str
    images: list[str]
    folders: list[Folder]
    empty: list[Folder]

    @property
    def name(self) -> str:
        """Name of the directory, without its parents, in Unicode form NFC (archives from macOS use NFD)."""
        return unicodedata.normalize("NFC", os.path.basename(self.path))

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
    """Returns whether a file name has the suffix of a supported format."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def _is_run_directory(names: Collection[str]) -> bool:
    """Returns whether files are those of a `model_dir`, or of the `--out` directory of a transfer evaluation."""
    return ("flags.json" in names or "result.json" in names) and (
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
    visited = set(map(str, pathlib.Path(root).resolve().parents))
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
                    if entry.name.startswith(".") or entry.name in _IGNORED_NAMES:
                        continue
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
        )
        folders, empty = [], []
        for name in sorted(children):
            if folder := visit(os.path.join(path, name)):
                (folders if folder.images or folder.folders else empty).append(folder)
        return Folder(path, images, folders, empty)

    folder = visit("")
    return Search(folder, dict(others.most_common()), runs)


def find_images(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the sorted paths of all image files that `search` finds."""
    return sorted(os.path.join(folder, path) for path in search(folder).folder.files())


# -------------------------------------------------------------------------------------------------------- decoding


def load(path: tf.Tensor, conversion: Conversion = DEFAULT_CONVERSION) -> tf.Tensor:
    """Reads an image file, and converts the content if necessary (see `convert`). Can be used in graph mode.

    JPEG files, and PNG files with opaque pixels of 8 bits, are not converted unless they have Exif
    data. For all other files, `convert` is called.

    Args:
      path: string scalar.
      conversion: see `convert`.

    Returns:
      String scalar: the content of an image file that TensorFlow can decode.
    """
    content = tf.io.read_file(path)
    # At most 8 bits, and gray, RGB or a palette; the rest of the header may have any value.
    is_png = tf.strings.regex_full_match(content, r"\x89PNG\C{20}[\x01-\x08][\x00\x02\x03]\C*")
    has_metadata = tf.strings.regex_full_match(content, r"\C*(Exif|eXIf|tRNS)\C*")

    def convert_array(array):
        # `array` is a 0-dimensional array in eager mode, and bytes in a graph.
        return convert(np.asarray(array, object).item(), conversion)

    return tf.cond(
        (tf.io.is_jpeg(content) | is_png) & ~has_metadata & (not conversion.bands),
        lambda: content,
        lambda: tf.ensure_shape(
            tf.numpy_function(convert_array, [content], tf.string, stateful=False), []
        ),
    )


@contextlib.contextmanager
def _explaining_errors() -> Iterator[None]:
    """Returns a context manager, or a decorator, that raises `UnusableImage` instead of the errors of libraries."""
    try:
        yield
    except (UnusableImage, MemoryError):
        raise
    except Exception as error:  # The libraries raise exceptions of many types for corrupt files.
        raise UnusableImage(_reason(error)) from error


@_explaining_errors()
def convert(content: bytes, conversion: Conversion) -> bytes:
    """Converts the content of an image file to a format that TensorFlow can decode.

    Returns JPEG and PNG files unchanged, unless they have more than 8 bits or transparent pixels, or
    their Exif data specify that the image must be rotated or mirrored for display. Returns other
    images, and the first frame of an animation, as a BMP file. The background of transparent images
    is white.

    Raises:
      UnusableImage: the image is corrupt, or the type of its pixels is not supported.
    """
    image = _open(content)
    values = _read_values(image, content, conversion)
    if values is not None:
        rgb = _scale(values, conversion)
    elif (
        _orientation(image) not in _ROTATED
        and image.format in ("JPEG", "MPO", "PNG")
        and not image.has_transparency_data
    ):
        return content
    else:
        # Some of Pillow's decoders rotate the image and then remove the orientation tag.
        image.load()
        rgb = to_rgb(image)
    rgb.info = {}  # When it rotates an image, Pillow also rewrites metadata, which may be malformed.
    rgb.getexif()[ExifTags.Base.Orientation] = _orientation(image)
    ImageOps.exif_transpose(rgb, in_place=True)
    bitmap = io.BytesIO()
    rgb.save(bitmap, "BMP")
    return bitmap.getvalue()


def largest_values(path: str, conversion: Conversion) -> tuple[float, float]:
    """Returns the largest absolute value in an image file, and that of its type.

    Both are 0 if the image has at most 8 bits or is unusable.
    """
    with contextlib.suppress(UnusableImage), checked_content(path) as content, _explaining_errors():
        values = _read_values(_open(content), content, conversion)
        if values is not None and values.colors.dtype.itemsize > 1:
            largest = float(np.abs(values.colors.astype(np.float64)).max())
            if largest < np.inf:  # and not NaN
                return largest, _white(values.colors.dtype)
    return 0.0, 0.0


def count_pages(path: str) -> int:
    """Returns the number of pages or frames of an image file, or 1 if the file is unusable."""
    with contextlib.suppress(UnusableImage), checked_content(path) as content, _explaining_errors():
        return getattr(_open(content), "n_frames", 1)
    return 1


def _open(content: bytes) -> Any:
    """Opens an image with Pillow or, if Pillow cannot, with tifffile (a page)."""
    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except Exception:
        if content[:4] not in _TIFF:
            raise
        return tifffile.TiffFile(io.BytesIO(content)).pages.first


def _reason(error: Exception) -> str:
    """Returns why a library could not open or decode an image."""
    if "imagecodecs" in str(error):
        return "compressed data (pip install imagecodecs)"
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return f"more pixels than the limit of {MAX_PIXELS}"
    if isinstance(error, NotImplementedError) or "unsupported" in str(error).lower():
        return f"not supported: {first_line(error)}"
    return "truncated or corrupt"


class _Values(NamedTuple):
    """Pixels of an image that Pillow does not convert correctly to RGB."""

    colors: np.ndarray  # [h, w, 1 or 3, or the number of bands]
    opacity: np.ndarray | None  # [h, w, 1] in [0, 1]
    is_inverted: bool  # whether the value of white is 0


def _read_values(image: Any, content: bytes, conversion: Conversion) -> _Values | None:
    """Returns the pixels of an image that Pillow does not convert correctly to RGB, or None."""
    tags, bands = getattr(image, "tag_v2", {}), conversion.bands
    bits = np.ravel(tags.get(TiffImagePlugin.BITSPERSAMPLE, 8))
    is_signed = np.ravel(tags.get(TiffImagePlugin.SAMPLEFORMAT, 1))[0] == 2
    is_inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    is_rgb = has_opacity = False
    if isinstance(image, tifffile.TiffPage) or (len(bits) > 1 and (bits.max() > 8 or bands)):
        page = tifffile.TiffFile(io.BytesIO(content)).pages.first
        if page.photometric == tifffile.PHOTOMETRIC.SEPARATED:
            raise UnusableImage("CMYK with more than 8 bits")
        values = page.asarray()
        if page.axes == "SYX":
            values = np.moveaxis(values, 0, -1)
        is_inverted = page.photometric == tifffile.PHOTOMETRIC.MINISWHITE
        is_rgb = page.photometric == tifffile.PHOTOMETRIC.RGB
        has_opacity = any(page.extrasamples[:1])  # 0 is an unspecified channel.
    elif image.format == "PNG" and content[24] > 8:
        values = tf.io.decode_png(content, dtype=tf.uint16).numpy()
        has_opacity = values.shape[-1] in (2, 4)
    elif image.mode == "I" or is_signed:  # Pillow converts to int32 or uint8.
        kind = "u2" if image.format == "PPM" else "i4"
        if tags:
            kind = f"{'i' if is_signed else 'u'}{bits[0] // 8}"
        values = np.asarray(image).astype(kind)
    elif image.mode == "F" or image.mode.startswith("I;16") or bands:
        values = np.asarray(image)
    else:
        return None
    values = np.atleast_3d(values)
    channels = values.shape[-1]
    if bands and max(bands) <= channels:
        return _Values(values[..., [band - 1 for band in bands]], None, is_inverted)
    count = 3 if is_rgb else channels - has_opacity
    if bands or count not in (1, 3):
        raise UnusableImage(f"{channels} channels per pixel: choose three, as in --bands=4,3,2")
    opacity = values[..., count : count + 1] / _white(values.dtype) if has_opacity else None
    return _Values(values[..., :count], opacity, is_inverted)


def _white(dtype: np.dtype) -> float:
    """Returns the largest value of a type of pixels, which is 1 for floating-point numbers."""
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def _scale(values: _Values, conversion: Conversion) -> Image.Image:
    """Returns an RGB image; see `Conversion`."""
    colors, dtype = values.colors, values.colors.dtype
    white = conversion.white_level if dtype.itemsize > 1 else None
    if dtype.kind == "f" and not colors.min() >= 0:  # also if there are NaN values
        raise UnusableImage(f"values down to {colors.min():g}; scale the values to [0, 1]")
    is_unit = dtype.kind == "f" and colors.max() <= 1
    if white is None and dtype.itemsize > 2 and not is_unit:
        raise UnusableImage(f"values up to {colors.max():g}; set --white_level=auto")
    scaled = colors.astype(np.float64) / (white or _white(dtype))
    if dtype.kind == "i":
        scaled = (scaled + 1) / 2
    if values.is_inverted:
        scaled = 1 - scaled
    if values.opacity is not None:
        scaled = scaled * values.opacity + 1 - values.opacity
    rgb = np.uint8(np.round(np.clip(scaled, 0, 1) * 255))
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(rgb, (*rgb.shape[:2], 3))))


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image with 8 bits to RGB. The background of a transparent image is white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = Image.new("RGB", image.size, "white")
    background.paste(image, mask=image)
    return background


def _orientation(image: Any) -> int | None:
    """Returns the Exif orientation of an image, or None if the orientation is not specified."""
    try:
        if isinstance(image, tifffile.TiffPage):
            return image.tags.valueof(ExifTags.Base.Orientation)
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        # Pillow raises exceptions of many types for malformed Exif data, which other programs
        # ignore.
        return None


# --------------------------------------------------------------------------------------------------------- checks


@contextlib.contextmanager
def checked_content(path: str) -> Iterator[bytes]:
    """Returns a context manager that checks an image file's size and header and yields its content for `convert`.

    Decode the image inside the `with` block: large images are then processed one at a time, which
    bounds memory use regardless of the number of threads.

    Args:
      path: a local path.

    Raises:
      UnusableImage: the file is not a usable image.
      UserError: the file cannot be read because of permissions or a disk error.
    """
    size = _file_size(path)
    if size == 0:
        raise UnusableImage("empty")
    with contextlib.ExitStack() as stack:
        if size > _LARGE_BYTES:
            stack.enter_context(_large_image_lock)
        try:
            content = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error
        pixels = _count_pixels(io.BytesIO(content))
        if pixels > MAX_PIXELS:
            raise UnusableImage(f"{pixels} pixels, more than the limit of {MAX_PIXELS}")
        if pixels > _LARGE_PIXELS:
            stack.enter_context(_large_image_lock)
        yield content


def why_unusable(path: str, conversion: Conversion = DEFAULT_CONVERSION) -> str | None:
    """Decodes an image file and returns the reason why it is unusable, or None if it is usable.

    Raises `UserError` if the file cannot be read.
    """
    try:
        with checked_content(path) as content:
            tf.io.decode_image(convert(content, conversion), channels=3, expand_animations=False)
    except UnusableImage as error:
        return str(error)
    except tf.errors.OpError:
        return "truncated or corrupt"
    return None


def looks_complete(path: str) -> bool:
    """Returns whether the header and the end of an image file are as expected. Reads nothing else.

    Returns True for a regular file whose header specifies at most `MAX_PIXELS` pixels. A JPEG or PNG
    file must also contain the marker of its end in the last bytes. Other files may be usable or not;
    see `why_unusable`.
    """
    try:
        size = _file_size(path)
        with open(path, "rb") as file:
            kind = file.read(2)
            marker = _END_MARKERS.get(kind, b"")
            pixels = _count_jpeg_pixels(file) if kind == b"\xff\xd8" else 0
            file.seek(max(size - _END_BYTES, 0))
            end = file.read()
            file.seek(0)
            pixels = pixels or _count_pixels(file)
    except (UnusableImage, UserError, OSError):
        return False
    return 0 < pixels <= MAX_PIXELS and marker in end


def find_unusable(paths: list[str], check: Callable[[str], str | None]) -> dict[str, str]:
    """Calls `check` for all files, and returns a dict that maps the path of each unusable file to the reason."""
    # After a signal, `closing` cancels the queued calls.
    with contextlib.closing(map_paths(check, paths)) as reasons:
        checks = progress.track(zip(paths, reasons), "checking images", len(paths))
        return {path: reason for path, reason in checks if reason}


def map_paths(function: Callable[[str], _T], paths: list[str]) -> Generator[_T, None, None]:
    """Yields the results of a function for each path, in order. Uses several threads."""
    with futures.ThreadPoolExecutor(PARALLEL_CALLS) as pool:
        for start in range(0, len(paths), _BATCH):
            yield from pool.map(function, paths[start : start + _BATCH])


def _file_size(path: str) -> int:
    try:
        path.encode()
        status = os.stat(path)
    except UnicodeEncodeError as error:
        raise UnusableImage("file name is not UTF-8") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            raise UnusableImage("broken link" if os.path.islink(path) else "missing") from error
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnusableImage("not a regular file")  # Opening a FIFO would block.
    return status.st_size


def _count_jpeg_pixels(file: io.BufferedReader) -> int:
    """Returns the number of pixels of an open JPEG file, or 0 if its header has an unknown form. Pillow is slower."""
    file.seek(2)
    while len(segment := file.read(9)) == 9 and segment[0] == 0xFF:
        marker, length, height, width = struct.unpack(">xBHxHH", segment)
        if marker in _JPEG_FRAMES:
            return height * width
        file.seek(length - 7, io.SEEK_CUR)
    return 0


@_explaining_errors()
def _count_pixels(file: IO[bytes]) -> int:
    """Returns the number of pixels that a library will allocate for an open file. Reads only the header.

    Raises:
      UnusableImage: the file is corrupt, or is not an image in a supported format.
    """
    header = file.read(12)
    if header[4:11] in (b"ftyphei", b"ftypmif") and ".heic" not in IMAGE_SUFFIXES:
        raise UnusableImage("HEIC or similar (pip install pillow-heif)")
    file.seek(0)
    if header[:4] in _TIFF:  # TIFF tiles may be larger than the image.
        page = tifffile.TiffFile(file).pages.first
        pixels = page.imagewidth * page.imagelength, page.tilewidth * page.tilelength
        return max(*pixels, page.nbytes // 8)  # 8 bytes are four channels of 16 bits.
    image = Image.open(file, formats=_FORMATS)
    return image.width * image.height


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(
        f"{path}: the file or directory cannot be read ({error.strerror or first_line(error)}). Fix"
        " the cause, and run the same command again."
    )
