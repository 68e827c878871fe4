"""Probes of Table 3: small MLPs that predict a transformation from frozen features."""

from __future__ import annotations

import warnings

import numpy as np
import tensorflow as tf
import tf_keras as keras

import data_util
from augmentation import operators
from config import Config
from paper import common
from runtime import progress, rng
from runtime.errors import UserError
from sources import datasets
from sources.source import Source

_SEED = 1
_BATCH = 256
_HIDDEN = 256
_HELD_OUT = 0.1  # share of the training examples by which the MLP's training ends


def _half(function):
    """Classes 0 and 1, equally likely: as it is, and after `function` of (planes, seeds)."""
    return [(0.5, lambda planes, seeds: planes), (0.5, function)]


# Probe -> classes: (probability, function of planes and seeds).
PROBES = {
    "colour": [(0.8, lambda planes, seeds: planes), (0.2, lambda planes, seeds: data_util.to_grayscale(planes))],
    "rotation": [(0.25, lambda planes, seeds, turns=turns: operators.rot90(planes, turns))
                 for turns in range(4)],
    "noise": _half(operators.random_noise),
    "sobel": _half(lambda planes, seeds: operators.sobel(planes)),
}


def transform(images: tf.Tensor, probe: str, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Transforms each image by the class that is drawn for it.

    Args:
      images: [n, size, size, 3] float in [0, 1].
      probe: name in `PROBES`.
      seeds: int tensor [n, 2].

    Returns:
      images of the same shape; classes [n] int32.
    """
    shares, functions = zip(*PROBES[probe])
    draws = rng.uniforms(seeds, 1)[:, 0]
    classes = tf.searchsorted(np.cumsum(shares[:-1], dtype=np.float32), draws, side="right")
    planes = data_util.switch_per_image(classes, functions, data_util.to_channels(images), rng.nth_seed(seeds, 1))
    return data_util.from_channels(planes), classes


def probe_features(model: keras.Model, source: Source, split: str, probe: str, size: int, center_crop: bool
                  ) -> list[np.ndarray]:
    """h [examples, d], z [examples, d'] and classes [examples] of a split's transformed images, as NumPy arrays.

    The images are those of evaluations: `Config.image_size` and `Config.center_crop_eval`.
    """
    def preprocess(key, item, label):
        image = data_util.preprocess_image(source.decode(item), size, size, test_crop=center_crop)
        return image, tf.stack([key, tf.constant(_SEED, key.dtype)])

    @tf.function(autograph=False)
    def run(images, seeds):
        images, classes = transform(images, probe, seeds)
        endpoints = model(images, training=False)
        return endpoints["final_avg_pool"], endpoints["proj_head_output"], classes

    batches = source.records(split).map(preprocess, tf.data.AUTOTUNE).batch(_BATCH).prefetch(tf.data.AUTOTUNE)
    count = -(-source.num_examples(split) // _BATCH)
    parts = [[part.numpy() for part in run(*batch)] for batch in progress.track(batches, count, f"{probe}: {split}")]
    return [np.concatenate(column) for column in zip(*parts)]


def probe_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    """Test accuracy of an MLP with one hidden layer; both are (vectors [n, d], classes [n])."""
    from sklearn import neural_network, pipeline, preprocessing

    network = neural_network.MLPClassifier(_HIDDEN, early_stopping=True, validation_fraction=_HELD_OUT, max_iter=100,
                                           random_state=_SEED)
    classifier = pipeline.make_pipeline(preprocessing.StandardScaler(), network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 100 rounds are all that it gets.
        classifier.fit(*train)
    return float(classifier.score(*test))


def run_probes(model: keras.Model, config: Config, probes: list[str], train_split: str, test_split: str
              ) -> dict[str, dict[str, float]]:
    """Accuracies from h and from g(h) for each probe, and that of the best guess: a dict of dicts."""
    unknown = [name for name in probes if name not in PROBES]
    if unknown or not probes:
        raise UserError(f"--probes={','.join(probes)}: use {', '.join(PROBES)}")
    common.check_has_head(model)
    source = common.open_source(config)
    for flag, split in (("train_split", train_split), ("test_split", test_split)):
        datasets.check_split(source, flag, split)
    results = {}
    images = config.image_size, config.center_crop_eval
    for probe in probes:
        *train, train_classes = probe_features(model, source, train_split, probe, *images)
        *test, test_classes = probe_features(model, source, test_split, probe, *images)
        results[probe] = {"guess": max(share for share, _ in PROBES[probe]), **{
            name: probe_accuracy((train[number], train_classes), (test[number], test_classes))
            for number, name in enumerate(("h", "z"))}}
    return results
