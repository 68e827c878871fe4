"""Finds image files in a directory tree, and checks their contents using a bounded amount of memory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from concurrent import futures

import tensorflow as tf

from config import MAX_IMAGE_PIXELS
from runtime import progress
from runtime.errors import UserError, first_line

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_JPEG, _PNG, _GIF, _BMP = b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM"
# Maps the first bytes of a file to the name of a format that TensorFlow cannot decode.
_UNSUPPORTED = {b"RIFF": "WebP", b"II*": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"<": "HTML or SVG"}
_IGNORED_FOLDERS = ("__MACOSX", "@eaDir", "lost+found")  # created by archivers and file systems
# Files and images that exceed these sizes are read and decoded one at a time, under `_large_image_lock`.
_LARGE_BYTES, _LARGE_PIXELS = 2**24, 2**24
_large_image_lock = threading.RLock()
_BATCH = 256  # number of files submitted to the thread pool at a time
# Maximum encoded size of a pixel (four uncompressed 16-bit channels), and an allowance for metadata.
_BYTES_PER_PIXEL, _METADATA_BYTES = 8, 2**24


class UnusableImage(Exception):
    """Raised if an image file is unusable. The message states the reason."""


# --------------------------------------------------------------------------------------------------------- search


def is_ignored(folder: str, name: str) -> bool:
    """Returns whether the image search skips the sub-folder `name` of `folder`.

    The search skips hidden folders, folders created by archivers and file systems, and run directories. Run directories
    are skipped because a run's figures would otherwise become training data when the run resumes.
    """
    return name.startswith(".") or name in _IGNORED_FOLDERS or is_run_directory(os.path.join(folder, name))


def is_run_directory(folder: str) -> bool:
    """Returns whether a folder is a run directory: a `model_dir`, or the `--out` directory of a transfer evaluation."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False  # The caller also lists the folder and reports the error.
    has_settings = "flags.json" in names or "settings.json" in names
    return has_settings and ("train.lock" in names or any(name.startswith("ckpt-") for name in names))


