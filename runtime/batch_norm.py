"""Batch normalization over the batch of one replica or of all replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from runtime import replicas

EPSILON = 1e-5


@contextlib.contextmanager
def without_statistics_updates(model: tf.Module) -> Iterator[None]:
    """Returns a context in which batch norm uses batch statistics but does not update its moving statistics.

    The context affects functions that are traced inside it. Enter it in cross-replica context,
    since replicas are traced one after another.
    """
    layers = [layer for layer in model.submodules if isinstance(layer, BatchNorm)]
    for layer in layers:
        layer.updates_statistics = False
    try:
        yield
    finally:
        for layer in layers:
            layer.updates_statistics = True


class BatchNorm(keras.layers.Layer):
    """Batch normalization over all axes except the last, per replica or over the global batch.

    Unlike in Keras's fused batch norm, the moving variance averages biased batch variances, so
    results do not depend on the number of replicas. A layer with `trainable=False` uses its moving
    statistics without updating them.
    """

    def __init__(
        self,
        momentum: float = 0.9,
        epsilon: float = EPSILON,
        center: bool = True,
        gamma_initializer: str = "ones",
        across_replicas: bool = True,
        **kwargs: Any,
    ):
        """Creates the layer.

        Args:
          momentum: decay of the moving statistics, in [0, 1].
          epsilon: constant that is added to the variance.
          center: whether to add an offset beta.
          gamma_initializer: "ones" or "zeros".
          across_replicas: whether training uses global batch statistics.
          **kwargs: arguments for the base class.
        """
        super().__init__(**kwargs)
        self.momentum = momentum
        self.epsilon = epsilon
        self.center = center
        self.gamma_initializer = gamma_initializer
        self.across_replicas = across_replicas
        self.updates_statistics = True

    def build(self, input_shape: tf.TensorShape) -> None:
        """Creates gamma, beta (with `center`), moving_mean and moving_variance, each [channels]."""
        # With mixed precision, the statistics and the scale remain in float32.
        add = functools.partial(
            self.add_weight, shape=input_shape[-1:], experimental_autocast=False
        )
        moving = functools.partial(
            add,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        self.gamma = add("gamma", initializer=self.gamma_initializer)
        self.beta = add("beta", initializer="zeros") if self.center else None
        self.moving_mean = moving("moving_mean", initializer="zeros")
        self.moving_variance = moving("moving_variance", initializer="ones")
        super().build(input_shape)

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, relu: bool = False
    ) -> tf.Tensor:
        """Normalizes `inputs` [..., channels], then applies ReLU if `relu` is True.

        In training, also updates the moving statistics.
        """
        beta = tf.zeros_like(self.gamma) if self.beta is None else self.beta
        uses_batch = training and self.trainable
        context = tf.distribute.get_replica_context()
        is_shared = self.across_replicas and context and context.num_replicas_in_sync > 1
        if uses_batch and is_shared:
            gamma, beta = map(tf.convert_to_tensor, (self.gamma, beta))
            outputs, *moments = synchronized_batch_norm(inputs, gamma, beta, self.epsilon, relu)
        else:
            outputs, *moments = self._call_locally(inputs, beta, uses_batch)
            outputs = tf.nn.relu(outputs) if relu else outputs
        if uses_batch and self.updates_statistics:
            variables = self.moving_mean, self.moving_variance
            values = [tf.convert_to_tensor(variable) for variable in variables]
            moments = [tf.stop_gradient(moment) for moment in moments]
            for variable, change in zip(variables, _changes(values, moments, self.momentum)):
                variable.assign_sub(change)
        return outputs

    def _call_locally(
        self, inputs: tf.Tensor, beta: tf.Tensor, uses_batch: bool
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the outputs, and the mean and the variance of this replica's batch or the moving ones."""
        if uses_batch and inputs.shape.rank == 4 and inputs.dtype != tf.float64:
            return self._fused(inputs, beta)
        moments = (
            _moments(tf.cast(inputs, self.gamma.dtype))
            if uses_batch
            else (self.moving_mean, self.moving_variance)
        )
        scale = self.gamma * tf.math.rsqrt(moments[1] + self.epsilon)
        return _scale_and_shift(inputs, scale, beta - moments[0] * scale), *moments

    def _fused(self, inputs: tf.Tensor, beta: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Runs TensorFlow's fused kernel and returns the outputs, the mean and the biased variance."""
        # The wrapper `tf.compat.v1.nn.fused_batch_norm` silently increases small values of epsilon.
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=self.gamma,
            offset=beta,
            mean=[],
            variance=[],
            epsilon=self.epsilon,
            is_training=True,
        )
        count = tf.cast(tf.size(inputs) / tf.size(mean), variance.dtype)
        # The kernel returns the unbiased variance.
        return outputs, mean, variance * tf.maximum(count - 1, 1) / count


