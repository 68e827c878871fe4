"""Metrics for batches and data sets, and weighted means of scalars."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from config import Config
from runtime import replicas

LINEAR_TOP_1 = "eval/label_top_1_accuracy"
LINEAR_TOP_5 = "eval/label_top_5_accuracy"
MEAN_PER_CLASS = "eval/label_mean_per_class_accuracy"
MEAN_PRECISION = "eval/label_mean_average_precision"  # 11-point mAP, for multi-label data
LBFGS = "eval/lbfgs_top_1_accuracy"
KNN = "eval/knn_top_1_accuracy"
WEIGHTED_KNN = "eval/knn_weighted_top_1_accuracy"
REGULARIZATION = "eval/regularization_loss"
CONTRAST_LOSS, CONTRAST_ACCURACY = "eval/contrast_loss", "eval/contrast_acc"
CONTRAST_IMAGES, CONTRAST_BATCH = "eval/contrast_images", "eval/contrast_batch_size"
# Key suffixes of the values that a contrastive result is compared with.
CHANCE, UNTRAINED = "/chance_level", "/untrained_encoder"
# Prefixes of the keys from `describe_labels`, for the linear head, and for lbfgs and knn.
HEAD_LABELS, PROBE_LABELS = "eval/label", "eval/probe"
# Key suffix of the encoders that lbfgs and knn are applied to -> name of the encoder.
_ENCODERS = {
    "": ", frozen encoder",
    "/projections": ", projections",
    UNTRAINED: ", untrained encoder",
    "/raw_pixels": ", raw pixels",
}
_NORMAL_QUANTILE = 1.959964  # 97.5 % quantile of the standard normal distribution


class Metric(NamedTuple):
    """Presentation of a metric.

    Attributes:
      key: name in result.json, history.csv and TensorBoard.
      label: name in tables and legends.
      short_label: name in the progress display, or None to omit the metric there.
      panel: title of the metric's panel in curves.png, or None to omit the metric there.
      share_of: for a fraction of images, the prefix of the keys that describe their labels.
    """

    key: str
    label: str
    short_label: str | None = None
    panel: str | None = None
    share_of: str | None = None


# Metrics are shown in this order. Metrics that are missing here are logged, but not shown.
METRICS = (
    Metric("train/contrast_loss", "training", "loss", "contrastive loss"),
    Metric("train/contrast_acc", "training", "contrast_acc", "contrastive accuracy"),
    Metric("train/distill_loss", "training", "loss", "distillation loss"),
    Metric("train/teacher_agreement", "training", "agreement", "agreement with the teacher"),
    Metric("train/supervised_acc", "training", "head_acc", "accuracy of the linear head"),
    Metric(
        LINEAR_TOP_1,
        "linear head, top-1",
        "eval_head_acc",
        "accuracy of the linear head",
        HEAD_LABELS,
    ),
    Metric(LINEAR_TOP_5, "linear head, top-5", share_of=HEAD_LABELS),
    Metric(MEAN_PER_CLASS, "linear head, mean per class"),
    Metric(MEAN_PRECISION, "linear head, 11-point mAP", "eval_head_map", "11-point mAP"),
    Metric(LBFGS, "logistic regression", share_of=PROBE_LABELS),
    Metric(
        KNN, "10 nearest neighbors", "eval_knn", "accuracy of the nearest neighbors", PROBE_LABELS
    ),
    Metric(
        WEIGHTED_KNN,
        "200 nearest neighbors, weighted",
        None,
        "accuracy of the nearest neighbors",
        PROBE_LABELS,
    ),
    Metric(CONTRAST_LOSS, "contrastive loss", "eval_loss", "contrastive loss"),
    Metric(CONTRAST_ACCURACY, "contrastive accuracy", None, "contrastive accuracy"),
    Metric("train/supervised_loss", "training", "head_loss", "loss of the linear head"),
    Metric("learning_rate", "training", None, "learning rate"),
)


def short_labels(scalars: dict[str, float]) -> dict[str, float]:
    """Returns the metrics to show next to the training progress, keyed by their short labels."""
    return {
        metric.short_label: scalars[metric.key]
        for metric in METRICS
        if metric.short_label and metric.key in scalars
    }


def result_rows(
    results: Mapping[str, float], head_name: str, has_trained_images: bool
) -> list[tuple[str, str]]:
    """Returns the results as table rows (description, value), together with what they must be compared with.

    Args:
      results: results of an evaluation.
      head_name: name of the linear head or classifier; see `Config.head_name`.
      has_trained_images: whether some of the images were also used for training.
    """
    rows = [
        (
            metric.label.replace("linear head", head_name) + encoder,
            _describe(results, metric, suffix, 4),
        )
        for metric in METRICS
        for suffix, encoder in (
            _ENCODERS.items() if metric.share_of == PROBE_LABELS else [("", "")]
        )
        if metric.key + suffix in results
    ]
    for prefix in (HEAD_LABELS, PROBE_LABELS):
        count, share = (results.get(prefix + suffix) for suffix in ("_examples", "_majority"))
        if count:
            text = f"{count:,} images" if share is None else f"{share:.4f} of {count:,} images"
            rows.append(("evaluated" if share is None else "majority baseline", text))
    if CONTRAST_IMAGES in results:
        kind = "images" if not has_trained_images else "images, some of which were trained on"
        text = f"{results[CONTRAST_IMAGES]:,} {kind}, in batches of {results[CONTRAST_BATCH]}"
        rows.append(("contrastive values", text))
    return list(dict.fromkeys(rows))


def _describe(results: Mapping[str, float], metric: Metric, suffix: str, digits: int) -> str:
    """Returns the text for a result, with its 95 % interval, or with the values to compare it with."""
    key = metric.key + suffix
    if count := results.get(f"{metric.share_of}_examples"):
        values = [results[key], *wilson_interval(results[key], int(count))]
        return "{} [{}, {}]".format(*(f"{value:.{digits}f}" for value in values))
    others = [
        f"{name} {results[key + other]:.{digits}f}"
        for other, name in ((CHANCE, "chance level"), (UNTRAINED, "untrained"))
        if key + other in results
    ]
    return f"{results[key]:.{digits}f}" + (f" ({', '.join(others)})" if others else "")


def short_texts(results: Mapping[str, float]) -> list[str]:
    """Returns a text for each result that is shown in the progress display."""
    return [
        f"{metric.short_label} {_describe(results, metric, '', 3)}"
        for metric in METRICS
        if metric.short_label and metric.key in results
    ]


def reasons_for_no_progress(results: Mapping[str, float], head_name: str) -> list[str]:
    """Returns one phrase for each result that is not better than without training.

    Args:
      results: results on images that were not used for training.
      head_name: see `result_rows`.
    """
    reasons = []
    chance = results.get(CONTRAST_LOSS + CHANCE)
    if chance is not None and (loss := results[CONTRAST_LOSS]) >= chance:
        reasons.append(f"the contrastive loss {loss:.2f} is not below chance level ({chance:.2f})")
    if CONTRAST_ACCURACY + CHANCE in results:  # At least two images were compared.
        accuracy, untrained = (results[CONTRAST_ACCURACY + suffix] for suffix in ("", UNTRAINED))
        if accuracy <= untrained:
            reasons.append(
                f"the contrastive accuracy {accuracy:.3f} is not above that of the untrained network"
                f" ({untrained:.3f})"
            )
    top_1 = next((metric for metric in METRICS if metric.share_of and metric.key in results), None)
    if top_1 and (majority := results.get(f"{top_1.share_of}_majority")):
        count = int(results[f"{top_1.share_of}_examples"])
        low, high = wilson_interval(results[top_1.key], count)
        if low <= majority:
            reasons.append(
                f"the 95 % interval of the accuracy ({top_1.label.replace('linear head', head_name)}),"
                f" {low:.3f} to {high:.3f}, is not above the majority baseline ({majority:.3f})"
            )
    return reasons


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a fraction of `count` independent images (Wilson 1927)."""
    z_squared = _NORMAL_QUANTILE**2 / count
    spread = math.sqrt(z_squared * share * (1 - share) + z_squared**2 / 4)
    center, scale = share + z_squared / 2, 1 + z_squared
    return (center - spread) / scale, (center + spread) / scale


