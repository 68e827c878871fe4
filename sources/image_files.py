"""Image files: finding them below a folder, and checking them within bounded memory before they are decoded."""

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
# First bytes of files that TensorFlow cannot decode.
_UNSUPPORTED = {b"RIFF": "WebP", b"II*": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"<": "HTML or SVG"}
_IGNORED_FOLDERS = ("__MACOSX", "@eaDir", "lost+found")  # written by archivers and file systems
# Files and images above these sizes are read and decoded one at a time.
_LARGE_BYTES, _LARGE_PIXELS = 2**24, 2**24
_one_large = threading.RLock()
_AT_ONCE = 256
# The largest encoding per pixel: four channels of 16 bits, not compressed. Metadata comes on top.
_BYTES_PER_PIXEL, _METADATA_BYTES = 8, 2**24


class UnusableImage(Exception):
    """Raised for an image file that cannot be used. Its text is the reason."""


# -------------------------------------------------------------------------------------------------------- finding


def is_ignored(folder: str, name: str) -> bool:
    """Returns whether the sub-folder `name` of `folder` never holds images of a data set.

    That is: hidden folders, those of archivers and file systems, and directories of runs (`model_dir`), whose own
    images would otherwise become data at the second start.
    """
    return name.startswith(".") or name in _IGNORED_FOLDERS or is_run_directory(os.path.join(folder, name))


def is_run_directory(folder: str) -> bool:
    """Returns whether a folder is the directory of a run (`model_dir`, or `--out` of a transfer)."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False  # The caller lists it as well, and reports the error.
    has_settings = "flags.json" in names or "settings.json" in names
    return has_settings and ("train.lock" in names or any(name.startswith("ckpt-") for name in names))


def is_image_name(name: str) -> bool:
    """Returns whether a file's name is that of an image; hidden files are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def iterate_images(folder: str) -> Iterator[str]:
    """Yields the paths of all image files below a folder, at any depth and through links, in the order of names.

    Each directory is visited once, since links may form cycles; see `is_ignored`. Raises `UserError` for directories
    that cannot be read.
    """
    def refuse(error):
        raise UserError(f"{error.filename} cannot be read ({error.strerror}). Fix this, and start the same command "
                        "again.")

    seen = set()
    for where, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(where)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not is_ignored(where, name))
        yield from (os.path.join(where, name) for name in sorted(names) if is_image_name(name))


def find_images(folder: str) -> list[str]:
    """Returns the paths that `iterate_images` yields, sorted."""
    return sorted(iterate_images(folder))


# ------------------------------------------------------------------------------------------------------- checking


@contextlib.contextmanager
def checked_content(path: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[bytes]:
    """A context that gives the content of an image file, checked as far as its header goes.

    Large files and images are handled one at a time: decode within the context, so that memory stays bounded on any
    number of threads.

    Args:
      path: a local file, or one on gs://.
      max_pixels: limit on width times height, for GIFs summed over all frames, which TensorFlow decodes together.

    Raises:
      UnusableImage: the file does not hold an image that can be used.
      UserError: the file cannot be read for reasons of the disk or of permissions.
    """
    size = _file_size(path)
    if size == 0:
        raise UnusableImage("empty")
    if size > _BYTES_PER_PIXEL * max_pixels + _METADATA_BYTES:
        raise UnusableImage(f"{size} bytes, which is more than {max_pixels} pixels need (--max_image_pixels)")
    with contextlib.ExitStack() as stack:
        if size > _LARGE_BYTES:
            stack.enter_context(_one_large)
        content = _read(path)
        _check_kind(content)
        pixels = _count_pixels(content)
        if pixels > max_pixels:
            raise UnusableImage(f"{pixels} pixels, more than --max_image_pixels={max_pixels}")
        if pixels > _LARGE_PIXELS:
            stack.enter_context(_one_large)
        yield content


def why_unusable(path: str, max_pixels: int = MAX_IMAGE_PIXELS) -> str | None:
    """Returns why an image file cannot be used, or None; arguments and errors as for `checked_content`."""
    try:
        with checked_content(path, max_pixels) as content:
            tf.io.decode_image(content, channels=3, expand_animations=False)
    except UnusableImage as error:
        return str(error)
    except tf.errors.OpError:
        return "truncated or corrupt"
    return None


def find_unusable(paths: list[str], max_pixels: int = MAX_IMAGE_PIXELS) -> dict[str, str]:
    """Reads all files; returns a dict: path -> reason, of those for which `why_unusable` gives one."""
    pool = futures.ThreadPoolExecutor()

    def reasons():
        for begin in range(0, len(paths), _AT_ONCE):
            part = paths[begin:begin + _AT_ONCE]
            yield from zip(part, pool.map(lambda path: why_unusable(path, max_pixels), part))

    try:
        return {path: reason for path, reason in progress.track(reasons(), len(paths), "checking images") if reason}
    finally:
        pool.shutdown(cancel_futures=True)  # After a signal, only the files that are being read are finished.


def _file_size(path):
    try:
        path.encode()
        if "://" in path:
            return tf.io.gfile.stat(path).length
        status = os.stat(path)
    except UnicodeEncodeError as error:
        raise UnusableImage("its name is not UTF-8") from error
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.NotFoundError) or getattr(error, "errno", None) in (errno.ENOENT, errno.ELOOP):
            raise UnusableImage("a broken link" if os.path.islink(path) else "missing") from error
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnusableImage("not a regular file")  # Opening a FIFO would wait for its writer.
    return status.st_size


