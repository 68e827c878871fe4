"""Feature extraction with a frozen network."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf
import tf_keras as keras

from runtime import progress
from runtime.errors import UserError, first_line

_GATHERED_BATCHES = 4  # This many batches are gathered from the replicas at once.
DIVERGED = "Use a checkpoint from before training diverged."  # remedy for NaN and Inf errors


def compile_function(strategy: tf.distribute.Strategy, function: Callable) -> Callable:
    """Compiles `function` for use with `collect`.

    Args:
      strategy: the strategy that distributes the batches.
      function: maps images [n, size, size, 3] to vectors [n, d]; called in replica context.

    Returns:
      A function that maps a list of distributed batches (images, labels, weights, positions) to
      (float32 vectors, labels, weights, positions), concatenated over batches and replicas.
      `function` is traced only once.
    """

    @tf.function(autograph=False)
    def run(batch):
        return strategy.run(
            lambda images, *others: (tf.cast(function(images), tf.float32), *others), args=batch
        )

    @tf.function(autograph=False)
    def gather(*results):
        def concatenate(*parts):
            return strategy.gather(strategy.run(lambda *each: tf.concat(each, 0), parts), axis=0)

        return tuple(map(concatenate, *results))

    return lambda batches: gather(*map(run, batches))


def collect(
    compiled: Callable, dataset: Iterable, description: str
) -> tuple[np.ndarray, np.ndarray]:
    """Extracts the vectors of all labeled examples in a padded evaluation data set.

    The vectors are stored in a temporary file, so that they do not have to fit in memory.

    Args:
      compiled: result of `compile_function`.
      dataset: distributed data set of (images, labels, weights, positions), with weight 0 for
        padding. Positions increase from batch to batch.
      description: label for the progress bar.

    Returns:
      vectors: float32 [examples, d], ordered by position, as a memory map (see `VectorFile`).
      labels: int64 [examples] or [examples, classes], in the same order.
    """
    file, all_labels = VectorFile(), []
    batches = progress.track(dataset, description)
    while group := list(itertools.islice(batches, _GATHERED_BATCHES)):
        vectors, labels, weights, positions = (tensor.numpy() for tensor in compiled(group))
        order = np.argsort(positions)
        has_label = (labels >= 0).reshape(len(labels), -1).any(1)
        labeled = order[(weights[order] > 0) & has_label[order]]
        file.append(vectors[labeled])
        all_labels.append(labels[labeled])
    return file.read(), np.concatenate(all_labels)


class VectorFile:
    """Vectors in a temporary file, which is deleted when neither this object nor its memory map is in use."""

    def __init__(self):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it is no longer referenced)
        self._shape = [0, 0]

    def append(self, vectors: np.ndarray) -> None:
        """Appends vectors, float32 [n, d]. Raises `UserError` if the directory for temporary files is full."""
        self._shape = [self._shape[0] + len(vectors), vectors.shape[1]]
        try:
            self._file.write(vectors.astype(np.float32).tobytes())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"TMPDIR={tempfile.gettempdir()}: features cannot be written to a temporary file "
                f"({first_line(error)}). Free up some space, or set TMPDIR to another directory."
            ) from error

    def read(self) -> np.ndarray:
        """Returns all vectors, float32 [n, d], as a read-only memory map."""
        if not self._shape[0]:  # Empty files cannot be memory-mapped.
            return np.zeros(self._shape, np.float32)
        return np.memmap(self._file, np.float32, "r", shape=tuple(self._shape))


def extract(
    strategy: tf.distribute.Strategy,
    function: Callable,
    dataset: Iterable,
    description: str = "features",
) -> tuple[np.ndarray, np.ndarray]:
    """Compiles `function` and extracts vectors with it; see `compile_function` and `collect`.

    Raises:
      UserError: the vectors contain NaN or Inf.
    """
    vectors, labels = collect(compile_function(strategy, function), dataset, description)
    check_finite(vectors, f"--checkpoint: {description}")
    return vectors, labels


def check_finite(vectors: np.ndarray, name: str) -> None:
    """Raises a `UserError` if vectors [n, d] or their squared norms contain NaN or Inf.

    `name` describes the vectors in the error message.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        num_nonfinite = np.count_nonzero(~np.isfinite(np.einsum("nd,nd->n", vectors, vectors)))
    if num_nonfinite:
        raise UserError(
            f"{name} contain NaN or Inf, or values whose squares overflow, in {num_nonfinite} of "
            f"{len(vectors)} examples. {DIVERGED}"
        )


def encoder_function(model: keras.Model) -> Callable:
    """Returns a function that maps images to the representation h of `model`, in inference mode."""
    return lambda images: model.resnet_model(images, training=False)["final_avg_pool"]


def projection_function(model: keras.Model) -> Callable:
    """Returns a function that maps images to the projection z = g(h) of `model`, in inference mode."""
    return lambda images: model(images, training=False)["proj_head_output"]


def pixels_function(size: int) -> Callable:
    """Returns a function that flattens images to vectors. Larger images are first resized to `size` x `size` pixels."""

    def function(images):
        if images.shape[1] > size:
            images = tf.image.resize(images, [size, size], antialias=True)
        return tf.reshape(images, [-1, math.prod(images.shape[1:])])

    return function