def describe_labels(labels: np.ndarray, prefix: str) -> dict[str, float]:
    """Returns the number of labeled examples and, unless they have multiple labels, the share of the largest class.

    Args:
      labels: int [n], or [n, classes] for multi-label data.
      prefix: prefix of the keys.
    """
    results: dict[str, float] = {f"{prefix}_examples": len(labels)}
    if labels.ndim == 1:
        results[f"{prefix}_majority"] = float(np.bincount(labels, minlength=1).max() / len(labels))
    return results


def chance_levels(config: Config, count: int) -> dict[str, float]:
    """Returns the values of `contrast_loss` and `contrast_acc` if all similarities are equal.

    The dict is empty if the run does not pretrain, or if there is only one image.

    NT-Xent has the original's scale, so that its value is twice the logarithm of the number of views
    that each view is compared with. The values of the other losses for equal similarities are those
    of a collapsed encoder, which may be low, so they are omitted.

    Args:
      config: settings.
      count: number N of images that are compared.
    """
    if not config.pretraining or count < 2:
        return {}
    levels = {}
    if config.contrastive_loss == "nt_xent" and not config.semi_hard:
        compared = count if config.negatives == "cross_view" else 2 * count - 1
        levels["contrast_loss"] = 2 * math.log(compared)
    return {**levels, "contrast_acc": 1 / count}


