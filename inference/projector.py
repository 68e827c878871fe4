"""Files for TensorBoard's Embedding Projector."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from inference import thumbnails
from runtime import console
from runtime.errors import UserError
from runtime.paths import check_path, check_writable_parent

# Limit of the projector in pixels, since browsers limit the size of textures.
_MAX_SPRITE_SIDE = 8192
_MAX_THUMBNAIL_SIDE = 64
_MAX_POINTS = 100_000  # maximum number of points that the projector shows
_CONFIG = """embeddings {
  tensor_name: "vectors"
  tensor_path: "vectors.tsv"
  metadata_path: "metadata.tsv"
  sprite {
    image_path: "sprite.png"
    single_image_dim: %d
    single_image_dim: %d
  }
}
"""
# The last file refers to the others.
FILES = ("vectors.tsv", "metadata.tsv", "sprite.png", "projector_config.pbtxt")


def check_directory(directory: str) -> str:
    """Returns the absolute path of the output directory. Raises `UserError` if the directory is not writable."""
    directory = check_path("projector", directory)
    if "://" in directory:
        raise UserError(
            f"--projector={directory}: only local paths are supported here. Use a local path."
        )
    directory = os.path.realpath(directory)
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise UserError(f"--projector={directory}: the path is a file. Use a directory.")
    check_writable_parent(
        "--projector", os.path.join(directory, FILES[0]) if os.path.isdir(directory) else directory
    )
    return directory


def thumbnail_side(count: int) -> int:
    """Returns the height and width of the thumbnails in a sprite with `count` images, in pixels."""
    return min(_MAX_THUMBNAIL_SIDE, _MAX_SPRITE_SIDE // math.ceil(math.sqrt(max(count, 1))))


@contextlib.contextmanager
def open_writer(
    directory: str, count: int, has_classes: bool
) -> Iterator[Callable[[list[str], list[str], list[str], np.ndarray], None]]:
    """Returns a context manager that yields a function to append images to a projector directory.

    The function takes paths, names, class names (ignored if there are no classes) and vectors [n,
    d]. The directory is created, or its files with the same names are replaced, when the context
    ends without an error. Only the sprite is held in memory: at most 270 MB, and twice as much
    while it is saved. Images after the first 100,000 are omitted, because the projector would not
    show them.

    Args:
      directory: result of `check_directory`.
      count: number of images, or an upper bound.
      has_classes: whether the images have classes.
    """
    if count > _MAX_POINTS:
        console.log(
            f"warning: the projector shows at most {_MAX_POINTS:,} images; the others are omitted"
            f" from {directory}"
        )
        count = _MAX_POINTS
    side = thumbnail_side(count)
    if side < _MAX_THUMBNAIL_SIDE:
        console.log(
            f"projector: the thumbnails have only {side} x {side} pixels, because there are"
            f" {count:,} images"
        )
    columns = math.ceil(math.sqrt(count))
    sprite = Image.new("RGB", (columns * side, math.ceil(count / columns) * side))
    written = 0
    parent = directory if os.path.isdir(directory) else os.path.dirname(directory)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        with contextlib.ExitStack() as stack:
            vectors_file, metadata = (
                stack.enter_context(open(os.path.join(scratch, name), "w", encoding="utf-8"))
                for name in FILES[:2]
            )
            if has_classes:  # A metadata file with a single column has no header.
                metadata.write("file\tclass\n")

            def add(paths, names, classes, vectors):
                nonlocal written
                paths = paths[: count - written]
                for image, name, class_name, vector in zip(
                    thumbnails.load_thumbnails(paths, side), names, classes, vectors
                ):
                    vectors_file.write("\t".join(map("{:.6g}".format, vector)) + "\n")
                    columns_of_row = [name, class_name] if has_classes else [name]
                    metadata.write("\t".join(map(console.printable_name, columns_of_row)) + "\n")
                    if image is not None:
                        left, top = written % columns * side, written // columns * side
                        sprite.paste(
                            image,
                            (left + (side - image.width) // 2, top + (side - image.height) // 2),
                        )
                    written += 1

            yield add
        rows = math.ceil(written / columns)
        sprite.crop((0, 0, sprite.width, rows * side)).save(os.path.join(scratch, FILES[2]))
        with open(os.path.join(scratch, FILES[3]), "w", encoding="utf-8") as file:
            file.write(_CONFIG % (side, side))
        os.makedirs(directory, exist_ok=True)
        for name in FILES:
            os.replace(os.path.join(scratch, name), os.path.join(directory, name))
