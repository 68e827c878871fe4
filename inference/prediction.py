"""Class predictions for images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from inference import endpoints, writers


def predict(
    path: str, inputs: list[str], given: dict[str, int] | None = None, top_k: int = 5
) -> tuple[dict[str, list[tuple[str, float]]], dict[str, str]]:
    """Predicts the most probable classes of images.

    Args:
      path: see `endpoints.load_endpoint`.
      inputs: image files, and folders to search recursively (see `endpoints.find_images`).
      given: see `inspection.inspect_checkpoint`.
      top_k: number of classes to return per image.

    Returns:
      A dict mapping each path to a list of (class name, probability), most probable class first,
      and a dict mapping the paths of unreadable images to reasons. The probabilities are computed
      with softmax or, for multi-label networks, with sigmoid.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived.
    """
    unreadable = {}
    predictions = {
        image: [(classes[index], float(row[index])) for index in np.argsort(-row)[:top_k]]
        for images, classes, probabilities in _predict_batches(
            path, list(endpoints.find_images(inputs)), given, unreadable
        )
        for image, row in zip(images, probabilities)
    }
    return predictions, unreadable


def write_predictions(
    path: str, inputs: list[str], out: str, given: dict[str, int] | None
) -> tuple[int, dict[str, str]]:
    """Writes the probabilities of all classes. Only file names and a few batches are held in memory.

    Args:
      path: see `endpoints.load_endpoint`.
      inputs: see `endpoints.find_images`.
      out: result of `paths.check_out`: .npz (`files`, `classes`, `probabilities`, `class_names`),
        .csv (`file`, `class`, and one column per class) or .parquet (`file`, `class`,
        `probabilities`).
      given: see `inspection.inspect_checkpoint`.

    Returns:
      The number of images in the output, and a dict mapping the paths of unreadable images to
      reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    names, unreadable = endpoints.find_images(inputs), {}
    with writers.open_writer(out, "probabilities") as add:
        for images, classes, probabilities in _predict_batches(
            path, list(names), given, unreadable
        ):
            best = [classes[index] for index in probabilities.argmax(1)]
            add({"file": [names[image] for image in images], "class": best}, probabilities, classes)
    return len(names) - len(unreadable), unreadable


def _predict_batches(
    path: str, images: list[str], given: dict[str, int] | None, unreadable: dict[str, str]
) -> Iterator[tuple[list[str], list[str], np.ndarray]]:
    """Yields (readable paths, class names, probabilities [n, classes]) for each batch with readable images."""
    for readable, logits, info in endpoints.compute_endpoint(
        path, "logits_sup", given, images, unreadable
    ):
        to_probabilities = tf.sigmoid if info.multi_label else tf.nn.softmax
        yield readable, info.class_names, to_probabilities(logits).numpy()
