"""Endpoints of a SavedModel for image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np
import tensorflow as tf

import data_util
from checkpoints import descriptions, weight_files
from config import Config
from runtime.errors import UserError, first_line
from sources import image_files


def uses_center_crop(description: dict, size: int) -> bool:
    """Whether images of a size are cropped as in the evaluations of a model with this description."""
    return Config(image_size=size, eval_center_crop=description.get("eval_center_crop", True)).center_crop_eval


def load_endpoint(saved_model: str, name: str) -> tuple[Callable, dict]:
    """A function from images [n, size, size, 3] in [0, 1] to an endpoint [n, d], and what `read_description` says.

    Args:
      saved_model: directory or TF Hub handle of a SavedModel, ours or the original's. Unlike `--checkpoint`, this runs
        what is in it.
      name: of the endpoint.

    Raises:
      UserError: it is none, or lacks that endpoint.
    """
    directory = os.path.dirname(os.path.dirname(weight_files.locate(saved_model, "MODEL")[0]))
    if not tf.io.gfile.exists(os.path.join(directory, "saved_model.pb")):
        raise UserError(f"MODEL={saved_model} is a checkpoint: make a SavedModel of it with python -m export "
                        f"--checkpoint={saved_model} --export_dir=DIR")
    description = descriptions.read_description(directory)
    size = description.get("image_size", 224)
    try:
        module = tf.saved_model.load(directory)
        outputs = dict(module(tf.zeros([1, size, size, 3]), trainable=False))
    except Exception as error:  # What a SavedModel of any origin can raise; the remedy is the same.
        raise UserError(f"MODEL={saved_model} cannot be loaded and called as SimCLR's ({first_line(error)}): make one "
                        f"of its weights by python -m export --checkpoint={saved_model} --export_dir=DIR") from error
    if name not in outputs:
        raise UserError(f"MODEL={saved_model} has no {name}: it has {', '.join(sorted(outputs))}")

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, None, 3])])
    def function(images):
        return module(images, trainable=False)[name]

    function.module = module  # Which nothing else keeps alive.
    return function, description


def _load_image(path, size, crop):
    """Returns a file as float32 [size, size, 3], or an error."""
    try:
        with image_files.checked_content(path) as content:
            image = tf.io.decode_image(content, channels=3, expand_animations=False, dtype=tf.float32)
            return data_util.preprocess_for_eval(image, size, crop)
    except (tf.errors.OpError, image_files.UnusableImage, UserError) as error:
        return error


def compute_endpoint(function: Callable, size: int, crop: bool, paths: list[str], batch_size: int = 64
                     ) -> Iterator[tuple[list[str], np.ndarray, list[str]]]:
    """Yields (paths, array [len(paths), d], unreadable paths) for one batch of image files after the other.

    While the network works on a batch, the next one is decoded.
    """
    with futures.ThreadPoolExecutor() as pool:
        def load(begin):
            batch = paths[begin:begin + batch_size]
            return batch, [pool.submit(_load_image, path, size, crop) for path in batch]

        following = load(0)
        for begin in range(0, len(paths), batch_size):
            (batch, loading), following = following, load(begin + batch_size)
            images = [task.result() for task in loading]
            good = [(path, image) for path, image in zip(batch, images) if not isinstance(image, Exception)]
            bad = [path for path, image in zip(batch, images) if isinstance(image, Exception)]
            values = function(tf.stack([image for _, image in good])).numpy() if good else np.zeros([0, 0])
            yield [path for path, _ in good], values, bad
