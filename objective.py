"""Losses: NT-Xent (paper, Eq. 1) across replicas, and the supervised loss."""

from __future__ import annotations

import tensorflow as tf


def _self_logit(dtype):
    """Logit of an example with itself: far below every other, and finite in any precision, lest 0 * inf arise."""
    return max(-1e9, dtype.min / 2)


def add_supervised_loss(labels, logits):
    """Mean cross-entropy.

    Args:
      labels: [n, classes] probabilities (one-hot, as a rule).
      logits: [n, classes].

    Returns:
      Scalar, in nats.
    """
    labels = tf.cast(labels, logits.dtype)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))


def gather_replicas(tensor, strategy):
    """Concatenates `tensor` [n, ...] of all replicas along the first axis, in replica order.

    Differentiable: each replica's gradient is the sum of what all replicas ask of it. Call it in replica context.
    """
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return tensor
    return tf.distribute.get_replica_context().all_gather(tensor, axis=0)


def replica_offset(local_size, strategy):
    """Row at which this replica's `local_size` rows begin in what `gather_replicas` returns."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return 0
    # The id of a TPU replica is an unsigned 32-bit tensor, on which range and one_hot do not work.
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
    return replica * local_size


def add_contrastive_loss(hidden, hidden_norm=True, temperature=1.0, strategy=None):
    """NT-Xent, the normalised temperature-scaled cross-entropy (paper, Eq. 1).

    n = local batch, N = batch over all replicas, d = width of the projections. Row i of the first half and row i of
    the second are two views of one image; all other 2N - 2 rows are negatives. The scale is the original's: the mean
    over images of the *sum* of both directions, twice the mean over views of the paper's Algorithm 1; published
    learning rates are tuned to it.

    Args:
      hidden: [2n, d] projections, all first views before all second views.
      hidden_norm: l2-normalise the rows, so that similarities are cosines.
      temperature: above 0.
      strategy: the `tf.distribute.Strategy` whose replicas hold the batch, or None.

    Returns:
      loss: scalar, this replica's mean over its n images.
      logits_ab: [n, N] similarities of first to second views, divided by the temperature.
      labels: [n, 2N] one-hot; the positive of row i is column i + this replica's offset.
    """
    if hidden_norm:
        hidden = tf.math.l2_normalize(hidden, -1)
    view_a, view_b = tf.split(hidden, 2, 0)
    all_a, all_b = gather_replicas(view_a, strategy), gather_replicas(view_b, strategy)
    local, total = tf.shape(view_a)[0], tf.shape(all_a)[0]

    positives = tf.range(local) + replica_offset(local, strategy)
    labels = tf.one_hot(positives, total * 2, dtype=hidden.dtype)
    itself = tf.one_hot(positives, total, on_value=_self_logit(hidden.dtype), off_value=0.0, dtype=hidden.dtype)

    def similarity(left, right):
        return tf.matmul(left, right, transpose_b=True) / temperature

    logits_ab = similarity(view_a, all_b)
    logits_a = tf.concat([logits_ab, similarity(view_a, all_a) + itself], 1)
    logits_b = tf.concat([similarity(view_b, all_a), similarity(view_b, all_b) + itself], 1)
    cross_entropy = tf.nn.softmax_cross_entropy_with_logits
    loss = tf.reduce_mean(cross_entropy(labels, logits_a) + cross_entropy(labels, logits_b))
    return loss, logits_ab, labels


def replica_mean(tensor, strategy):
    """Mean of `tensor` over all replicas. Call it in replica context."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return tensor
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, tensor)


def merge_moments(means, variances, strategy):
    """Mean and biased variance [inputs] of equal parts of a batch, taken together, over all replicas.

    Args:
      means: of the parts, [inputs] or [parts, inputs].
      variances: biased, of the same shape.
      strategy: whose replicas hold the batch, or None. Call it in replica context.
    """
    means, variances = (tf.reshape(values, [-1, values.shape[-1]]) for values in (means, variances))
    mean = replica_mean(tf.reduce_mean(means, 0), strategy)
    # Variance within the parts plus variance between them: no difference of large squares.
    return mean, replica_mean(tf.reduce_mean(variances + tf.math.squared_difference(means, mean), 0), strategy)


def standardized_gradients(kernel_gradient, bias_gradient, mean, variance):
    """Turns the gradients of a linear layer into those of gradient descent on standardised inputs.

    With z = (h - mean) / s, the layer h W + b is z V + c, where V = s W and c = b + mean W. A step along the gradients
    of V and c, written in W and b, is what this returns; so the layer learns as fast as behind a batch norm without
    scale and offset, and yet is a plain linear layer.

    Args:
      kernel_gradient: [inputs, classes], of W.
      bias_gradient: [classes], of b.
      mean: [inputs], of h over the batch.
      variance: [inputs], of h over the batch.

    Returns:
      The two gradients to descend along instead.
    """
    # Inputs that hardly vary must not get huge steps.
    variance = variance + 1e-3 * tf.reduce_mean(variance) + 1e-12
    kernel = (kernel_gradient - mean[:, tf.newaxis] * bias_gradient) / variance[:, tf.newaxis]
    return kernel, bias_gradient - tf.linalg.matvec(kernel, mean, transpose_a=True)