def _read(path):
    """Returns the content of a file, without reading all of it where its first bytes are not those of an image."""
    try:
        with (tf.io.gfile.GFile if "://" in path else open)(path, "rb") as file:
            head = file.read(32)
            return head + file.read() if head.startswith((_JPEG, _PNG, _GIF, _BMP)) else head
    except (OSError, tf.errors.OpError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path, error):
    return UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or first_line(error)}). Fix this, and "
                     "start the same command again.")


def _check_kind(content):
    """Raises `UnusableImage` for formats that TensorFlow does not decode, or decodes to wrong colours."""
    kind = next((kind for begin, kind in _UNSUPPORTED.items() if content.startswith(begin)), None)
    if content.startswith(_BMP) and _has_palette(content):
        kind = "BMP with a palette"
    if kind:
        raise UnusableImage(f"{kind}: convert it to JPEG or PNG")
    if not content.startswith((_JPEG, _PNG, _GIF, _BMP)):
        raise UnusableImage("not an image")


def _has_palette(bitmap):
    """Returns whether the values in a BMP file index a palette; TensorFlow takes them for shades of grey."""
    size, bits = int.from_bytes(bitmap[14:18], "little"), int.from_bytes(bitmap[28:30], "little")
    palette = bitmap[14 + size:int.from_bytes(bitmap[10:14], "little")]
    return bits < 8 or bits == 8 and any(palette[place] != place // 4 for place in range(len(palette)) if place % 4 < 3)


def _count_pixels(content):
    """Returns the number of pixels that the decoder allocates, from the header; 0 for headers that it will refuse."""
    if content.startswith(_JPEG):
        try:
            height, width, _ = tf.io.extract_jpeg_shape(content).numpy().tolist()
        except tf.errors.OpError:
            return 0
        return height * width
    if content.startswith(_PNG):
        return int.from_bytes(content[16:20], "big") * int.from_bytes(content[20:24], "big")
    if content.startswith(_BMP):
        width, height = (int.from_bytes(content[at:at + 4], "little", signed=True) for at in (18, 22))
        return abs(width * height)
    return _count_gif_pixels(content)


def _count_gif_pixels(content):
    """Returns the pixels of all frames of a GIF, or of the area that they span if that is larger.

    Follows the blocks of the GIF89a specification up to the trailer or to the first invalid block.
    """
    def color_table_size(flags):
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    def skip_sub_blocks(at):
        while at < len(content) and content[at]:
            at += content[at] + 1
        return at + 1

    if len(content) < 13:
        return 0
    total = width = height = 0
    at = 13 + color_table_size(content[10])
    while at + 10 <= len(content) and content[at] in (0x21, 0x2c):  # an extension or an image
        if content[at] == 0x21:
            at = skip_sub_blocks(at + 2)
            continue
        frame = [int.from_bytes(content[at + place:at + place + 2], "little") for place in (5, 7)]
        total, width, height = total + frame[0] * frame[1], max(width, frame[0]), max(height, frame[1])
        at = skip_sub_blocks(at + 10 + color_table_size(content[at + 9]) + 1)
    return max(total, width * height)
