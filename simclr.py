"""SimCLR as a composition of views, network and losses.

This module composes the parts of a training step. The left column is Algorithm 1 of the paper
(Chen et al. 2020), for a batch of N images x_k:

    for all k: draw augmentations t, t'             `data` crops, flips and distorts color
        x~_{2k-1} = t(x_k),  x~_{2k} = t'(x_k)      `views` blurs: [all t(x_k), all t'(x_k)]
        h = f(x~),  z = g(h)                        `per_image`: `model.Model` computes h and z
    for all i, j: s_ij = <z_i, z_j> / |z_i| |z_j|   `nt_xent`: `objective.add_contrastive_loss`
        l(i, j) = -log(exp(s_ij / tau) / sum over m != i of exp(s_im / tau))
    L = mean of l(2k-1, 2k) + l(2k, 2k-1)           twice the paper's L, as in the original
    update f and g to minimize L                    `train.TrainStep`
    return f, throw away g                          `export`: h is the output `final_avg_pool`

The plain training step calls `per_image` and `over_batch` once. `large_batch.micro_batches` calls
`per_image` once per micro-batch and pass, and `over_batch` between the two passes. Both functions
return terms of the loss, to which `train.TrainStep.update` adds the weight decay, and metrics, which
are only reported. To add a term or a metric, add an item to one of these dicts: the training loop
logs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf
import tf_keras as keras

import data_util
import metrics as metrics_lib
import objective
from augmentation.policies import view_policies
from config import Config
from large_batch import blocked_nt_xent
from model import Model
from runtime import replicas, rng
from runtime.errors import UserError

Scalars = dict[str, tf.Tensor]
_BLUR = 3  # Index of the random-number stream. Streams 0 to 2 are defined in data.py.


def views(
    images: Sequence[tf.Tensor],
    config: Config,
    step: int | tf.Tensor,
    seeds: tf.Tensor | None = None,
    first_row: int | tf.Tensor = 0,
) -> list[tf.Tensor]:
    """Completes the views of n images: applies what the input pipeline leaves to the device.

    This is Gaussian blur (paper, Appendix A) and, with `--augment_on=device`, flips and color
    distortion. The random numbers of the blur depend on the run's seed, the step, the index of the
    view, and the row of the image in the global batch.

    Args:
      images: for each view, [n, h, w, 3] in [0, 1]. With `--augment_on=device`, the crops
        (in `--crop_dtype`).
      config: settings with `seed` set.
      step: training step or, in an evaluation, index of the batch; an int or scalar tensor.
      seeds: int [n, 2], the seeds of the examples; only with `--augment_on=device`.
      first_row: row of the first image in the global batch.

    Returns:
      For each view, [n, h, w, 3] in [0, 1], in the default float type.
    """

    @replicas.compiled_on_gpus
    def complete(images, step, seeds, first_row):
        if seeds is not None:
            crops = [tf.image.convert_image_dtype(view, tf.float32) for view in images]
            images = data_util.augment_crops(crops, view_policies(config), seeds)
        images = [tf.cast(view, keras.backend.floatx()) for view in images]
        if not config.blurs_views:
            return images
        step_seed = rng.step_seed(config.seed, _BLUR, step)
        return [
            data_util.batch_random_blur(
                view,
                rng.nth_seed(step_seed, index, rng.VIEW),
                config.image_size,
                first_row=first_row,
            )
            for index, view in enumerate(images)
        ]

    return complete(images, tf.convert_to_tensor(step), seeds, first_row)


def per_image(
    model: Model,
    images: Sequence[tf.Tensor],
    labels: tf.Tensor,
    config: Config,
    teacher: Model | None = None,
) -> tuple[tf.Tensor, tf.Tensor, Scalars, Scalars]:
    """Applies the network in training mode, and computes everything that is a mean over images.

    Args:
      model: a built model.
      images: the V views from `views`, each [n, h, w, 3].
      labels: int [n], or [n, classes] with values 1, 0 and -1 (unknown).
      config: settings.
      teacher: in distillation, a built model with a classifier or a linear head, which is not trained.

    Returns:
      h: representations [V n, c], all first views before all second views.
      z: projections [V n, d], in the same order.
      terms: terms of the loss, as scalars: the loss of the linear head, if there is one, or those of
        distillation. No gradient flows from them into the encoder in pretraining.
      metrics: other scalars.
    """
    batch = tf.concat(images, 0)
    endpoints = model(batch, training=True)
    terms, metrics = {}, {}
    if teacher:
        targets, logits = teacher(batch, training=False)["logits_sup"], endpoints["logits_sup"]
        terms["distill_loss"], label_loss = objective.add_distillation_loss(
            targets, logits, labels, config.distill_temperature, config.distill_alpha
        )
        if config.distill_alpha < 1:
            terms["supervised_loss"] = label_loss
        hits = metrics_lib.top_1_hits(tf.argmax(targets, 1), logits)
        metrics["teacher_agreement"] = tf.reduce_mean(tf.cast(hits, tf.float32))
    elif model.supervised_head is not None:
        terms["supervised_loss"], metrics["supervised_acc"] = supervised_loss(
            endpoints["logits_sup"], tf.concat([labels] * len(images), 0)
        )
    return endpoints["final_avg_pool"], endpoints["proj_head_output"], terms, metrics


def supervised_loss(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the loss and the accuracy of the linear head or classifier, as two scalars.

    Args:
      logits: [n, classes].
      labels: int [n] with -1 for no label, or [n, classes] with values 1, 0 and -1 (see
        `Source.multi_label`).
    """
    if labels.shape.rank == 2:
        return (
            objective.add_multi_label_loss(labels, logits),
            metrics_lib.multi_label_accuracy(labels, logits),
        )
    loss = objective.add_supervised_loss(tf.one_hot(labels, logits.shape[-1]), logits)
    hits = tf.cast(metrics_lib.top_1_hits(labels, logits), tf.float32)
    has_label = tf.cast(labels >= 0, tf.float32)
    return loss, tf.math.divide_no_nan(tf.reduce_sum(hits), tf.reduce_sum(has_label))


