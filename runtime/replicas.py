"""Communication between the replicas of a strategy. Call these functions in replica context."""

from __future__ import annotations

from typing import TypeVar

import tensorflow as tf

_T = TypeVar("_T")  # a tensor, or a nest of tensors


def gather(tensor: tf.Tensor, strategy: tf.distribute.Strategy | None) -> tf.Tensor:
    """Concatenates `tensor` [n, ...] of all replicas along the first axis, in replica order.

    Differentiable: the gradient of each replica's part is the sum of what all replicas pass back to it.
    """
    if not _communicates(strategy):
        return tensor
    return tf.distribute.get_replica_context().all_gather(tensor, axis=0)


def row_offset(local_rows: int | tf.Tensor, strategy: tf.distribute.Strategy | None) -> int | tf.Tensor:
    """Returns the row at which the `local_rows` rows of this replica start in what `gather` returns."""
    if not _communicates(strategy):
        return 0
    # The id of a TPU replica is an unsigned 32-bit tensor, on which range and one_hot do not work.
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32) * local_rows


def mean(values: _T, strategy: tf.distribute.Strategy | None) -> _T:
    """Returns the means of a tensor, or of a nest of tensors, over all replicas, by a single reduction."""
    if not _communicates(strategy):
        return values
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)


def mean_and_variance(means: tf.Tensor, variances: tf.Tensor, strategy: tf.distribute.Strategy | None
                      ) -> tuple[tf.Tensor, tf.Tensor]:
    """Combines the moments of equal parts of a batch into those of the batch of all replicas.

    Args:
      means: of the parts on this replica, [columns] or [parts, columns].
      variances: biased, of the same shape.
      strategy: whose replicas hold the batch, or None.

    Returns:
      Mean and biased variance, each [columns].
    """
    means, variances = (tf.reshape(values, [-1, values.shape[-1]]) for values in (means, variances))
    batch_mean = mean(tf.reduce_mean(means, 0), strategy)
    # Variance within the parts plus variance between them: no difference of large squares.
    deviations = tf.math.squared_difference(means, batch_mean)
    return batch_mean, mean(tf.reduce_mean(variances + deviations, 0), strategy)


def _communicates(strategy):
    return strategy is not None and strategy.num_replicas_in_sync > 1
