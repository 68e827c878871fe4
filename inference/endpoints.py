"""Computes the values of a network's endpoints for image files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

import data_util
from checkpoints import inspection, loading
from config import Config
from runtime import console, progress, signals, storage
from runtime.errors import UserError
from runtime.paths import check_weights_path
from sources import folders, image_files
from sources.files import FileSource


def find_images(inputs: list[str]) -> dict[str, str]:
    """Returns a dict mapping the paths of image files to names for the output.

    Args:
      inputs: image files, and folders to search recursively (results of `paths.check_input`). If
        the only input is a folder, names are relative to this folder.

    Raises:
      UserError: there are no images in an input.
    """
    paths = []
    for path in inputs:
        images = image_files.find_images(path) if os.path.isdir(path) else [path]
        if not images:
            raise UserError(f"INPUT={path}: no images found. Check the path.")
        paths += images
    is_one_folder = len(inputs) == 1 and os.path.isdir(path)
    return {image: os.path.relpath(image, path) if is_one_folder else image for image in paths}


def find_classes(inputs: list[str]) -> dict[str, str]:
    """Returns the result of `class_of_names` if the only input (see `find_images`) is a folder with classes, or {}."""
    path = inputs[0]
    if len(inputs) > 1 or not os.path.isdir(path):
        return {}
    try:
        return class_of_names(folders.folder_source(path))
    except UserError as error:
        console.log(f"no classes are used: {str(error).removeprefix(f'--dataset=folder:{path}: ')}")
        return {}


def class_of_names(source: FileSource, split: str = "all") -> dict[str, str]:
    """Returns a dict mapping the relative paths of labeled images to class names.

    The dict is empty if there are fewer than two classes, or multiple labels per image.
    """
    if source.multi_label or source.num_classes in (None, 1):
        return {}
    return {
        os.path.relpath(path, source.root): source.class_names[label]
        for path, label in zip(*source.labeled_paths(split))
        if label >= 0
    }


def load_endpoint(
    path: str, name: str, given: dict[str, int] | None
) -> tuple[Callable, inspection.CheckpointInfo]:
    """Loads the network at `path`, and returns a function that computes one of its endpoints.

    Args:
      path: see `weight_files.locate`.
      name: name of the endpoint.
      given: see `inspection.inspect_checkpoint`.

    Returns:
      A function that maps images, float32 [n, size, size, 3] in [0, 1], to the endpoint's values,
      and the `CheckpointInfo` of the network, whose settings include the image size.

    Raises:
      UserError: the network cannot be loaded, or it does not have the endpoint.
    """
    model, info = loading.open_network(check_weights_path("MODEL", path), given, "MODEL")
    if name not in model.endpoint_names:
        if name == "logits_sup":
            raise UserError(
                f"MODEL={path}: the network has no classifier. Train one: python run.py"
                f" --train_mode=finetune --mode=train_then_eval --checkpoint={path} --dataset=DATA"
            )
        raise UserError(
            f"MODEL={path}: the network has no output {name}. Use {', '.join(model.endpoint_names)}."
        )

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, None, 3])])
    def function(images):
        return model(images, training=False)[name]

    return function, info


def image_loader(config: Config) -> Callable[[str], tf.Tensor | str]:
    """Returns a function that maps the path of an image file to the network's input, float32 [size, size, 3].

    If the file cannot be read, the function returns the reason.
    """

    # Executing many small operations one by one would take longer than running the network.
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
    def preprocess(content):
        image = tf.io.decode_image(content, 3, tf.float32, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, 3])
        return data_util.preprocess_for_eval(
            image, config.image_size, config.center_crop_eval, config.eval_resize
        )

    def load(path):
        try:
            with image_files.checked_content(path) as content:
                return preprocess(image_files.convert(content, config.conversion))
        except tf.errors.OpError:
            return "truncated or corrupt"
        except (image_files.UnusableImage, UserError) as error:
            return str(error).rstrip(".")

    return load


def compute_endpoint(
    path: str,
    name: str,
    given: dict[str, int] | None,
    images: list[str],
    unreadable: dict[str, str],
    batch_size: int = 64,
) -> Iterator[tuple[list[str], np.ndarray, inspection.CheckpointInfo]]:
    """Computes the values of an endpoint for image files, in batches.

    Decodes the next images while the network processes a batch.

    Args:
      path, name, given: see `load_endpoint`.
      images: paths of image files.
      unreadable: dict to which the paths of unreadable images are added, with the reasons.
      batch_size: number of images per batch.

    Yields:
      For each batch, a tuple of the n readable paths, their values, float32 [n, d], and the
      `CheckpointInfo` of the network.

    Raises:
      UserError: the network cannot be used, or no image can be read.
      errors.Stopped: a signal arrived.
    """
    function, info = load_endpoint(path, name, given)
    loaded = image_files.map_paths(image_loader(info.config), images)
    results = zip(images, progress.terminal_bar(loaded, len(images), "images"))
    while batch := dict(itertools.islice(results, batch_size)):
        unreadable.update({path: text for path, text in batch.items() if isinstance(text, str)})
        readable = [image for image in batch if image not in unreadable]
        if readable:
            values = function(tf.stack([batch[image] for image in readable])).numpy()
            yield readable, values.reshape(len(readable), -1), info
        signals.safe_point(storage.NOTHING_WRITTEN)
    if len(unreadable) == len(images):
        image, reason = next(iter(unreadable.items()))
        raise UserError(f"INPUT={image}: no image can be read ({reason}). Check the files.")
