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
from runtime import console
from runtime.errors import UserError, first_line
from runtime.paths import check_path
from sources import folders, image_files

NOTHING_WRITTEN = "nothing was written; run the same command again"


def uses_center_crop(description: dict, size: int) -> bool:
    """Returns whether a model with the given description is evaluated on center crops at image size `size`."""
    return Config(
        image_size=size, eval_center_crop=description.get("eval_center_crop", True)
    ).center_crop_eval


def find_images(inputs: list[str]) -> dict[str, str]:
    """Returns a dict mapping the paths of image files to names for the output.

    Args:
      inputs: image files, and folders to search recursively. If the only input is a folder, names
        are relative to this folder.

    Raises:
      UserError: an input does not exist, or there are no images.
    """
    paths = []
    for path in inputs:
        path = check_path("INPUT", path, allow_patterns=True)
        if "://" in path:
            raise UserError(f"INPUT={path}: only local paths are supported here. Use a local path.")
        if not os.path.lexists(path):
            raise UserError(f"INPUT={path}: no such file or folder. Check the path.")
        images = image_files.find_images(path) if os.path.isdir(path) else [path]
        if not images:
            raise UserError(
                f"INPUT={path}: no images found ({', '.join(image_files.IMAGE_SUFFIXES)}). Check"
                " the path."
            )
        paths += images
    is_one_folder = len(inputs) == 1 and os.path.isdir(path)
    return {image: os.path.relpath(image, path) if is_one_folder else image for image in paths}


def find_classes(inputs: list[str], names: dict[str, str]) -> dict[str, str]:
    """Returns a dict mapping image paths to class names. The dict is empty if the images have no classes.

    Images have classes only if the only input is a folder in which `folders.folder_source` finds at
    least two classes.

    Args:
      inputs: see `find_images`.
      names: result of `find_images`.
    """
    if len(inputs) > 1 or not os.path.isdir(path := os.path.expanduser(inputs[0])):
        return {}
    try:
        source = folders.folder_source(path)
    except UserError as error:
        console.log(f"no classes are used: {str(error).removeprefix(f'--dataset=folder:{path}: ')}")
        return {}
    if (source.num_classes or 1) < 2:
        return {}
    paths, labels = source.labeled_paths()
    classes = {
        os.path.relpath(image, source.root): source.class_names[label]
        for image, label in zip(paths, labels)
    }
    return {image: classes[name] for image, name in names.items() if name in classes}


def nothing_readable(unreadable: dict[str, str]) -> UserError:
    """Returns the error to raise if no image can be read. `unreadable` maps paths to reasons."""
    path, reason = next(iter(unreadable.items()))
    return UserError(f"INPUT={path}: no image can be read ({reason}). Check the files.")


def _newest_saved_model(path):
    """Returns the newest SavedModel in a run directory, and any other path unchanged."""
    exports = os.path.join(path, "saved_model")
    if path.startswith(("http://", "https://")) or not tf.io.gfile.isdir(exports):
        return path
    steps = [
        int(name)
        for name in (name.rstrip("/") for name in tf.io.gfile.listdir(exports))
        if name.isdecimal() and tf.io.gfile.exists(os.path.join(exports, name, "saved_model.pb"))
    ]
    return os.path.join(exports, str(max(steps))) if steps else path


