"""Losses: NT-Xent (paper, Eq. 1), the supervised losses, and the other contrastive losses of Table 2.

Symbols: n is the number of images on this replica, N that of all replicas, d the width of the projections.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import tensorflow as tf

from runtime import replicas


def add_contrastive_loss(
    hidden: tf.Tensor, hidden_norm: bool = True, temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns NT-Xent, the normalized temperature-scaled cross-entropy (paper, Eq. 1).

    Row i of the first half of `hidden` and row i of the second half are two views of one image; the other 2N - 2 rows
    of all replicas are negatives. With similarities s of the views u, v and temperature t:

        loss(u, v) = -log( exp(s(u, v) / t) / sum over all rows w except u of exp(s(u, w) / t) )

    The scale is that of the original: the mean over images of the *sum* of both directions, which is twice the mean
    over views of the paper's Algorithm 1. Published learning rates are tuned to it.

    Args:
      hidden: [2n, d] projections, all first views before all second views. Half precision is cast to float32.
      hidden_norm: l2-normalize the rows, so that similarities are cosines.
      temperature: t, above 0.
      strategy: the strategy whose replicas share the batch, or None. Call it in replica context.

    Returns:
      loss: scalar, the mean over the n images of this replica.
      logits_ab: [n, N] similarities of first to second views, divided by the temperature.
      labels: [n, 2N] one-hot; the positive of row i is column i plus the row offset of this replica.
    """
    view_a, view_b = tf.split(prepare_hidden(hidden, hidden_norm), 2, 0)
    all_a, all_b = replicas.gather(view_a, strategy), replicas.gather(view_b, strategy)
    n, total = tf.shape(view_a)[0], tf.shape(all_a)[0]
    positives = tf.range(n) + replicas.row_offset(n, strategy)
    labels = tf.one_hot(positives, 2 * total, dtype=view_a.dtype)
    mask_of_self = tf.one_hot(positives, total, on_value=_masked_logit(view_a.dtype), off_value=0.0, dtype=view_a.dtype)

    logits_aa = tf.matmul(view_a, all_a, transpose_b=True) / temperature + mask_of_self
    logits_bb = tf.matmul(view_b, all_b, transpose_b=True) / temperature + mask_of_self
    logits_ab = tf.matmul(view_a, all_b, transpose_b=True) / temperature
    logits_ba = tf.matmul(view_b, all_a, transpose_b=True) / temperature

    loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
    loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
    return tf.reduce_mean(loss_a + loss_b), logits_ab, labels


def prepare_hidden(hidden: tf.Tensor, hidden_norm: bool) -> tf.Tensor:
    """Returns projections [2n, d] in float32 at least, with rows of length 1 if `hidden_norm` is set."""
    if hidden.dtype.size < 4:
        hidden = tf.cast(hidden, tf.float32)
    return tf.math.l2_normalize(hidden, -1) if hidden_norm else hidden


def _masked_logit(dtype):
    """Returns a logit far below every other, but finite, so that 0 * inf does not occur in any precision."""
    return max(-1e9, dtype.min / 2)


def add_supervised_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean cross-entropy.

    Args:
      labels: [n, classes] probabilities, usually one-hot.
      logits: [n, classes].

    Returns:
      Scalar, in nats.
    """
    labels = tf.cast(labels, logits.dtype)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))


def add_multi_label_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the binary cross-entropy of each class against the rest.

    Args:
      labels: [n, classes]; 1: present, 0: absent, -1: unknown, which does not count.
      logits: [n, classes].

    Returns:
      Scalar, in nats: the sum over the classes, the mean over the examples.
    """
    losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(tf.equal(labels, 1), logits.dtype), logits)
    return tf.reduce_mean(tf.reduce_sum(tf.where(labels >= 0, losses, tf.zeros_like(losses)), 1))


# ------------------------------------------------------------------------------------- the other losses of Table 2

# Each takes the similarities u^T v of the n views of one kind: to their positives [n], to other views [n, columns], and
# a bool mask [n, columns] of those that are negatives; it returns the losses [n]. Where the paper writes one negative,
# these take the mean over all negatives.


def nt_xent(positive: tf.Tensor, others: tf.Tensor, negatives: tf.Tensor, temperature: float) -> tf.Tensor:
    """Returns -u^T v+ / t + log(sum over v+ and all v- of exp(u^T v / t))."""
    positive_logit = positive / temperature
    logits = tf.where(negatives, others / temperature, _masked_logit(others.dtype))
    return tf.reduce_logsumexp(tf.concat([positive_logit[:, tf.newaxis], logits], 1), 1) - positive_logit


