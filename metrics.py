"""Metrics of a batch, their averages, and the files that hold them."""

from __future__ import annotations

import collections
import json
import os

import tensorflow as tf


def contrastive_accuracy(logits_ab, labels):
    """Share of first views whose own second view is the most similar of all second views.

    Args:
      logits_ab: [n, N] similarities.
      labels: [n, 2N] one-hot, as `objective.add_contrastive_loss` returns them.
    """
    hits = tf.equal(tf.argmax(labels, 1), tf.argmax(logits_ab, 1))
    return tf.reduce_mean(tf.cast(hits, tf.float32))


def contrastive_entropy(logits_ab):
    """Mean entropy, in nats, of the softmax over the columns of `logits_ab` [n, N]."""
    probabilities = tf.nn.softmax(tf.cast(logits_ab, tf.float32))
    return -tf.reduce_mean(tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8), -1))


def top_1_hits(labels, logits):
    """Whether the largest logit is the label's; [n] booleans from labels [n] and logits [n, classes]."""
    return tf.equal(tf.argmax(logits, 1, output_type=labels.dtype), labels)


def top_k_hits(labels, logits, k):
    """Whether the label's logit is among the k largest; [n] booleans. A label of -1 never is."""
    k = min(k, logits.shape[-1])
    inside = tf.math.in_top_k(tf.maximum(labels, 0), tf.cast(logits, tf.float32), k)
    return inside & (labels >= 0)


class MetricBag:
    """Weighted averages of scalars by name."""

    def __init__(self):
        self.clear()

    def clear(self):
        """Forgets everything."""
        self._sums = collections.Counter()
        self._weights = collections.Counter()

    def add(self, scalars, weight=1.0):
        """Adds a dict of scalars that stand for `weight` steps or examples."""
        for name, value in scalars.items():
            self._sums[name] += float(value) * weight
            self._weights[name] += weight

    def means(self):
        """The averages, as a dict of floats."""
        return {name: self._sums[name] / self._weights[name] for name in self._sums}


def write_json(path, content):
    """Writes `content` to `path` in one move, so that a reader never sees half of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    tf.io.gfile.rename(temporary, path, overwrite=True)


def read_json(path):
    """The content of `path`, or None if there is no such file, or it is damaged."""
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        try:
            return json.loads(file.read())
        except ValueError:
            return None


def write_results(directory, step, results):
    """Writes result.json (the latest) and result_<step>.json."""
    tf.io.gfile.makedirs(directory)
    for name in ("result.json", f"result_{step}.json"):
        write_json(os.path.join(directory, name), results)


def write_scalars(writer, step, scalars):
    """Writes scalars to TensorBoard and flushes them."""
    with writer.as_default(step=step):
        for name, value in scalars.items():
            tf.summary.scalar(name, value)
    writer.flush()
