"""Features of a frozen network for all examples of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf
import tf_keras as keras

from runtime import progress
from runtime.errors import UserError

DIVERGED = "Use a checkpoint from before the training diverged."  # the remedy for NaN and Inf


def compile_function(strategy: tf.distribute.Strategy, function: Callable) -> Callable:
    """Compiles `function` for the batches of a distributed evaluation data set, for `collect`.

    Args:
      strategy: the strategy that distributes the batches.
      function: images [n, size, size, 3] -> vectors [n, d], called in replica context.

    Returns:
      (images, labels, weights, positions) of all replicas -> the same with float32 vectors in place of images, as
      tensors of all replicas. It is traced once, however often it is used.
    """
    @tf.function(autograph=False)
    def run(batch):
        parts = strategy.run(lambda images, *others: (tf.cast(function(images), tf.float32), *others), args=batch)
        return tuple(strategy.gather(part, axis=0) for part in parts)

    return run


def collect(compiled: Callable, dataset: Iterable, description: str = "features") -> tuple[np.ndarray, np.ndarray]:
    """Runs a function made by `compile_function` over the labelled examples of a padded evaluation data set.

    Args:
      compiled: the function.
      dataset: distributed; yields (images, labels, weights, positions), weight 0 for padding.
      description: for the progress bar.

    Returns:
      vectors [examples, d] float32 and labels [examples] (or [examples, classes]) int64, in the order of their
      positions.
    """
    rows = [[part.numpy() for part in compiled(batch)] for batch in progress.track(dataset, None, description)]
    vectors, labels, weights, positions = (np.concatenate(column) for column in zip(*rows))
    labelled = np.argsort(positions)
    has_label = (labels >= 0).reshape(len(labels), -1).any(1)
    labelled = labelled[(weights[labelled] > 0) & has_label[labelled]]
    return vectors[labelled], labels[labelled]


def extract(strategy: tf.distribute.Strategy, function: Callable, dataset: Iterable,
            description: str = "features") -> tuple[np.ndarray, np.ndarray]:
    """Runs a function over a data set once; see `compile_function` and `collect`.

    Raises:
      UserError: the vectors contain NaN or Inf.
    """
    vectors, labels = collect(compile_function(strategy, function), dataset, description)
    check_finite(vectors, f"--checkpoint: {description}")
    return vectors, labels


def check_finite(vectors: np.ndarray, name: str) -> None:
    """Raises `UserError`, which begins with `name`, if vectors [n, d] or their squared norms contain NaN or Inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        broken = np.count_nonzero(~np.isfinite(np.einsum("nd,nd->n", vectors, vectors)))
    if broken:
        raise UserError(f"{name} contain NaN or Inf, or numbers whose squares overflow, in {broken} of {len(vectors)} "
                        f"examples. {DIVERGED}")


def encoder_function(model: keras.Model) -> Callable:
    """images -> the representation h of `model`, frozen."""
    return lambda images: model.resnet_model(images, training=False)["final_avg_pool"]


def projection_function(model: keras.Model) -> Callable:
    """images -> the projection z = g(h) of `model`, frozen."""
    return lambda images: model(images, training=False)["proj_head_output"]


def pixels_function(size: int) -> Callable:
    """images -> their pixels, at most `size` x `size` of them, as vectors."""
    def function(images):
        small = images if images.shape[1] <= size else tf.image.resize(images, [size, size], antialias=True)
        return tf.reshape(small, [tf.shape(small)[0], int(np.prod(small.shape[1:]))])
    return function


def check_feature_sets(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], protocol: str
                      ) -> None:
    """Raises `UserError` if features of one of the sets contain NaN or Inf, for which scikit-learn has a traceback."""
    for (vectors, _), name in ((train, "training"), (test, "test")):
        check_finite(vectors, f"--eval_protocol={protocol}: the {name} features")