def contrastive_accuracy(logits_ab: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the fraction of first views whose positive is the most similar second view.

    Args:
      logits_ab: [n, N] similarities.
      labels: one-hot [n, N] or [n, 2N], as returned by the contrastive losses in `objective`.
    """
    hits = tf.equal(tf.argmax(labels, 1), tf.argmax(logits_ab, 1))
    return tf.reduce_mean(tf.cast(hits, tf.float32))


def contrastive_entropy(logits_ab: tf.Tensor) -> tf.Tensor:
    """Returns the mean entropy, in nats, of the softmax over the columns of `logits_ab` [n, N]."""
    probabilities = tf.nn.softmax(tf.cast(logits_ab, tf.float32))
    return -tf.reduce_mean(tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8), -1))


def embedding_std(z: tf.Tensor, strategy: tf.distribute.Strategy | None = None) -> tf.Tensor:
    """Measures the spread of projections: 1 if they spread equally in all directions, 0 if they collapse to a point.

    Args:
      z: [n, d] projections.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.

    Returns:
      float32 scalar, at most 1: the standard deviation of each column of the l2-normalized
      projections, averaged over the columns and multiplied by sqrt(d) (Chen and He 2020,
      arXiv:2011.10566, section 4.1).
    """
    unit = tf.math.l2_normalize(tf.cast(z, tf.float32), -1)
    means, variances = tf.nn.moments(unit, [0])
    _, variance = replicas.mean_and_variance(means, variances, strategy)
    return tf.reduce_mean(tf.sqrt(variance)) * tf.sqrt(tf.cast(tf.shape(z)[1], tf.float32))


def top_1_hits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Checks whether the logit of each label is the largest.

    Args:
      labels: int [n].
      logits: [n, classes].

    Returns:
      bool [n].
    """
    return tf.equal(tf.argmax(logits, 1, output_type=labels.dtype), labels)


def top_k_hits(labels: tf.Tensor, logits: tf.Tensor, k: int) -> tf.Tensor:
    """Checks whether the logit of each label is among the k largest.

    Args:
      labels: int [n].
      logits: [n, classes].
      k: number of largest logits.

    Returns:
      bool [n], False for labels of -1.
    """
    k = min(k, logits.shape[-1])
    hits = tf.math.in_top_k(tf.maximum(labels, 0), tf.cast(logits, tf.float32), k)
    return hits & (labels >= 0)


def multi_label_accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the fraction of labels that match the sign of the logit: positive for 1, negative for 0.

    Args:
      labels: int [n, classes] with values 1, 0 and -1 (ignored).
      logits: [n, classes].
    """
    is_known = tf.cast(labels >= 0, tf.float32)
    hits = tf.cast(tf.equal(labels, tf.cast(logits > 0, labels.dtype)), tf.float32)
    return tf.math.divide_no_nan(tf.reduce_sum(hits), tf.reduce_sum(is_known))


def mean_per_class_accuracy(hits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the accuracy per class, averaged over the classes that occur in `labels`.

    Args:
      hits: bool [n], whether each prediction is correct.
      labels: int [n].
    """
    counts = np.bincount(labels)
    return float(np.mean(np.bincount(labels, hits)[counts > 0] / counts[counts > 0]))


def average_precision_11(relevant: np.ndarray, scores: np.ndarray) -> float:
    """Returns the 11-point average precision of PASCAL VOC 2007 (Everingham et al. 2010, 4.2).

    This is the mean, over the recall levels r = 0, 0.1, ..., 1, of the highest precision at recall
    r or above.

    Args:
      relevant: bool [n], with at least one True.
      scores: [n]; examples are ranked by decreasing score. Examples with equal scores keep their
        order.
    """
    true_positives = np.cumsum(
        np.asarray(relevant, bool)[np.argsort(-np.asarray(scores), kind="stable")]
    )
    precision = true_positives / np.arange(1, len(true_positives) + 1)
    # Compare integer counts, since 0.1 * 3 > 3 / 10 in floating point.
    return float(
        np.mean(
            [
                precision[10 * true_positives >= tenth * true_positives[-1]].max()
                for tenth in range(11)
            ]
        )
    )


def mean_average_precision_11(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the mean `average_precision_11` over the classes with at least one positive example.

    Args:
      labels: int [n, classes] with values 1 (present), 0 (absent) and -1 (ignored).
      scores: [n, classes].
    """
    return float(
        np.mean(
            [
                average_precision_11(
                    class_labels[class_labels >= 0] == 1, class_scores[class_labels >= 0]
                )
                for class_labels, class_scores in zip(labels.T, scores.T)
                if (class_labels == 1).any()
            ]
        )
    )


def linear_results(labels: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Computes the linear head's metrics and returns a dict mapping keys to floats.

    Args:
      labels: [n] for top-1, top-5 and mean per-class accuracy, or [n, classes] with values 1, 0 and
        -1 for 11-point mAP.
      logits: [n, classes].
    """
    if labels.ndim == 2:
        return {
            MEAN_PRECISION: mean_average_precision_11(labels, logits),
            **describe_labels(labels, HEAD_LABELS),
        }
    top_1 = top_1_hits(labels, logits).numpy()
    results = {
        **describe_labels(labels, HEAD_LABELS),
        LINEAR_TOP_1: float(top_1.mean()),
        MEAN_PER_CLASS: mean_per_class_accuracy(top_1, labels),
    }
    if logits.shape[-1] > 5:  # With at most five classes, top-5 accuracy is always 1.
        results[LINEAR_TOP_5] = float(np.mean(top_k_hits(labels, logits, 5)))
    return results


def map_labels(
    labels: np.ndarray, logits: np.ndarray, columns: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Maps a data set's labels to the columns of a linear head trained on different classes.

    Single-label examples are dropped if the head has no column for their class. With multiple
    labels, the label is -1 in every head column whose class is not in the data set.

    Args:
      labels: int [n], or [n, data set classes] for multi-label data; see `sources.source.Source`.
      logits: [n, head columns].
      columns: the head column of each data set class, or -1 if the head lacks the class.

    Returns:
      labels: int [m], or [n, head columns] for multi-label data. m is the number of examples that
        are not dropped.
      logits: [m, head columns], or [n, head columns] for multi-label data.
    """
    columns = np.array(columns)
    if labels.ndim == 1:
        mapped = columns[labels]
        return mapped[mapped >= 0], logits[mapped >= 0]
    mapped = np.full(logits.shape, -1, np.int64)
    mapped[:, columns[columns >= 0]] = labels[:, columns >= 0]
    return mapped, logits


class MeanMetrics:
    """Weighted means of scalars, by name."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Removes all scalars."""
        self._sums: dict = collections.Counter()
        self._weights: dict = collections.Counter()

    def add(self, scalars: Mapping[str, float], weight: float = 1.0) -> None:
        """Accumulates scalars, each of which is a mean over `weight` steps or examples."""
        for name, value in scalars.items():
            self._sums[name] += float(value) * weight
            self._weights[name] += weight

    def means(self) -> dict[str, float]:
        """Returns the weighted means."""
        return {name: self._sums[name] / self._weights[name] for name in self._sums}
