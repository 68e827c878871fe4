"""Micro-batch training with the exact gradient of the full-batch loss (Gao et al., arXiv:2101.06983).

The contrastive loss L compares all images in a batch, so it is not a sum of losses of
micro-batches. Its gradient, however, is a sum over micro-batches. With the projections z_i of
micro-batch i and the weights w,

    dL / dw = sum over i of (dL / dz_i) (dz_i / dw).

The first pass computes all z_i without storing activations, and then all dL / dz_i. The second pass
recomputes z_i and differentiates <z_i, dL / dz_i>, treating dL / dz_i as a constant. Activations
are stored for only one micro-batch at a time, but every projection is computed twice. Both passes
use the same views and each micro-batch's own batch statistics. Only the second pass updates the
moving statistics.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

import resnet


def train_step(step: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """Runs a training step. Call the function in cross-replica context, inside a `tf.function`.

    Args:
      step: a `train.TrainStep`, which provides the model, the losses and the update.
      batch: distributed views and labels, and seeds with `--augment_on=device`.

    Returns:
      The per-replica results of `TrainStep.__call__`.
    """
    return _MicroBatches(step).train_step(batch)


class _MicroBatches:
    """The two passes of a training step over its micro-batches."""

    def __init__(self, step):
        self._step, self._model, self._config = step, step.model, step.config
        self._count = step.config.train_batch_size // step.config.micro_batch_size
        # number of examples in a micro-batch on each replica
        self._rows = step.replica_batch_size // self._count

    # The function needs no conversion, and AutoGraph is slow.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch):
        grad_z, contrast_loss, metrics = (), (), ()
        if self._config.pretraining:
            with resnet.without_statistics_updates(self._model):
                z = self._loop(self._project, batch, (), self._run(self._zero_z))
            grad_z, contrast_loss, metrics = self._run(self._differentiate_loss, args=(z,))
        sums = self._loop(self._add_gradients, batch, grad_z, self._run(self._zero_sums))
        return self._run(self._update, args=(sums, contrast_loss, metrics))

    def _loop(self, function, batch, constants, state):
        """Computes `state = function(batch, constants, index, state)` for each micro-batch in turn."""

        def body(index, state):
            return index + 1, self._run(function, args=(batch, constants, index, state))

        # The loop runs outside replica context, since replicas cannot communicate within a loop.
        return tf.while_loop(
            lambda index, _: index < self._count,
            body,
            (tf.constant(0), state),
            parallel_iterations=1,
        )[1]

    def _run(self, function, args=()):
        return self._step.strategy.run(self._step.compiled(function), args)

    # The methods below run in replica context.

    def _micro_batch(self, batch, index):
        """Returns the images and labels of one micro-batch."""
        # XLA compiles a slice separately for each position, but `tf.gather` only once.
        views, labels, *seeds = tf.nest.map_structure(
            lambda tensor: tf.gather(
                tf.reshape(tensor, [self._count, self._rows, *tensor.shape[1:]]), index
            ),
            batch,
        )
        return self._step.network_input(views, index * self._rows, *seeds), labels

    def _zero_z(self):
        """Returns zeros [micro-batches, views, rows, d], to be replaced by the projections of all micro-batches."""
        return tf.zeros(
            [self._count, 2, self._rows, self._model.projection_dim], keras.backend.floatx()
        )

    def _project(self, batch, _, index, z):
        """Writes the projections of one micro-batch to `z` (first pass)."""
        images, _ = self._micro_batch(batch, index)
        projections = self._model(images, training=True)["proj_head_output"]
        return tf.tensor_scatter_nd_update(z, [[index]], [tf.reshape(projections, z.shape[1:])])

    def _differentiate_loss(self, z):
        """Differentiates `replica_loss`.

        Returns:
          The gradient of `replica_loss` with respect to `z`.
          The contrastive loss.
          A dict of the contrastive metrics.
        """
        with tf.GradientTape() as tape:
            tape.watch(z)
            batch_z = tf.reshape(
                tf.transpose(z, [1, 0, 2, 3]), [2 * self._step.replica_batch_size, z.shape[-1]]
            )
            loss, metrics = self._step.contrastive_loss(batch_z)
            replica_loss = self._step.replica_loss(loss)
        return tape.gradient(replica_loss, z), loss, metrics

    def _zero_sums(self):
        """Returns zeros, the initial values of the sums in `_add_gradients`."""
        config, floatx = self._config, keras.backend.floatx()
        gradients = [tf.zeros_like(variable) for variable in self._model.trainable_variables]
        head_moments, supervised = (), ()
        if config.linear_head_learning_rate is not None:
            inputs = self._model.supervised_head.linear_layer.dense.kernel.shape[0]
            head_moments = (tf.zeros([self._count, inputs], floatx),) * 2
        if config.has_linear_head:
            supervised = tf.zeros([], floatx), tf.zeros([])  # loss and accuracy
        return gradients, head_moments, supervised

    def _add_gradients(self, batch, grad_z, index, sums):
        """Adds one micro-batch's gradients, linear head loss and linear head accuracy to `sums` (second pass)."""
        images, labels = self._micro_batch(batch, index)
        supervised, terms = (), []
        with tf.GradientTape() as tape:
            endpoints = self._model(images, training=True)
            if self._config.has_linear_head:
                supervised = tuple(
                    value / self._count for value in self._step.supervised_loss(endpoints, labels)
                )
                terms.append(self._step.replica_loss(supervised[0]))
            if self._config.pretraining:
                z = tf.reshape(endpoints["proj_head_output"], grad_z.shape[1:])
                terms.append(tf.reduce_sum(tf.gather(grad_z, index) * z))
            replica_loss = tf.add_n([tf.cast(term, terms[-1].dtype) for term in terms])
        gradients = tape.gradient(
            replica_loss, self._model.trainable_variables, unconnected_gradients="zero"
        )
        head_moments = tuple(
            tf.tensor_scatter_nd_update(tf.zeros_like(total), [[index]], [moment])
            for total, moment in zip(sums[1], self._step.linear_head_moments(endpoints))
        )
        return tf.nest.map_structure(tf.add, sums, (gradients, head_moments, supervised))

    def _update(self, sums, contrast_loss, metrics):
        """Adds the gradient of the weight decay, and updates the variables."""
        gradients, head_moments, supervised = sums
        losses, metrics = {}, dict(metrics)
        if self._config.pretraining:
            losses["contrast_loss"] = contrast_loss
        if self._config.has_linear_head:
            losses["supervised_loss"], metrics["supervised_acc"] = supervised
        with tf.GradientTape() as tape:
            losses["weight_decay"] = self._step.weight_decay()
            replica_loss = self._step.replica_loss(losses["weight_decay"])
        decay_gradients = tape.gradient(
            replica_loss, self._model.trainable_variables, unconnected_gradients="zero"
        )
        gradients = [gradient + decay for gradient, decay in zip(gradients, decay_gradients)]
        return self._step.update(gradients, losses, metrics, head_moments)