def nt_logistic(positive: tf.Tensor, others: tf.Tensor, negatives: tf.Tensor, temperature: float) -> tf.Tensor:
    """Returns -log sigma(u^T v+ / t) - mean over v- of log sigma(-u^T v- / t)."""
    return tf.nn.softplus(-positive / temperature) + _masked_mean(tf.nn.softplus(others / temperature), negatives)


def margin_triplet(positive: tf.Tensor, others: tf.Tensor, negatives: tf.Tensor, margin: float) -> tf.Tensor:
    """Returns the mean over v- of max(u^T v- - u^T v+ + m, 0)."""
    return _masked_mean(tf.nn.relu(others - positive[:, tf.newaxis] + margin), negatives)


def _masked_mean(values, mask):
    """Returns the mean of each row where `mask` is True, 0 for rows without True."""
    total = tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)), 1)
    return total / tf.maximum(tf.reduce_sum(tf.cast(mask, values.dtype), 1), 1)


def semi_hard_negatives(positive: tf.Tensor, others: tf.Tensor, negatives: tf.Tensor, margin: float) -> tf.Tensor:
    """Returns the closest negative that is farther than the positive, but by less than the margin (paper, 5.1).

    Returns:
      Mask like `negatives`, with one True per row, or none in rows without such a negative.
    """
    distance = positive[:, tf.newaxis] - others
    suitable = negatives & (distance > 0) & (distance < margin)
    closest = tf.argmax(tf.where(suitable, others, others.dtype.min), 1)
    return suitable & tf.cast(tf.one_hot(closest, tf.shape(others)[1]), tf.bool)


def add_alternative_contrastive_loss(
    hidden: tf.Tensor, name: str, hidden_norm: bool = True, temperature: float = 1.0, margin: float | None = None,
    semi_hard: bool = False, cross_view_only: bool = False, strategy: tf.distribute.Strategy | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns a loss of Table 2. Memory is quadratic in the batch size.

    With nt_xent and its default arguments it equals `add_contrastive_loss`, whose shapes and scale it shares.

    Args:
      hidden: [2n, d] projections, all first views before all second views. Half precision is cast to float32.
      name: nt_xent, nt_logistic or margin_triplet.
      hidden_norm: l2-normalize the rows.
      temperature: above 0; used by nt_xent and nt_logistic.
      margin: used by margin_triplet and by `semi_hard`.
      semi_hard: use `semi_hard_negatives` only.
      cross_view_only: the negatives of a view are the other views of all other images, not both of their views.
      strategy: the strategy whose replicas share the batch, or None. Call it in replica context.

    Returns:
      loss: scalar, the mean over the n images of this replica of the sum of both directions.
      logits_ab: [n, N] similarities of first to second views, divided by the temperature.
      labels: [n, N] one-hot; the positive of row i is column i plus the row offset of this replica.
    """
    view_a, view_b = tf.split(prepare_hidden(hidden, hidden_norm), 2, 0)
    all_a, all_b = replicas.gather(view_a, strategy), replicas.gather(view_b, strategy)
    n, total = tf.shape(view_a)[0], tf.shape(all_a)[0]
    labels = tf.one_hot(tf.range(n) + replicas.row_offset(n, strategy), total, dtype=view_a.dtype)
    negatives = tf.tile(labels == 0, [1, 1 if cross_view_only else 2])
    function, parameter = {"nt_xent": (nt_xent, temperature), "nt_logistic": (nt_logistic, temperature),
                           "margin_triplet": (margin_triplet, margin)}[name]

    def direction(view, other_views, same_views):
        columns = other_views if cross_view_only else tf.concat([other_views, same_views], 0)
        similarities = tf.matmul(view, columns, transpose_b=True)
        positive = tf.reduce_sum(similarities[:, :total] * labels, 1)
        mask = semi_hard_negatives(positive, similarities, negatives, margin) if semi_hard else negatives
        return tf.reduce_mean(function(positive, similarities, mask, parameter)), similarities[:, :total]

    loss_a, similarities_ab = direction(view_a, all_b, all_a)
    loss_b, _ = direction(view_b, all_a, all_b)
    return loss_a + loss_b, similarities_ab / temperature, labels
