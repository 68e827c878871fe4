"""Probes for Table 3: small MLPs that predict image transformations from frozen features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import data_util
import model as model_lib
from augmentation import operators
from config import Config
from paper import common
from probing import mlp
from runtime import rng
from runtime.errors import UserError
from runtime.pipelines import PARALLEL_CALLS, with_prefetching
from sources import datasets
from sources.source import Source

_SEED = 1
_BATCH_SIZE = 256


# Maps the name of each probe to its classes, which are pairs of a probability and a function of
# channels and seeds.
PROBES: dict[str, list[tuple[float, Callable]]] = {
    "color": [(0.8, data_util.identity), (0.2, data_util.to_grayscale)],
    "rotation": [
        (0.25, lambda channels, seeds, turns=turns: operators.rot90(channels, turns))
        for turns in range(4)
    ],
    "noise": [(0.5, data_util.identity), (0.5, operators.random_noise)],
    "sobel": [(0.5, data_util.identity), (0.5, operators.sobel)],
}


def transform(images: tf.Tensor, probe: str, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws a random class for each image and applies the class's transformation.

    Args:
      images: [n, size, size, 3] float in [0, 1].
      probe: name in `PROBES`.
      seeds: int tensor [n, 2].

    Returns:
      The transformed images, with the same shape, and the classes, int32 [n].
    """
    probabilities, functions = zip(*PROBES[probe])
    draws = rng.uniforms(seeds, 1)[:, 0]
    classes = tf.searchsorted(np.cumsum(probabilities[:-1], dtype=np.float32), draws, side="right")
    channels = data_util.switch_per_image(
        classes, functions, data_util.to_channels(images), rng.nth_seed(seeds, 1)
    )
    return data_util.from_channels(channels), classes


def probe_features(
    model: model_lib.Model, source: Source, split: str, probe: str, config: Config
) -> tuple[np.ndarray, ...]:
    """Returns h [examples, d], z [examples, d'] and classes [examples] for a split's transformed images.

    Images are preprocessed as in evaluation. See `common.extract_h_and_z`.
    """

    def preprocess(position, record):
        key, item, _ = record
        size = config.image_size
        image = data_util.preprocess_image(
            source.decode(item),
            size,
            size,
            test_crop=config.center_crop_eval,
            resize=config.eval_resize,
        )
        return image, tf.stack([key, tf.constant(_SEED, key.dtype)]), position

    def draw(images, seeds, positions):
        return *transform(images, probe, seeds), tf.ones(tf.shape(positions)), positions

    images = source.records(split).enumerate().map(preprocess, PARALLEL_CALLS)
    batches = with_prefetching(images.batch(_BATCH_SIZE).map(draw, PARALLEL_CALLS))
    return common.extract_h_and_z(model, batches, f"{probe}: {split}")


def run_probes(
    model: model_lib.Model, config: Config, probes: list[str], train_split: str, test_split: str
) -> dict[str, dict[str, float]]:
    """Runs the probes on a network with a projection head.

    Returns:
      One dict of accuracies per probe. `h` is the test accuracy on h, `z` is the test accuracy on z
      = g(h), and `majority_baseline` is the accuracy of always predicting the most frequent class.

    Raises:
      UserError: a probe or split is unknown.
    """
    unknown = [name for name in probes if name not in PROBES]
    if unknown or not probes:
        problem = f"unknown probe {unknown[0]}" if unknown else "the list is empty"
        raise UserError(
            f"--probes={','.join(probes)}: {problem}. Use one or more of {','.join(PROBES)}."
        )
    source = common.open_source(config)
    datasets.check_split(source, "train_split", train_split)
    datasets.check_split(source, "test_split", test_split)
    results = {}
    for probe in probes:
        *train, train_classes = probe_features(model, source, train_split, probe, config)
        *test, test_classes = probe_features(model, source, test_split, probe, config)
        results[probe] = {"majority_baseline": max(probability for probability, _ in PROBES[probe])}
        for name, vectors, test_vectors in zip(("h", "z"), train, test):
            results[probe][name] = mlp.mlp_accuracy(
                (vectors, train_classes), (test_vectors, test_classes)
            )
    return results