def load_endpoint(saved_model: str, name: str) -> tuple[Callable, dict]:
    """Loads one endpoint of a SavedModel.

    Args:
      saved_model: directory or TF Hub handle of a SavedModel from this program or the original, or
        a run directory, whose newest SavedModel is used. Unlike with `--checkpoint`, the
        SavedModel's graph is executed.
      name: name of the endpoint.

    Returns:
      A function that maps images, float32 [n, size, size, 3] in [0, 1], to the endpoint's values
      [n, d], and the model description (see `descriptions.read_description`).

    Raises:
      UserError: `saved_model` is not a SimCLR SavedModel, or it does not have the endpoint.
    """
    path = _newest_saved_model(saved_model)
    directory = os.path.dirname(os.path.dirname(weight_files.locate(path, "MODEL")[0]))
    if not tf.io.gfile.exists(os.path.join(directory, "saved_model.pb")):
        raise UserError(
            f"MODEL={saved_model}: this is a checkpoint, not a SavedModel. Export it with `python"
            f" -m export --checkpoint={saved_model} --export_dir=DIR`."
        )
    description = descriptions.read_description(directory)
    size = description.get("image_size", 224)
    try:
        module = tf.saved_model.load(directory)
        outputs = dict(module(tf.zeros([1, size, size, 3]), trainable=False))
    except Exception as error:  # SavedModels from other programs can raise any exception.
        raise UserError(
            f"MODEL={saved_model}: this path cannot be loaded and called as a SimCLR SavedModel"
            f" ({first_line(error)}). If it contains the weights of a SimCLR network, export them"
            f" again with `python -m export --checkpoint={saved_model} --export_dir=DIR`."
        ) from error
    if name not in outputs:
        remedy = (
            "Use a model with a linear head"
            if name == "logits_sup"
            else f"Use one of {', '.join(sorted(outputs))}"
        )
        raise UserError(f"MODEL={saved_model}: the model has no output {name}. {remedy}.")

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, None, 3])])
    def function(images):
        return module(images, trainable=False)[name]

    function.module = module  # Keeps the variables alive.
    return function, description


def preprocessing(size: int, crop: bool) -> Callable[[bytes], tf.Tensor]:
    """Returns a function that maps the content of an image file to the network's input, float32 [size, size, 3].

    The function is compiled, because executing its many small operations one by one would take
    longer than running the network.
    """

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
    def preprocess(content):
        image = tf.io.decode_image(content, 3, tf.float32, expand_animations=False)
        return data_util.preprocess_for_eval(tf.ensure_shape(image, [None, None, 3]), size, crop)

    return preprocess


def load_image(path: str, preprocess: Callable[[bytes], tf.Tensor]) -> tf.Tensor | Exception:
    """Loads an image file. If the file cannot be read, returns the exception.

    `preprocess` is a function returned by `preprocessing`.
    """
    try:
        with image_files.checked_content(path) as content:
            return preprocess(image_files.convert(content))
    except (tf.errors.OpError, image_files.UnusableImage, UserError) as error:
        return error


def _reason(error):
    """Returns the reason why an image cannot be read. `error` is an exception that `load_image` returned."""
    return (
        "truncated or corrupt" if isinstance(error, tf.errors.OpError) else str(error).rstrip(".")
    )


def compute_endpoint(
    function: Callable, size: int, crop: bool, paths: list[str], batch_size: int = 64
) -> Iterator[tuple[list[str], np.ndarray, dict[str, str]]]:
    """Computes the values of an endpoint for image files, in batches.

    Decodes the next batch while the network processes the current one.

    Yields:
      For each batch, a tuple of the n readable paths, their values [n, d], and a dict mapping
      unreadable paths to reasons.
    """
    preprocess = preprocessing(size, crop)
    with futures.ThreadPoolExecutor() as pool:

        def load(begin):
            batch = paths[begin : begin + batch_size]
            return batch, [pool.submit(load_image, path, preprocess) for path in batch]

        next_batch = load(0)
        for begin in range(0, len(paths), batch_size):
            (batch, loading), next_batch = next_batch, load(begin + batch_size)
            images = [task.result() for task in loading]
            readable = [
                (path, image)
                for path, image in zip(batch, images)
                if not isinstance(image, Exception)
            ]
            unreadable = {
                path: _reason(image)
                for path, image in zip(batch, images)
                if isinstance(image, Exception)
            }
            values = (
                function(tf.stack([image for _, image in readable])).numpy()
                if readable
                else np.zeros([0, 0])
            )
            yield [path for path, _ in readable], values, unreadable