def _moments(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the biased variance over all axes except the last."""
    return tf.nn.moments(inputs, list(range(inputs.shape.rank - 1)))


def _scale_and_shift(inputs: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.cast(inputs, scale.dtype) * scale + shift, inputs.dtype)


def synchronized_batch_norm(
    inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, relu: bool = False
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes with the statistics of the global batch. Communicates once, and once for the gradient.

    Let x be the inputs of all R replicas with n values per channel each, m_r and v_r the mean and the
    biased variance of replica r, and g the gradient of the loss with respect to the outputs y before
    ReLU. Then

        mean = sum_r m_r / R,  variance = sum_r (v_r + (m_r - mean)^2) / R  (Chan et al. 1979),
        y = gamma u + beta  with  u = (x - mean) s,  s = 1 / sqrt(variance + epsilon).

    Each x changes all outputs through mean and variance. With dmean / dx = 1 / (R n) and
    dvariance / dx = 2 (x - mean) / (R n), the gradient with respect to x is

        gamma s (g - sum g / (R n) - u sum(g u) / (R n)),

    where the sums are over all replicas. The gradients with respect to gamma and beta are this
    replica's sums of g u and g, because the optimizer adds gradients over replicas. Only `inputs` in
    its own dtype is kept for the gradient. Call this function in replica context.

    Args:
      inputs: [..., channels]; the same shape on all replicas.
      gamma, beta: [channels].
      epsilon: see `BatchNorm`.
      relu: whether to apply ReLU to the outputs.

    Returns:
      The outputs, with shape and dtype of `inputs`, and the mean and the variance, [channels], whose
      gradients are not propagated.
    """

    @tf.custom_gradient
    def normalize(inputs, gamma, beta):
        # Otherwise, the parts would return intermediate results for their own gradients.
        inputs, gamma, beta = map(tf.stop_gradient, (inputs, gamma, beta))
        strategy, context = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
        moments = replicas.gather(_local_moments(inputs, gamma.dtype), strategy)
        outputs, mean, variance = _normalize(inputs, gamma, beta, moments, epsilon, relu)

        def differentiate(gradient, *_):
            values = inputs, gamma, beta, mean, variance, epsilon, relu
            sums, sum_gradient, sum_product = _gradient_sums(gradient, *values)
            sums, num = context.all_reduce("SUM", sums), context.num_replicas_in_sync
            return _input_gradient(gradient, sums, num, *values), sum_product, sum_gradient

        return (outputs, mean, variance), differentiate

    return normalize(inputs, gamma, beta)


@replicas.compiled_on_gpus
def _changes(values: list[tf.Tensor], moments: list[tf.Tensor], momentum: float) -> list[tf.Tensor]:
    """Returns what to subtract from the moving statistics."""
    return [(value - moment) * (1.0 - momentum) for value, moment in zip(values, moments)]


# The following functions are the parts of `synchronized_batch_norm` between communication.


@replicas.compiled_on_gpus
def _local_moments(inputs: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns m_r and v_r, [1, 2, channels]."""
    return tf.stack(_moments(tf.cast(inputs, dtype)))[tf.newaxis]


@replicas.compiled_on_gpus
def _normalize(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moments: tf.Tensor,
    epsilon: float,
    relu: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns y, with ReLU if requested, the mean and the variance. `moments` is [R, 2, channels]."""
    means, variances = tf.unstack(moments, axis=1)
    mean = tf.reduce_mean(means, 0)
    variance = tf.reduce_mean(variances + tf.math.squared_difference(means, mean), 0)
    scale = gamma * tf.math.rsqrt(variance + epsilon)
    outputs = _scale_and_shift(inputs, scale, beta - mean * scale)
    return tf.nn.relu(outputs) if relu else outputs, mean, variance


def _of_outputs(
    gradient: tf.Tensor,
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
    relu: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns g, u and gamma s."""
    gradient, inputs = (tf.cast(values, gamma.dtype) for values in (gradient, inputs))
    inverse = tf.math.rsqrt(variance + epsilon)
    scale = gamma * inverse
    if relu:
        outputs = _scale_and_shift(inputs, scale, beta - mean * scale)
        gradient = tf.where(outputs > 0, gradient, tf.zeros_like(gradient))
    return gradient, (inputs - mean) * inverse, scale


@replicas.compiled_on_gpus
def _gradient_sums(gradient: tf.Tensor, *values: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns this replica's sums of g and of g u, as one tensor [2, channels] and as two tensors."""
    gradient, normalized, _ = _of_outputs(gradient, *values)
    axes = list(range(gradient.shape.rank - 1))
    sums = [tf.reduce_sum(each, axes) for each in (gradient, gradient * normalized)]
    return tf.stack(sums), *sums


@replicas.compiled_on_gpus
def _input_gradient(
    gradient: tf.Tensor, sums: tf.Tensor, num_replicas: int, inputs: tf.Tensor, *values: Any
) -> tf.Tensor:
    """Returns the gradient with respect to x. `sums` are the sums of g and of g u over all replicas."""
    gradient, normalized, scale = _of_outputs(gradient, inputs, *values)
    count = tf.cast(tf.size(inputs) / tf.size(scale), scale.dtype) * num_replicas
    mean_gradient, mean_product = tf.unstack(sums / count)
    return tf.cast(scale * (gradient - mean_gradient - normalized * mean_product), inputs.dtype)
