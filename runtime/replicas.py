"""Communication between the replicas of a strategy. Call these functions in replica context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

_T = TypeVar("_T")  # a tensor, or a nested structure of tensors


def count(strategy: tf.distribute.Strategy | None) -> int:
    """Returns the number of replicas, which is 1 without a strategy."""
    return 1 if strategy is None else strategy.num_replicas_in_sync


def are_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether each of several replicas is on a GPU."""
    return count(strategy) > 1 and all(
        "GPU" in device for device in strategy.extended.worker_devices
    )


def compiled_on_gpus(function: Callable) -> Callable:
    """Returns `function`, which XLA compiles if several GPUs share a batch.

    A whole step on several GPUs is not compiled by default, so each small operation would start a
    kernel that reads and writes its tensors in memory. XLA fuses its operations.
    `function` must not communicate. It takes and returns tensors, not variables; other arguments
    are constants of the compiled program.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (compiled if are_gpus(tf.distribute.get_strategy()) else function)(*args, **kwargs)

    return call


def gather(tensor: tf.Tensor, strategy: tf.distribute.Strategy | None) -> tf.Tensor:
    """Concatenates `tensor` [n, ...] from all replicas along the first axis, in replica order.

    The tensors of all replicas must have the same shape. The gradient with respect to a replica's
    tensor is the sum of the gradients from all replicas. The result is a sum over the replicas of
    tensors that contain zeros in all other rows: `ReplicaContext.all_gather` waits for the host to
    compare shapes, and XLA does not support it on several GPUs.
    """
    if count(strategy) == 1:
        return tensor
    context = tf.distribute.get_replica_context()
    is_own = tf.range(context.num_replicas_in_sync) == row_offset(1, strategy)
    rows = tf.where(
        tf.reshape(is_own, [-1] + [1] * tensor.shape.rank), tensor, tf.zeros_like(tensor)
    )
    return context.all_reduce("SUM", tf.reshape(rows, [-1, *tensor.shape[1:]]))


def gather_all(
    tensors: list[tf.Tensor], strategy: tf.distribute.Strategy | None
) -> list[tf.Tensor]:
    """Returns the result of `gather` for each of several tensors of the same shape, with a single all-reduce."""
    if count(strategy) == 1:
        return tensors
    return tf.unstack(gather(tf.stack(tensors, 1), strategy), axis=1)


def row_offset(
    local_rows: int | tf.Tensor, strategy: tf.distribute.Strategy | None
) -> int | tf.Tensor:
    """Returns the index of this replica's first row in the result of `gather` if each replica has `local_rows` rows."""
    if count(strategy) == 1:
        return 0
    # Cast, because a TPU replica's id is an unsigned 32-bit tensor, which range and one_hot do not
    # support.
    return (
        tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32) * local_rows
    )


def mean(values: _T, strategy: tf.distribute.Strategy | None) -> _T:
    """Averages a tensor, or a nested structure of tensors, over all replicas with a single all-reduce."""
    if count(strategy) == 1:
        return values
    return tf.distribute.get_replica_context().all_reduce("MEAN", values)


def mean_and_variance(
    means: tf.Tensor, variances: tf.Tensor, strategy: tf.distribute.Strategy | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the moments of the global batch from the moments of its equally sized parts.

    Args:
      means: means of the parts on this replica, [columns] or [parts, columns].
      variances: biased variances of the parts, with the same shape as `means`.
      strategy: strategy whose replicas hold the batch, or None.

    Returns:
      Mean and biased variance of the global batch, each [columns].
    """
    means, variances = (tf.reshape(values, [-1, values.shape[-1]]) for values in (means, variances))
    batch_mean = mean(tf.reduce_mean(means, 0), strategy)
    # Adding the variances within and between the parts avoids the cancellation in E[x^2] - E[x]^2.
    deviations = tf.math.squared_difference(means, batch_mean)
    return batch_mean, mean(tf.reduce_mean(variances + deviations, 0), strategy)
