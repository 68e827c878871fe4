"""Training steps in micro-batches, with the gradient of the loss of the whole batch (Gao et al., arXiv:2101.06983).

The contrastive loss L compares all images of a batch, so it does not split into losses of parts. Its gradient does:
with the projections z_i of micro-batch i and the weights w,

    dL / dw = sum over i of  (dL / dz_i) (dz_i / dw).

A first pass computes all z_i without keeping activations, dL / dz_i follows from them, and a second pass computes
z_i again and differentiates <z_i, dL / dz_i>, where the second factor is constant. Memory is that of one micro-batch;
every image is embedded twice. Both passes see the same views and the same batch statistics, those of the micro-batch;
only the second one updates the moving statistics.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras as keras

import resnet


def train_step(step: Any, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Takes a step; call it in cross-replica context, inside a `tf.function`.

    Args:
      step: `train.TrainStep`, which provides model, losses and update.
      batch: distributed views and labels.

    Returns:
      What `TrainStep.__call__` returns, per replica.
    """
    return _MicroBatches(step).train_step(batch)


class _MicroBatches:
    """The two passes over the micro-batches of a step."""

    def __init__(self, step):
        self._step, self._model, self._config, self._run = step, step.model, step.config, step.strategy.run
        self._count = step.config.train_batch_size // step.config.micro_batch_size
        self._rows = step.replica_batch_size // self._count  # of a micro-batch, on this replica

    @tf.autograph.experimental.do_not_convert  # There is nothing to convert, and looking for it in tf_keras takes long.
    def train_step(self, batch):
        gradients_of_z, contrast_loss, metrics = (), (), ()
        if self._config.pretraining:
            with resnet.moving_statistics_kept(self._model):
                z = self._for_each(self._embed, batch, (), self._run(self._empty_z))
            gradients_of_z, contrast_loss, metrics = self._run(self._differentiate_loss, args=(z,))
        sums = self._for_each(self._differentiate, batch, gradients_of_z, self._run(self._empty_sums))
        return self._run(self._finish, args=(sums, contrast_loss, metrics))

    def _for_each(self, function, batch, constants, state):
        """Runs `function(batch, constants, number, state)` -> state on each micro-batch, one after the other."""
        def body(number, state):
            return number + 1, self._run(function, args=(batch, constants, number, state))

        # The loop is outside of replica context, since replicas cannot communicate from within a loop.
        return tf.while_loop(lambda number, _: number < self._count, body, (tf.constant(0), state),
                             parallel_iterations=1)[1]

    # In replica context.

    def _micro_batch(self, batch, number):
        """Returns the images and labels of one micro-batch."""
        first = number * self._rows
        views, labels = (part[first:first + self._rows] for part in batch)
        views.set_shape([self._rows, *batch[0].shape[1:]])
        labels.set_shape([self._rows, *batch[1].shape[1:]])
        return self._step.network_input(views, first), labels

    def _empty_z(self):
        """Zeros for the projections of all micro-batches: [micro-batches, views, rows, width]."""
        return tf.zeros([self._count, 2, self._rows, self._model.projection_dim], keras.backend.floatx())

    def _embed(self, batch, _, number, z):
        """First pass: fills in the projections of one micro-batch."""
        images, _ = self._micro_batch(batch, number)
        projections = self._model(images, training=True)["proj_head_output"]
        return tf.tensor_scatter_nd_update(z, [[number]], [tf.reshape(projections, z.shape[1:])])

    def _differentiate_loss(self, z):
        """Returns dL / dz for the `replica_loss` of this replica, the contrastive loss L, and its metrics."""
        with tf.GradientTape() as tape:
            tape.watch(z)
            hidden = tf.reshape(tf.transpose(z, [1, 0, 2, 3]), [2 * self._step.replica_batch_size, z.shape[-1]])
            loss, metrics = self._step.contrastive_loss(hidden)
            share = self._step.replica_loss(loss)
        return tape.gradient(share, z), loss, metrics

    def _empty_sums(self):
        """Zeros for what `_differentiate` sums up."""
        config, floatx = self._config, keras.backend.floatx()
        gradients = [tf.zeros_like(variable) for variable in self._model.trainable_variables]
        head_moments, supervised = (), ()
        if config.linear_head_learning_rate is not None:
            inputs = self._model.supervised_head.linear_layer.dense.kernel.shape[0]
            head_moments = (tf.zeros([self._count, inputs], floatx),) * 2
        if config.has_linear_head:
            supervised = tf.zeros([], floatx), tf.zeros([])  # loss and accuracy
        return gradients, head_moments, supervised

    def _differentiate(self, batch, gradients_of_z, number, sums):
        """Second pass: adds the share of one micro-batch in the gradients, and in loss and accuracy of the head."""
        images, labels = self._micro_batch(batch, number)
        supervised, parts = (), []
        with tf.GradientTape() as tape:
            endpoints = self._model(images, training=True)
            if self._config.has_linear_head:
                supervised = tuple(value / self._count for value in self._step.supervised_loss(endpoints, labels))
                parts.append(self._step.replica_loss(supervised[0]))
            if self._config.pretraining:
                z = tf.reshape(endpoints["proj_head_output"], gradients_of_z.shape[1:])
                parts.append(tf.reduce_sum(gradients_of_z[number] * z))
            share = tf.add_n([tf.cast(part, parts[-1].dtype) for part in parts])
        gradients = tape.gradient(share, self._model.trainable_variables, unconnected_gradients="zero")
        head_moments = tuple(tf.tensor_scatter_nd_update(tf.zeros_like(total), [[number]], [moment])
                             for total, moment in zip(sums[1], self._step.linear_head_moments(endpoints)))
        return tf.nest.map_structure(tf.add, sums, (gradients, head_moments, supervised))

    def _finish(self, sums, contrast_loss, metrics):
        """Adds the weight decay, and updates the variables."""
        gradients, head_moments, supervised = sums
        losses, metrics = {}, dict(metrics)
        if self._config.pretraining:
            losses["contrast_loss"] = contrast_loss
        if self._config.has_linear_head:
            losses["supervised_loss"], metrics["supervised_acc"] = supervised
        with tf.GradientTape() as tape:
            losses["weight_decay"] = self._step.weight_decay()
            share = self._step.replica_loss(losses["weight_decay"])
        decay = tape.gradient(share, self._model.trainable_variables, unconnected_gradients="zero")
        gradients = [gradient + extra for gradient, extra in zip(gradients, decay)]
        return self._step.update(gradients, losses, metrics, head_moments)
