"""Class predictions for images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from inference import endpoints, writers
from runtime import progress, signals
from runtime.errors import UserError
from runtime.paths import check_weights_path


def predict(
    saved_model: str, inputs: list[str], image_size: int | None = None, top_k: int = 5
) -> tuple[dict[str, list[tuple[str, float]]], dict[str, str]]:
    """Predicts the most probable classes of images.

    Args:
      saved_model: see `endpoints.load_endpoint`.
      inputs: image files, and folders to search recursively (see `endpoints.find_images`).
      image_size: image size in pixels. If this is None, the model's image size is used (224 if
        unknown).
      top_k: number of classes to return per image.

    Returns:
      A dict mapping each path to a list of (class name, probability), most probable class first,
      and a dict mapping the paths of unreadable images to reasons. The probabilities are computed
      with softmax or, for multi-label models, with sigmoid.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived.
    """
    predictions, unreadable = {}, {}
    names = endpoints.find_images(inputs)
    for paths, classes, probabilities in _predict_batches(
        saved_model, list(names), image_size, unreadable
    ):
        for path, row in zip(paths, probabilities):
            predictions[path] = [
                (classes[index], float(row[index])) for index in np.argsort(-row)[:top_k]
            ]
    return predictions, unreadable


def write_predictions(
    saved_model: str, inputs: list[str], out: str, image_size: int | None = None
) -> tuple[int, dict[str, str]]:
    """Writes the probabilities of all classes. Only file names and two batches are held in memory.

    Args:
      saved_model: see `endpoints.load_endpoint`.
      inputs: see `endpoints.find_images`.
      out: path of the output: .npz (`files`, `classes`, `probabilities`, `class_names`), .csv
        (`file`, `class`, and one column per class) or .parquet (`file`, `class`, `probabilities`).
      image_size: see `predict`.

    Returns:
      The number of images in the output, and a dict mapping the paths of unreadable images to
      reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    out = writers.check_out(out)
    names = endpoints.find_images(inputs)
    written, unreadable, add = 0, {}, None
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(
            contextlib.closing(_predict_batches(saved_model, list(names), image_size, unreadable))
        )
        for paths, classes, probabilities in batches:
            if add is None:  # The class names are known only after the first batch.
                add = stack.enter_context(writers.open_writer(out, "probabilities", classes))
            add(
                {
                    "file": [names[path] for path in paths],
                    "class": [classes[index] for index in probabilities.argmax(-1)],
                },
                probabilities,
            )
            written += len(paths)
    return written, unreadable


def _predict_batches(
    saved_model, paths, image_size, unreadable
) -> Iterator[tuple[list[str], list[str], np.ndarray]]:
    """Yields (readable paths, class names, probabilities [n, classes]) for each batch with readable images.

    For each image that cannot be read, adds the reason to the dict `unreadable`.
    """
    saved_model = check_weights_path("MODEL", saved_model)
    function, description = endpoints.load_endpoint(saved_model, "logits_sup")
    size = image_size or description.get("image_size", 224)
    to_probabilities = tf.sigmoid if description.get("multi_label") else tf.nn.softmax
    crop = endpoints.uses_center_crop(description, size)
    with progress.terminal_bar(None, len(paths), "images") as bar:
        for readable, logits, batch_unreadable in endpoints.compute_endpoint(
            function, size, crop, paths
        ):
            signals.safe_point(endpoints.NOTHING_WRITTEN)
            unreadable.update(batch_unreadable)
            bar.update(len(readable) + len(batch_unreadable))
            if readable:
                classes = _class_names(saved_model, description, logits.shape[-1])
                yield readable, classes, to_probabilities(logits).numpy()
    if len(unreadable) == len(paths):
        raise endpoints.nothing_readable(unreadable)


def _class_names(saved_model, description, count):
    """Returns the recorded class names, or numbered names if none are recorded."""
    names = description.get("class_names") or [f"class {index}" for index in range(count)]
    if len(names) != count:
        raise UserError(
            f"MODEL={saved_model}: the linear head has {count} classes, but {len(names)} class"
            " names are recorded. Export the model again."
        )
    return names
