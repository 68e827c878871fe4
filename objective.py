"""Losses: NT-Xent (paper, Eq. 1) and the others of Table 2 across replicas, and the supervised loss."""

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


def add_multi_label_loss(labels, logits):
    """Mean over examples of the binary cross-entropies of all classes, one against the rest.

    Args:
      labels: [n, classes], 1: shown, 0: not, -1: left out.
      logits: [n, classes].

    Returns:
      Scalar, in nats: the sum over the classes, the mean over the examples.
    """
    losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(tf.equal(labels, 1), logits.dtype), logits)
    return tf.reduce_mean(tf.reduce_sum(tf.where(labels >= 0, losses, tf.zeros_like(losses)), 1))


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


def prepare_hidden(hidden, hidden_norm):
    """Projections as the loss takes them: float32 at least, normalised if wanted."""
    if hidden.dtype.size < 4:
        hidden = tf.cast(hidden, tf.float32)
    return tf.math.l2_normalize(hidden, -1) if hidden_norm else hidden


def add_contrastive_loss(hidden, hidden_norm=True, temperature=1.0, strategy=None):
    """NT-Xent, the normalised temperature-scaled cross-entropy (paper, Eq. 1).

    n = local batch, N = batch over all replicas, d = width of the projections. Row i of the first half and row i of
    the second are two views of one image; all other 2N - 2 rows are negatives. The scale is the original's: the mean
    over images of the *sum* of both directions, twice the mean over views of the paper's Algorithm 1; published
    learning rates are tuned to it.

    Args:
      hidden: [2n, d] projections, all first views before all second views; half precisions become float32.
      hidden_norm: l2-normalise the rows, so that similarities are cosines.
      temperature: above 0.
      strategy: the `tf.distribute.Strategy` whose replicas hold the batch, or None.

    Returns:
      loss: scalar, this replica's mean over its n images.
      logits_ab: [n, N] similarities of first to second views, divided by the temperature.
      labels: [n, 2N] one-hot; the positive of row i is column i + this replica's offset.
    """
    hidden = prepare_hidden(hidden, hidden_norm)
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


# ------------------------------------------------------------------------------------------ the losses of Table 2

# Each takes one view's similarities u^T v: positive [n], others [n, columns], and which of the others are negatives, a
# bool mask [n, columns]; it returns [n]. Where the paper writes one negative, the mean over all of them stands here.


def nt_xent(positive, others, negatives, temperature):
    """-u^T v+ / t + log(sum over v+ and all v- of exp(u^T v / t))."""
    logits = tf.where(negatives, others / temperature, _self_logit(others.dtype))
    wanted = positive / temperature
    return tf.reduce_logsumexp(tf.concat([wanted[:, tf.newaxis], logits], 1), 1) - wanted


def nt_logistic(positive, others, negatives, temperature):
    """-log sigma(u^T v+ / t) - mean over v- of log sigma(-u^T v- / t)."""
    return tf.nn.softplus(-positive / temperature) + _masked_mean(tf.nn.softplus(others / temperature), negatives)


def margin_triplet(positive, others, negatives, margin):
    """Mean over v- of max(u^T v- - u^T v+ + m, 0)."""
    return _masked_mean(tf.nn.relu(others - positive[:, tf.newaxis] + margin), negatives)


def _masked_mean(values, mask):
    """Mean of each row where `mask` holds; 0 where it holds nowhere."""
    total = tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)), 1)
    return total / tf.maximum(tf.reduce_sum(tf.cast(mask, values.dtype), 1), 1)


def semi_hard(positive, others, negatives, margin):
    """The closest of those negatives that are farther than the positive, but by less than the margin (paper, 5.1).

    Returns:
      mask as `negatives`, with one True a row, or none where there is no such negative.
    """
    distance = positive[:, tf.newaxis] - others
    suitable = negatives & (distance > 0) & (distance < margin)
    closest = tf.argmax(tf.where(suitable, others, others.dtype.min), 1)
    return suitable & tf.cast(tf.one_hot(closest, tf.shape(others)[1]), tf.bool)


def add_alternative_contrastive_loss(hidden, name, hidden_norm=True, temperature=1.0, margin=None, mine=False,
                                     both_views=False, strategy=None):
    """A loss of Table 2 with negatives from one view or both, semi-hard or all; in memory quadratic in the batch.

    Shapes and scale are those of `add_contrastive_loss`, which this is for nt_xent and `both_views`.

    Args:
      hidden: [2n, d] projections, all first views before all second views; half precisions become float32.
      name: nt_xent, nt_logistic or margin_triplet.
      hidden_norm: l2-normalise the rows.
      temperature: above 0; of the first two.
      margin: of margin_triplet and of `mine`.
      mine: take `semi_hard` negatives only.
      both_views: the negatives of a view are both views of all other images, rather than their other view only.
      strategy: the `tf.distribute.Strategy` whose replicas hold the batch, or None.

    Returns:
      loss: scalar, this replica's mean over its n images of the sum of both directions.
      logits_ab: [n, N] similarities of first to second views, divided by the temperature.
      labels: [n, N] one-hot; the positive of row i is column i + this replica's offset.
    """
    view_a, view_b = tf.split(prepare_hidden(hidden, hidden_norm), 2, 0)
    all_a, all_b = gather_replicas(view_a, strategy), gather_replicas(view_b, strategy)
    local, total = tf.shape(view_a)[0], tf.shape(all_a)[0]
    labels = tf.one_hot(tf.range(local) + replica_offset(local, strategy), total, dtype=view_a.dtype)
    negatives = tf.tile(labels == 0, [1, 2 if both_views else 1])

    def direction(view, others_of_other_view, others_of_same_view):
        columns = [others_of_other_view] + ([others_of_same_view] if both_views else [])
        similarities = tf.matmul(view, tf.concat(columns, 0), transpose_b=True)
        positive = tf.reduce_sum(similarities[:, :total] * labels, 1)
        chosen = semi_hard(positive, similarities, negatives, margin) if mine else negatives
        function, parameter = {"nt_xent": (nt_xent, temperature), "nt_logistic": (nt_logistic, temperature),
                               "margin_triplet": (margin_triplet, margin)}[name]
        return tf.reduce_mean(function(positive, similarities, chosen, parameter)), similarities[:, :total]

    loss_a, similarities_ab = direction(view_a, all_b, all_a)
    loss_b, _ = direction(view_b, all_a, all_b)
    return loss_a + loss_b, similarities_ab / temperature, labels


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


def embedding_std(hidden, strategy=None):
    """How far embeddings spread: 1 in all directions alike, 0 if they have collapsed into one point.

    Args:
      hidden: [n, d].
      strategy: whose replicas hold the batch, or None. Call it in replica context.

    Returns:
      float32: the standard deviation over the batch of the l2-normalised embeddings, mean over the columns, times
      sqrt(d); as in Chen and He 2020 (arXiv:2011.10566), section 4.1. At most 1.
    """
    unit = tf.math.l2_normalize(tf.cast(hidden, tf.float32), -1)
    variance = merge_moments(*tf.nn.moments(unit, [0]), strategy)[1]
    return tf.reduce_mean(tf.sqrt(variance)) * tf.sqrt(tf.cast(tf.shape(hidden)[1], tf.float32))


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
