"""Computes the values of SavedModel endpoints for image files."""

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
    """Returns whether, according to a model description, evaluation with image size `size` uses center crops."""
    return Config(image_size=size, eval_center_crop=description.get("eval_center_crop", True)).center_crop_eval


def load_endpoint(saved_model: str, name: str) -> tuple[Callable, dict]:
    """Loads one endpoint of a SavedModel.

    Args:
      saved_model: directory or TF Hub handle of a SavedModel from this program or the original. Unlike
        with `--checkpoint`, the SavedModel's graph is executed.
      name: name of the endpoint.

    Returns:
      A function that maps images, float32 [n, size, size, 3] in [0, 1], to the endpoint's values [n, d], and the model
      description (see `descriptions.read_description`).

    Raises:
      UserError: `saved_model` is not a SimCLR SavedModel, or it does not have the endpoint.
    """
    directory = os.path.dirname(os.path.dirname(weight_files.locate(saved_model, "MODEL")[0]))
    if not tf.io.gfile.exists(os.path.join(directory, "saved_model.pb")):
        raise UserError(f"MODEL={saved_model}: this is a checkpoint, not a SavedModel. Export it with `python -m "
                        f"export --checkpoint={saved_model} --export_dir=DIR`.")
    description = descriptions.read_description(directory)
    size = description.get("image_size", 224)
    try:
        module = tf.saved_model.load(directory)
        outputs = dict(module(tf.zeros([1, size, size, 3]), trainable=False))
    except Exception as error:  # SavedModels from other programs can raise any exception.
        raise UserError(f"MODEL={saved_model}: cannot be loaded and called as a SimCLR SavedModel "
                        f"({first_line(error)}). If it contains the weights of a SimCLR network, export them again "
                        f"with `python -m export --checkpoint={saved_model} --export_dir=DIR`.") from error
    if name not in outputs:
        remedy = ("Use a model with a linear head" if name == "logits_sup"
                  else f"Use one of {', '.join(sorted(outputs))}")
        raise UserError(f"MODEL={saved_model}: the model has no output {name}. {remedy}.")

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, None, 3])])
    def function(images):
        return module(images, trainable=False)[name]

    function.module = module  # Keeps the variables alive.
    return function, description


def _load_image(path, size, crop):
    """Loads an image file as float32 [size, size, 3]. If the file cannot be read, returns the exception."""
    try:
        with image_files.checked_content(path) as content:
            image = tf.io.decode_image(content, channels=3, expand_animations=False, dtype=tf.float32)
            return data_util.preprocess_for_eval(image, size, crop)
    except (tf.errors.OpError, image_files.UnusableImage, UserError) as error:
        return error


def compute_endpoint(function: Callable, size: int, crop: bool, paths: list[str], batch_size: int = 64
                     ) -> Iterator[tuple[list[str], np.ndarray, list[str]]]:
    """Yields (readable paths, values [number of readable paths, d], unreadable paths) for each batch of image files.

    Decodes the next batch while the network processes the current one.
    """
    with futures.ThreadPoolExecutor() as pool:
        def load(begin):
            batch = paths[begin:begin + batch_size]
            return batch, [pool.submit(_load_image, path, size, crop) for path in batch]

        next_batch = load(0)
        for begin in range(0, len(paths), batch_size):
            (batch, loading), next_batch = next_batch, load(begin + batch_size)
            images = [task.result() for task in loading]
            readable = [(path, image) for path, image in zip(batch, images) if not isinstance(image, Exception)]
            unreadable = [path for path, image in zip(batch, images) if isinstance(image, Exception)]
            values = function(tf.stack([image for _, image in readable])).numpy() if readable else np.zeros([0, 0])
            yield [path for path, _ in readable], values, unreadable
