"""Inputs that our implementations and the baselines share."""

from __future__ import annotations

import os

import numpy as np
from PIL import Image


def image_folder(root: str, count: int) -> None:
    """Creates a folder with up to 1,000 classes of links to one photograph of 500 x 375 pixels."""
    values = np.random.default_rng(0).integers(0, 256, [12, 16, 3], np.uint8)
    os.makedirs(f"{root}/.files")
    photograph = f"{root}/.files/a.jpg"
    Image.fromarray(values).resize([500, 375], Image.Resampling.BICUBIC).save(photograph)
    for index in range(count):
        folder = f"{root}/{index % 1000:03}"
        os.makedirs(folder, exist_ok=True)
        os.symlink(photograph, f"{folder}/{index:07}.jpg")
