"""Feature extraction with a frozen network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf
import tf_keras as keras

from runtime import progress
from runtime.errors import UserError

DIVERGED = "Use a checkpoint from before training diverged."  # remedy for NaN and Inf errors


def compile_function(strategy: tf.distribute.Strategy, function: Callable) -> Callable:
    """Compiles `function` for use with `collect`.

    Args:
      strategy: the strategy that distributes the batches.
      function: maps images [n, size, size, 3] to vectors [n, d]; called in replica context.

    Returns:
      A function that maps a distributed batch (images, labels, weights, positions) to (float32 vectors, labels,
      weights, positions), concatenated over the replicas. The function is traced only once.
    """
    @tf.function(autograph=False)
    def run(batch):
        results = strategy.run(lambda images, *others: (tf.cast(function(images), tf.float32), *others), args=batch)
        return tuple(strategy.gather(result, axis=0) for result in results)

    return run


def collect(compiled: Callable, dataset: Iterable, description: str = "features") -> tuple[np.ndarray, np.ndarray]:
    """Extracts the vectors of all labeled examples in a padded evaluation data set.

    Args:
      compiled: result of `compile_function`.
      dataset: distributed data set of (images, labels, weights, positions), with weight 0 for padding.
      description: label for the progress bar.

    Returns:
      vectors: float32 [examples, d], ordered by position.
      labels: int64 [examples] or [examples, classes], in the same order.
    """
    batches = [[tensor.numpy() for tensor in compiled(batch)] for batch in progress.track(dataset, None, description)]
    vectors, labels, weights, positions = (np.concatenate(arrays) for arrays in zip(*batches))
    order = np.argsort(positions)
    has_label = (labels >= 0).reshape(len(labels), -1).any(1)
    labeled = order[(weights[order] > 0) & has_label[order]]
    return vectors[labeled], labels[labeled]


def extract(strategy: tf.distribute.Strategy, function: Callable, dataset: Iterable,
            description: str = "features") -> tuple[np.ndarray, np.ndarray]:
    """Compiles `function` and extracts vectors with it; see `compile_function` and `collect`.

    Raises:
      UserError: the vectors contain NaN or Inf.
    """
    vectors, labels = collect(compile_function(strategy, function), dataset, description)
    check_finite(vectors, f"--checkpoint: {description}")
    return vectors, labels


def check_finite(vectors: np.ndarray, name: str) -> None:
    """Raises a `UserError` about `name` if vectors [n, d] or their squared norms contain NaN or Inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        num_nonfinite = np.count_nonzero(~np.isfinite(np.einsum("nd,nd->n", vectors, vectors)))
    if num_nonfinite:
        raise UserError(f"{name} contain NaN or Inf, or values whose squares overflow, in {num_nonfinite} of "
                        f"{len(vectors)} examples. {DIVERGED}")


def encoder_function(model: keras.Model) -> Callable:
    """Returns a function that maps images to the representation h of `model`, in inference mode."""
    return lambda images: model.resnet_model(images, training=False)["final_avg_pool"]


def projection_function(model: keras.Model) -> Callable:
    """Returns a function that maps images to the projection z = g(h) of `model`, in inference mode."""
    return lambda images: model(images, training=False)["proj_head_output"]


def pixels_function(size: int) -> Callable:
    """Returns a function that flattens images to vectors, after resizing them to at most `size` x `size` pixels."""
    def function(images):
        small = images if images.shape[1] <= size else tf.image.resize(images, [size, size], antialias=True)
        return tf.reshape(small, [tf.shape(small)[0], int(np.prod(small.shape[1:]))])
    return function


def check_feature_sets(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], protocol: str
                      ) -> None:
    """Raises a `UserError` if either set's features contain NaN or Inf, which would make scikit-learn fail."""
    for (vectors, _), name in ((train, "training"), (test, "test")):
        check_finite(vectors, f"--eval_protocol={protocol}: the {name} features")