def over_batch(
    h: tf.Tensor,
    z: tf.Tensor,
    labels: tf.Tensor,
    config: Config,
    strategy: tf.distribute.Strategy | None = None,
) -> tuple[Scalars, Scalars]:
    """Computes everything that compares the images of the whole batch: the contrastive loss.

    Call the function in replica context.

    Args:
      h: this replica's representations [V n, c], all first views before all second views, which no
        loss below uses.
      z: this replica's projections [V n, d], in the same order.
      labels: this replica's labels, as in `per_image`. Only losses with `needs_labels` use them.
      config: settings.
      strategy: the strategy whose replicas share the batch, or None.

    Returns:
      terms: terms of the loss, as scalars.
      metrics: other scalars, without gradients: those of the loss, and `embedding_std`. Both dicts
        are empty except in pretraining.

    Raises:
      UserError: the loss does not support V views.
    """
    del h
    if not config.pretraining:
        return {}, {}
    loss, num_views = LOSSES[config.contrastive_loss], z.shape[0] // labels.shape[0]
    if loss.num_views not in (None, num_views):
        raise UserError(
            f"--contrastive_loss={config.contrastive_loss}: this loss compares {loss.num_views}"
            f" views of each image, but there are {num_views}."
        )
    value, scalars = loss.function(z, labels, config, strategy)
    spread = metrics_lib.embedding_std(tf.stop_gradient(z), strategy)
    return {"contrast_loss": value}, {**scalars, "embedding_std": spread}


# ---------------------------------------------------------------------------------- contrastive losses

# Each function takes the projections and labels of `over_batch`, the settings and the strategy, and
# returns the loss, a scalar, and a dict of metrics without gradients.


def nt_xent(
    z: tf.Tensor, labels: tf.Tensor, config: Config, strategy: tf.distribute.Strategy | None
) -> tuple[tf.Tensor, Scalars]:
    """Returns NT-Xent (paper, Eq. 1). If the matrix of similarities is large, it is computed in blocks."""
    if config.negatives != "both":
        return table_2_loss(z, labels, config, strategy)
    settings = config.hidden_norm, config.temperature, strategy
    if blocked_nt_xent.needs_blocks(z, strategy, config.loss_block_rows):
        loss, accuracy, entropy = blocked_nt_xent.contrastive_loss(
            z, *settings, config.loss_block_rows
        )
        return loss, {"contrast_acc": accuracy, "contrast_entropy": entropy}
    return _with_metrics(*objective.add_contrastive_loss(z, *settings))


def table_2_loss(
    z: tf.Tensor, labels: tf.Tensor, config: Config, strategy: tf.distribute.Strategy | None
) -> tuple[tf.Tensor, Scalars]:
    """Returns a loss of Table 2, with any choice of negatives."""
    del labels
    loss = objective.add_alternative_contrastive_loss(
        z,
        config.contrastive_loss,
        config.hidden_norm,
        config.temperature,
        config.effective_margin,
        config.semi_hard,
        config.negatives == "cross_view",
        strategy,
    )
    return _with_metrics(*loss)


def _with_metrics(
    loss: tf.Tensor, logits_ab: tf.Tensor, positives: tf.Tensor
) -> tuple[tf.Tensor, Scalars]:
    logits_ab = tf.stop_gradient(logits_ab)
    return loss, {
        "contrast_acc": metrics_lib.contrastive_accuracy(logits_ab, positives),
        "contrast_entropy": metrics_lib.contrastive_entropy(logits_ab),
    }


class Loss(NamedTuple):
    """A contrastive loss.

    Attributes:
      function: see above.
      needs_labels: whether the function uses the labels.
      num_views: number of views of each image that the function compares; None for any number.
    """

    function: Callable
    needs_labels: bool = False
    num_views: int | None = 2


# Name -> loss. The choices of `--contrastive_loss` in config.py are the same.
LOSSES = {
    "nt_xent": Loss(nt_xent),
    "nt_logistic": Loss(table_2_loss),
    "margin_triplet": Loss(table_2_loss),
}
