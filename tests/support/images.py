"""Image files and photographs for tests."""

import hashlib
import pathlib

import numpy as np
import tensorflow as tf
from sklearn import datasets

from sources import folders


def write_images(root, *names, size=(12, 10)):
    """Writes one PNG file per name, each with a different gray level. Returns a dict mapping names to levels."""
    levels = {}
    for number, name in enumerate(names):
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        levels[name] = number + 1
        path.write_bytes(tf.io.encode_png(tf.fill([*size, 3], np.uint8(number + 1))).numpy())
    return levels


def write_folder(root, count, *classes):
    """Writes `count` images of each class, or without classes. Returns the value of --dataset."""
    folders = [f"{name}/" for name in classes] or [""]
    write_images(root, *(f"{folder}{number}.png" for folder in folders for number in range(count)))
    return f"folder:{root}"


def open_folder(path):
    return folders.folder_source(str(path))


def hashed_fractions(names):
    """Returns a dict that maps names to the positions at which percent slices divide them: hashes in [0, 1)."""
    return {name: int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 2**64 for name in names}


def photographs(height=None, width=None):
    """Returns two photographs, cropped to the same size: uint8 [2, h, w, 3]."""
    crops = [
        datasets.load_sample_image(name)[100:400:5, 80:480:5]
        for name in ("china.jpg", "flower.jpg")
    ]
    return np.stack(crops)[:, :height, :width]
