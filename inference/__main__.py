"""Embeds folders of images and predicts classes with an exported SavedModel.

    python -m inference embed MODEL FOLDER --out=FILE.npz
    python -m inference predict MODEL IMAGE...
"""

from __future__ import annotations

import argparse
import re

from inference import embedding, prediction
from runtime import console


def _embed(arguments):
    written, unreadable = embedding.embed(arguments.model, arguments.folder, arguments.out, arguments.output,
                                           arguments.image_size)
    for path in unreadable[:10]:
        console.log(f"left out: {console.printable_name(path)} cannot be read as an image")
    more = f"; {len(unreadable)} cannot be read" if unreadable else ""
    console.log(f"{written} vectors in {arguments.out}{more}")


def _predict(arguments):
    for path, classes in prediction.predict(arguments.model, arguments.images, arguments.image_size).items():
        text = "cannot be read as an image" if classes is None else ", ".join(
            f"{console.printable_name(name)} {probability:.3f}" for name, probability in classes)
        console.log(f"{console.printable_name(path)}: {text}")


def _pixels(text):
    """The type of --image_size."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) < 8:
        raise argparse.ArgumentTypeError(f"must be an integer >= 8; got {text}")
    return int(text)


_TRUST = "MODEL's graph is executed: use models from trusted sources only."
