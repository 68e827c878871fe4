"""Micro-batch training with the exact gradient of the full-batch loss (Gao et al., arXiv:2101.06983).

The contrastive loss L compares all images in a batch, so it is not a sum of losses of
micro-batches. Its gradient, however, is a sum over micro-batches. With the outputs z_i of the
network for micro-batch i (representations and projections) and the weights w,

    dL / dw = sum over i of (dL / dz_i) (dz_i / dw).

The first pass computes all z_i without storing activations, and then all dL / dz_i. The second pass
recomputes z_i and differentiates <z_i, dL / dz_i>, treating dL / dz_i as a constant. Activations
are stored for only one micro-batch at a time, but every output is computed twice. Both passes use
the same views and each micro-batch's own batch statistics. Only the second pass updates the moving
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from runtime import batch_norm

_MAX_SCALARS = 64


class ScalarSum:
    """Sum of nested dicts of scalars in a traced loop.

    The state of a loop must have a fixed structure before the loop is traced, but the names of the
    scalars are known only afterwards. The state is therefore a vector with spare elements.
    """

    def __init__(self, dtype: tf.DType):
        """Creates the sum. `dtype` is the type of the vector."""
        self._dtype, self._structure = dtype, None

    def zeros(self) -> tf.Tensor:
        """Returns the vector before the loop."""
        return tf.zeros([_MAX_SCALARS], self._dtype)

    def pack(self, scalars: Any) -> tf.Tensor:
        """Returns the vector of the scalars, and remembers their structure."""
        self._structure = tf.nest.map_structure(lambda _: None, scalars)
        values = [tf.cast(value, self._dtype) for value in tf.nest.flatten(scalars)]
        return tf.stack(values + [tf.zeros([], self._dtype)] * (_MAX_SCALARS - len(values)))

    def unpack(self, values: list) -> Any:
        """Returns the elements of the vector, `values`, in the structure that `pack` received."""
        count = len(tf.nest.flatten(self._structure))
        return tf.nest.pack_sequence_as(self._structure, values[:count])


class MicroBatches:
    """Training step on a batch that is divided into micro-batches.

    Call the step in cross-replica context, inside a `tf.function`. The methods, except for the loop,
    run in replica context.
    """

    def __init__(self, step: Any):
        """Creates the step, given a `train.TrainStep`."""
        self._step, config = step, step.config
        self._count = config.train_batch_size // config.micro_batch_size
        self._rows = step.rows // self._count  # number of images in a micro-batch on each replica
        self._scalar_sum = ScalarSum(keras.backend.floatx())

    # The function needs no conversion, and AutoGraph is slow.
    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: tuple) -> Any:
        """Runs the step.

        Args:
          batch: distributed batch: the arguments of `TrainStep.__call__`.

        Returns:
          The per-replica result of `TrainStep.__call__`.
        """
        gradients, terms, metrics = (), {}, {}
        if self._step.config.pretraining:
            with batch_norm.without_statistics_updates(self._step.model):
                outputs = self._loop(self._embed, batch, (), self._run(self._zero_outputs, batch))
            gradients, terms, metrics = self._run(self._differentiate, batch, outputs)
        sums = self._loop(self._add_gradients, batch, gradients, self._run(self._zero_sums))
        return self._run(self._update, sums, terms, metrics)

    def _run(self, function: Callable, *args: Any) -> Any:
        return self._step.strategy.run(self._step.compiled(function), args)

    def _loop(self, function: Callable, batch: tuple, constants: Any, state: Any) -> Any:
        """Computes `state = function(batch, constants, index, state)` for each micro-batch in turn."""

        def body(index, state):
            return index + 1, self._run(function, batch, constants, index, state)

        # The loop runs outside replica context, since replicas cannot communicate within a loop.
        return tf.while_loop(
            lambda index, _: index < self._count,
            body,
            (tf.constant(0), state),
            parallel_iterations=1,
        )[1]

    def _views(self, batch: tuple, index: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the views and the labels of one micro-batch."""

        # XLA compiles a slice separately for each position, but `tf.gather` only once.
        def select(tensor):
            return tf.gather(
                tf.reshape(tensor, [self._count, self._rows, *tensor.shape[1:]]), index
            )

        images, labels, *seeds = tf.nest.map_structure(select, batch)
        return self._step.views(images, *seeds, first_row=index * self._rows), labels

    def _zero_outputs(self, batch: tuple) -> tuple[tf.Tensor, ...]:
        """Returns zeros [micro-batches, views * rows, columns] for h and z."""
        model = self._step.model
        columns = model.resnet_model.num_features, model.projection_dim
        shape = self._count, len(batch[0]) * self._rows
        return tuple(tf.zeros([*shape, size], keras.backend.floatx()) for size in columns)

    def _embed(self, batch: tuple, _: tuple, index: tf.Tensor, outputs: tuple) -> tuple:
        """Writes h and z of one micro-batch to `outputs` (first pass)."""
        h, z, _, _ = self._step.per_image(*self._views(batch, index))
        return tuple(
            tf.tensor_scatter_nd_update(all_rows, [[index]], [new])
            for all_rows, new in zip(outputs, (h, z))
        )

    def _differentiate(self, batch: tuple, outputs: tuple) -> tuple:
        """Returns the gradients with respect to h and z, and the terms and metrics of the batch."""

        def in_batch_order(tensor):
            by_view = tf.reshape(tensor, [self._count, -1, self._rows, tensor.shape[-1]])
            return tf.reshape(tf.transpose(by_view, [1, 0, 2, 3]), [-1, tensor.shape[-1]])

        with tf.GradientTape() as tape:
            tape.watch(outputs)
            terms, metrics = self._step.over_batch(*map(in_batch_order, outputs), batch[1])
            loss = self._step.replica_loss(terms)
        return tape.gradient(loss, outputs, unconnected_gradients="zero"), terms, metrics

    def _zero_sums(self) -> tuple:
        variables = self._step.model.trainable_variables
        return [tf.zeros_like(variable) for variable in variables], self._scalar_sum.zeros()

    def _add_gradients(
        self, batch: tuple, output_gradients: tuple, index: tf.Tensor, sums: tuple
    ) -> tuple:
        """Adds one micro-batch's gradients, terms and metrics to `sums` (second pass)."""
        step, (images, labels) = self._step, self._views(batch, index)
        with tf.GradientTape() as tape:
            h, z, *scalars = step.per_image(images, labels)
            scalars = tf.nest.map_structure(lambda value: value / self._count, scalars)
            loss = tf.cast(step.replica_loss(scalars[0]), z.dtype)
            for gradient, output in zip(output_gradients, (h, z)):
                loss += tf.reduce_sum(tf.gather(gradient, index) * output)
        variables = step.model.trainable_variables
        gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
        new = gradients, self._scalar_sum.pack(scalars)
        # Not `tf.add`, which Grappler merges with sums in the gradients. In a nested loop, merged
        # sums fail on CPUs if the step needs more than 200 MB (TensorFlow 2.21).
        return tf.nest.map_structure(lambda *pair: tf.reduce_sum(tf.stack(pair), 0), sums, new)

    def _update(self, sums: tuple, batch_terms: dict, batch_metrics: dict) -> dict:
        gradients, vector = sums
        terms, metrics = self._scalar_sum.unpack(tf.unstack(vector))
        return self._step.update(gradients, {**batch_terms, **terms}, {**batch_metrics, **metrics})
