"""Metrics of a batch or a data set, and weighted means of them."""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import collections

import numpy as np
import tensorflow as tf

from runtime import replicas


def contrastive_accuracy(logits_ab: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Share of first views whose own second view is the most similar of all second views.

    Args:
      logits_ab: [n, N] similarities.
      labels: [n, 2N] one-hot, as `objective.add_contrastive_loss` returns them.
    """
    hits = tf.equal(tf.argmax(labels, 1), tf.argmax(logits_ab, 1))
    return tf.reduce_mean(tf.cast(hits, tf.float32))


def contrastive_entropy(logits_ab: tf.Tensor) -> tf.Tensor:
    """Mean entropy, in nats, of the softmax over the columns of `logits_ab` [n, N]."""
    probabilities = tf.nn.softmax(tf.cast(logits_ab, tf.float32))
    return -tf.reduce_mean(tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8), -1))


def embedding_std(hidden: tf.Tensor, strategy: tf.distribute.Strategy | None = None) -> tf.Tensor:
    """Returns the spread of embeddings: 1 if it is equal in all directions, 0 if they have collapsed into one point.

    Args:
      hidden: [n, d].
      strategy: the strategy whose replicas share the batch, or None. Call it in replica context.

    Returns:
      float32 scalar, at most 1: the standard deviation over the batch of the l2-normalized embeddings, averaged over
      the columns, times sqrt(d) (Chen and He 2020, arXiv:2011.10566, section 4.1).
    """
    unit = tf.math.l2_normalize(tf.cast(hidden, tf.float32), -1)
    variance = replicas.mean_and_variance(*tf.nn.moments(unit, [0]), strategy)[1]
    return tf.reduce_mean(tf.sqrt(variance)) * tf.sqrt(tf.cast(tf.shape(hidden)[1], tf.float32))


def top_1_hits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Whether the largest logit is the label's; [n] booleans from labels [n] and logits [n, classes]."""
    return tf.equal(tf.argmax(logits, 1, output_type=labels.dtype), labels)


def top_k_hits(labels: tf.Tensor, logits: tf.Tensor, k: int) -> tf.Tensor:
    """Whether the label's logit is among the k largest; [n] booleans. A label of -1 never is."""
    k = min(k, logits.shape[-1])
    inside = tf.math.in_top_k(tf.maximum(labels, 0), tf.cast(logits, tf.float32), k)
    return inside & (labels >= 0)


def multi_label_accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Share of the labels [n, classes], 1 or 0 (-1: left out), that the signs of the logits [n, classes] get right."""
    counts = tf.cast(labels >= 0, tf.float32)
    hits = tf.cast(tf.equal(labels, tf.cast(logits > 0, labels.dtype)), tf.float32)
    return tf.math.divide_no_nan(tf.reduce_sum(hits), tf.reduce_sum(counts))


def mean_per_class_accuracy(hits: np.ndarray, labels: np.ndarray) -> float:
    """Mean over classes of the share of their examples that were hit: `hits` [n] booleans, `labels` [n] integers."""
    counts = np.bincount(labels)
    return float(np.mean(np.bincount(labels, hits)[counts > 0] / counts[counts > 0]))


def average_precision_11(relevant: np.ndarray, scores: np.ndarray) -> float:
    """The 11-point average precision of PASCAL VOC 2007 (Everingham et al. 2010, 4.2).

    The mean, over recalls of 0, 0.1, ..., 1, of the best precision at that recall or a higher one.

    Args:
      relevant: [n] booleans, at least one of them true.
      scores: [n]; the highest comes first, and equal ones in their order.
    """
    found = np.cumsum(np.asarray(relevant, bool)[np.argsort(-np.asarray(scores), kind="stable")])
    precision = found / np.arange(1, len(found) + 1)
    # Counts, not quotients: 3 of 10 are not a recall of 0.1 * 3.
    return float(np.mean([precision[10 * found >= tenth * found[-1]].max() for tenth in range(11)]))


def mean_average_precision_11(labels: np.ndarray, scores: np.ndarray) -> float:
    """Mean of the classes' `average_precision_11`, classes without an example left out.

    Args:
      labels: int [n, classes], 1: shown, 0: not, -1: left out.
      scores: [n, classes].
    """
    columns = [(labels[:, number], scores[:, number]) for number in range(labels.shape[1])]
    return float(np.mean([average_precision_11(column[column >= 0] == 1, values[column >= 0])
                          for column, values in columns if (column == 1).any()]))


class MeanMetrics:
    """Weighted averages of scalars by name."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._sums = collections.Counter()
        self._weights = collections.Counter()

    def add(self, scalars: dict[str, float], weight: float = 1.0) -> None:
        """Adds a dict of scalars that stand for `weight` steps or examples."""
        for name, value in scalars.items():
            self._sums[name] += float(value) * weight
            self._weights[name] += weight

    def means(self) -> dict[str, float]:
        """The averages, as a dict of floats."""
        return {name: self._sums[name] / self._weights[name] for name in self._sums}