def is_image_name(name: str) -> bool:
    """Returns whether a file name has the suffix of a supported format and is not hidden."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def iterate_images(folder: str) -> Iterator[str]:
    """Yields the paths of all image files under a folder, at any depth, in alphabetical order within each directory.

    Follows links, but visits each directory once, because links may form cycles. Skips folders that match `is_ignored`.
    Raises `UserError` if a directory cannot be read.
    """
    def raise_unreadable(error):
        raise _unreadable(error.filename, error)

    visited = set()
    for directory, folders, names in os.walk(folder, onerror=raise_unreadable, followlinks=True):
        if (real_path := os.path.realpath(directory)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = sorted(name for name in folders if not is_ignored(directory, name))
        yield from (os.path.join(directory, name) for name in sorted(names) if is_image_name(name))


def find_images(folder: str) -> list[str]:
    """Returns the paths that `iterate_images` yields, sorted."""
    return sorted(iterate_images(folder))


# --------------------------------------------------------------------------------------------------------- checks


@contextlib.contextmanager
def checked_content(path: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[bytes]:
    """Returns a context manager that checks an image file's size and header and yields the file's content.

    Decode the image inside the context, which processes large images one at a time to bound memory use regardless of
    the number of threads.

    Args:
      path: a local path or a gs:// path.
      max_pixels: maximum number of pixels. For a GIF, the pixels of all frames are added up, because TensorFlow decodes
        all frames together.

    Raises:
      UnusableImage: the file is not a usable image.
      UserError: the file cannot be read because of permissions or a disk error.
    """
    size = _file_size(path)
    if size == 0:
        raise UnusableImage("empty")
    if size > _BYTES_PER_PIXEL * max_pixels + _METADATA_BYTES:
        raise UnusableImage(f"{size} bytes, too many for --max_image_pixels={max_pixels}")
    with contextlib.ExitStack() as stack:
        if size > _LARGE_BYTES:
            stack.enter_context(_large_image_lock)
        content = _read(path)
        _check_format(content)
        pixels = _count_pixels(content)
        if pixels > max_pixels:
            raise UnusableImage(f"{pixels} pixels, more than --max_image_pixels={max_pixels}")
        if pixels > _LARGE_PIXELS:
            stack.enter_context(_large_image_lock)
        yield content


def why_unusable(path: str, max_pixels: int = MAX_IMAGE_PIXELS) -> str | None:
    """Decodes an image file and returns the reason why it is unusable, or None if it is usable.

    For the arguments, see `checked_content`. Raises `UserError` if the file cannot be read.
    """
    try:
        with checked_content(path, max_pixels) as content:
            tf.io.decode_image(content, channels=3, expand_animations=False)
    except UnusableImage as error:
        return str(error)
    except tf.errors.OpError:
        return "truncated or corrupt"
    return None


def find_unusable(paths: list[str], max_pixels: int = MAX_IMAGE_PIXELS) -> dict[str, str]:
    """Decodes all files and returns a dict that maps the path of each unusable file to the reason."""
    pool = futures.ThreadPoolExecutor()

    def reasons():
        for start in range(0, len(paths), _BATCH):
            batch = paths[start:start + _BATCH]
            yield from zip(batch, pool.map(lambda path: why_unusable(path, max_pixels), batch))

    try:
        return {path: reason for path, reason in progress.track(reasons(), len(paths), "checking images") if reason}
    finally:
        pool.shutdown(cancel_futures=True)  # After a signal, do not read the queued files.


def _file_size(path):
    try:
        path.encode()
        if "://" in path:
            return tf.io.gfile.stat(path).length
        status = os.stat(path)
    except UnicodeEncodeError as error:
        raise UnusableImage("file name is not UTF-8") from error
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.NotFoundError) or getattr(error, "errno", None) in (errno.ENOENT, errno.ELOOP):
            raise UnusableImage("broken link" if os.path.islink(path) else "missing") from error
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnusableImage("not a regular file")  # Opening a FIFO would block.
    return status.st_size


def _read(path):
    """Returns the contents of an image file, or the first 32 bytes of any other file."""
    try:
        with (tf.io.gfile.GFile if "://" in path else open)(path, "rb") as file:
            header = file.read(32)
            return header + file.read() if header.startswith((_JPEG, _PNG, _GIF, _BMP)) else header
    except (OSError, tf.errors.OpError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path, error):
    return UserError(f"{path}: the file or directory cannot be read "
                     f"({getattr(error, 'strerror', None) or first_line(error)}). Fix the cause, and run the same "
                     "command again.")


def _check_format(content):
    """Raises `UnusableImage` for formats that TensorFlow cannot decode, or decodes with the wrong colors."""
    unsupported = next((name for prefix, name in _UNSUPPORTED.items() if content.startswith(prefix)), None)
    if content.startswith(_BMP) and _has_palette(content):
        unsupported = "BMP with a palette"
    if unsupported:
        raise UnusableImage(f"unsupported format: {unsupported}; convert it to JPEG or PNG")
    if not content.startswith((_JPEG, _PNG, _GIF, _BMP)):
        raise UnusableImage("not an image")


def _has_palette(bitmap):
    """Returns whether a BMP file's pixels are palette indices, which TensorFlow would read as gray levels."""
    header_bytes, bits = int.from_bytes(bitmap[14:18], "little"), int.from_bytes(bitmap[28:30], "little")
    palette = bitmap[14 + header_bytes:int.from_bytes(bitmap[10:14], "little")]
    # A palette (four bytes per color) that maps each index to the same gray level is harmless.
    return bits < 8 or bits == 8 and any(palette[i] != i // 4 for i in range(len(palette)) if i % 4 < 3)


def _count_pixels(content):
    """Returns how many pixels the decoder will allocate according to the header, or 0 if the decoder rejects it."""
    if content.startswith(_JPEG):
        try:
            height, width, _ = tf.io.extract_jpeg_shape(content).numpy().tolist()
        except tf.errors.OpError:
            return 0
        return height * width
    if content.startswith(_PNG):
        return int.from_bytes(content[16:20], "big") * int.from_bytes(content[20:24], "big")
    if content.startswith(_BMP):
        width, height = (int.from_bytes(content[start:start + 4], "little", signed=True) for start in (18, 22))
        return abs(width * height)
    return _count_gif_pixels(content)


def _count_gif_pixels(content):
    """Returns the number of pixels in all frames of a GIF, or in their bounding box if that is larger.

    Parses blocks as defined in the GIF89a specification, up to the trailer or the first invalid block.
    """
    def color_table_size(flags):
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    def skip_sub_blocks(position):
        while position < len(content) and content[position]:
            position += content[position] + 1
        return position + 1

    if len(content) < 13:
        return 0
    total = width = height = 0
    position = 13 + color_table_size(content[10])
    while position + 10 <= len(content) and content[position] in (0x21, 0x2c):  # an extension or an image
        if content[position] == 0x21:
            position = skip_sub_blocks(position + 2)
            continue
        frame_width, frame_height = (int.from_bytes(content[position + offset:position + offset + 2], "little")
                                     for offset in (5, 7))
        total, width, height = total + frame_width * frame_height, max(width, frame_width), max(height, frame_height)
        position = skip_sub_blocks(position + 10 + color_table_size(content[position + 9]) + 1)
    return max(total, width * height)
