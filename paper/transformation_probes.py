"""Probes for Table 3: small MLPs that predict image transformations from frozen features."""

from __future__ import annotations

import copy

import numpy as np
import tensorflow as tf
import tf_keras as keras

import data_util
from augmentation import operators
from config import Config
from paper import common
from probing import features
from runtime import progress, rng
from runtime.errors import UserError
from sources import datasets
from sources.source import Source

_SEED = 1
_BATCH_SIZE = 256
_HIDDEN_UNITS = 256
# Early stopping, with the default values of scikit-learn's MLPClassifier: training stops after `_PATIENCE` epochs in
# which the accuracy on held-out examples did not increase by more than `_MIN_GAIN`.
_VALIDATION_FRACTION, _PATIENCE, _MIN_GAIN = 0.1, 10, 1e-4
_MAX_EPOCHS = 100
_BLOCK_ROWS = 10_000  # number of examples in memory; a multiple of the MLP's batch size of 200


def _with_identity(function):
    """Returns two equally likely classes: unchanged images, and images transformed by `function`."""
    return [(0.5, lambda channels, seeds: channels), (0.5, function)]


# Probe -> (probability, function of channels and seeds) for each class.
PROBES = {
    "color": [(0.8, lambda channels, seeds: channels),
              (0.2, lambda channels, seeds: data_util.to_grayscale(channels))],
    "rotation": [(0.25, lambda channels, seeds, turns=turns: operators.rot90(channels, turns))
                 for turns in range(4)],
    "noise": _with_identity(operators.random_noise),
    "sobel": _with_identity(lambda channels, seeds: operators.sobel(channels)),
}


def transform(images: tf.Tensor, probe: str, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws a random class for each image and applies the class's transformation.

    Args:
      images: [n, size, size, 3] float in [0, 1].
      probe: name in `PROBES`.
      seeds: int tensor [n, 2].

    Returns:
      Images of the same shape, and their classes, int32 [n].
    """
    probabilities, functions = zip(*PROBES[probe])
    draws = rng.uniforms(seeds, 1)[:, 0]
    classes = tf.searchsorted(np.cumsum(probabilities[:-1], dtype=np.float32), draws, side="right")
    channels = data_util.switch_per_image(classes, functions, data_util.to_channels(images), rng.nth_seed(seeds, 1))
    return data_util.from_channels(channels), classes


def probe_features(model: keras.Model, source: Source, split: str, probe: str, size: int, center_crop: bool
                   ) -> list[np.ndarray]:
    """Returns h [examples, d], z [examples, d'] and classes [examples] for a split's transformed images.

    The vectors are in memory maps, see `features.VectorFile`. Images are preprocessed as in evaluation: resized to
    `size` pixels, with or without a center crop.
    """
    def preprocess(key, item, label):
        image = data_util.preprocess_image(source.decode(item), size, size, test_crop=center_crop)
        return image, tf.stack([key, tf.constant(_SEED, key.dtype)])

    @tf.function(autograph=False)
    def run(images, seeds):
        images, classes = transform(images, probe, seeds)
        endpoints = model(images, training=False)
        return endpoints["final_avg_pool"], endpoints["proj_head_output"], classes

    batches = source.records(split).map(preprocess, tf.data.AUTOTUNE).batch(_BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
    num_batches = -(-source.num_examples(split) // _BATCH_SIZE)
    h_file, z_file, all_classes = features.VectorFile(), features.VectorFile(), []
    for batch in progress.track(batches, num_batches, f"{probe}: {split}"):
        h, z, classes = (tensor.numpy() for tensor in run(*batch))
        h_file.append(h)
        z_file.append(z)
        all_classes.append(classes)
    return [h_file.read(f"h of {split}"), z_file.read(f"g(h) of {split}"), np.concatenate(all_classes)]


def probe_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    """Returns the test accuracy of an MLP with one hidden layer, trained by Adam with early stopping.

    Only one block of examples at a time is in memory, apart from memory maps.

    Args:
      train: (features [n, d], classes [n]).
      test: (features [m, d], classes [m]).
    """
    from sklearn import model_selection, neural_network, preprocessing

    vectors, classes = train
    fit, validation = model_selection.train_test_split(
        np.arange(len(classes)), test_size=_VALIDATION_FRACTION, stratify=classes, random_state=_SEED)
    scaler = preprocessing.StandardScaler()
    for rows in _blocks(np.sort(fit)):
        scaler.partial_fit(vectors[rows])
    network = neural_network.MLPClassifier(_HIDDEN_UNITS, random_state=_SEED)
    random, labels = np.random.default_rng(_SEED), np.unique(classes)
    best_accuracy, best_network, num_epochs_without_gain = -1.0, None, 0
    for _ in range(_MAX_EPOCHS):
        for rows in _blocks(random.permutation(fit)):
            network.partial_fit(scaler.transform(vectors[rows]), classes[rows], classes=labels)
        accuracy = _accuracy(network, scaler, vectors, classes, validation)
        num_epochs_without_gain = 0 if accuracy > best_accuracy + _MIN_GAIN else num_epochs_without_gain + 1
        if accuracy > best_accuracy:
            best_accuracy, best_network = accuracy, copy.deepcopy(network)
        if num_epochs_without_gain >= _PATIENCE:
            break
    return _accuracy(best_network, scaler, *test, np.arange(len(test[1])))


def _blocks(rows):
    """Divides row indices [n] into blocks of at most `_BLOCK_ROWS`."""
    return np.split(rows, range(_BLOCK_ROWS, len(rows), _BLOCK_ROWS))


def _accuracy(network, scaler, vectors, classes, rows):
    """Returns the accuracy of a network on the given rows of vectors [n, d]."""
    hits = [network.predict(scaler.transform(vectors[block])) == classes[block] for block in _blocks(rows)]
    return float(np.concatenate(hits).mean())


def run_probes(model: keras.Model, config: Config, probes: list[str], train_split: str, test_split: str
               ) -> dict[str, dict[str, float]]:
    """Runs the probes on a network.

    Returns:
      A dict mapping probes to dicts with `h` and `z`, the test accuracies on h and on z = g(h), and
      `majority_baseline`, the accuracy of always predicting the most frequent class.

    Raises:
      UserError: a probe or split is unknown, or the network does not have a projection head.
    """
    unknown = [name for name in probes if name not in PROBES]
    if unknown or not probes:
        problem = f"unknown probe {unknown[0]}" if unknown else "the list is empty"
        raise UserError(f"--probes={','.join(probes)}: {problem}. Use one or more of {','.join(PROBES)}.")
    common.check_has_projection_head(model)
    source = common.open_source(config)
    for flag, split in (("train_split", train_split), ("test_split", test_split)):
        datasets.check_split(source, flag, split)
    results = {}
    preprocessing = config.image_size, config.center_crop_eval
    for probe in probes:
        train_h, train_z, train_classes = probe_features(model, source, train_split, probe, *preprocessing)
        test_h, test_z, test_classes = probe_features(model, source, test_split, probe, *preprocessing)
        results[probe] = {"majority_baseline": max(probability for probability, _ in PROBES[probe]),
                          "h": probe_accuracy((train_h, train_classes), (test_h, test_classes)),
                          "z": probe_accuracy((train_z, train_classes), (test_z, test_classes))}
    return results
