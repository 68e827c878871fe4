"""Losses: NT-Xent (paper, Eq. 1), the supervised losses, and the other contrastive losses in Table 2.

Notation: n is the number of images on this replica, N is the number across all replicas, and d is
the dimension of the projections. The functions that return losses have the original's names, `add_*`.
"""

from __future__ import annotations

import tensorflow as tf

from runtime import replicas


def add_contrastive_loss(
    hidden: tf.Tensor,
    hidden_norm: bool = True,
    temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the NT-Xent loss, the normalized temperature-scaled cross-entropy (paper, Eq. 1).

    Row i of each half of `hidden` is the projection of one view of image i. These two rows are a
    positive pair, and the other 2N - 2 rows across all replicas are their negatives. The loss for a
    positive pair (i, j) is

        l(i, j) = -log( exp(sim(z_i, z_j) / tau) / sum over k != i of exp(sim(z_i, z_k) / tau) ),

    where tau is the temperature. As in the original, the loss for an image is the *sum* l(i, j) +
    l(j, i), so the result is twice the mean in the paper's Algorithm 1. Published learning rates
    are tuned for this scale.

    Training uses this function by default, and `large_batch.blocked_nt_xent` if the similarity
    matrix is large; `simclr.nt_xent` selects the function.

    Args:
      hidden: [2n, d] projections z, with all first views before all second views. Half-precision
        input is cast to float32.
      hidden_norm: if True, l2-normalizes the rows, which makes the similarities cosine
        similarities.
      temperature: tau > 0.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.

    Returns:
      loss: scalar, the mean over this replica's n images.
      logits_ab: [n, N] similarities between first and second views, divided by the temperature.
      labels: [n, 2N] one-hot; the positive for row i is in column i + r, where r is this replica's
        row offset.
    """
    return compare_views(*_gather_views(hidden, hidden_norm, strategy), temperature=temperature)


def _gather_views(
    hidden: tf.Tensor, hidden_norm: bool, strategy: tf.distribute.Strategy | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Prepares projections and gathers those of all replicas. Returns the first arguments of `compare_views`."""
    z_a, z_b = tf.split(prepare_projections(hidden, hidden_norm), 2, 0)
    n = tf.shape(z_a)[0]
    positives = tf.range(n) + replicas.row_offset(n, strategy)
    return z_a, z_b, *replicas.gather_all([z_a, z_b], strategy), positives


def compare_views(
    z_a: tf.Tensor,
    z_b: tf.Tensor,
    all_z_a: tf.Tensor,
    all_z_b: tf.Tensor,
    positives: tf.Tensor,
    temperature: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the NT-Xent loss of n images among N; see `add_contrastive_loss`.

    Args:
      z_a, z_b: [n, d] projections of the first and the second views.
      all_z_a, all_z_b: [N, d] projections of all replicas.
      positives: int32 [n], the row of each image among the N images.
      temperature: tau > 0.
    """
    total = tf.shape(all_z_a)[0]
    labels = tf.one_hot(positives, 2 * total, dtype=z_a.dtype)
    self_mask = tf.one_hot(
        positives, total, on_value=_masked_logit(z_a.dtype), off_value=0.0, dtype=z_a.dtype
    )

    logits_aa = tf.matmul(z_a, all_z_a, transpose_b=True) / temperature + self_mask
    logits_bb = tf.matmul(z_b, all_z_b, transpose_b=True) / temperature + self_mask
    logits_ab = tf.matmul(z_a, all_z_b, transpose_b=True) / temperature
    logits_ba = tf.matmul(z_b, all_z_a, transpose_b=True) / temperature

    loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
    loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
    return tf.reduce_mean(loss_a + loss_b), logits_ab, labels


def prepare_projections(z: tf.Tensor, hidden_norm: bool) -> tf.Tensor:
    """Casts half-precision projections [2n, d] to float32, and l2-normalizes them if `hidden_norm` is set."""
    if z.dtype.size < 4:
        z = tf.cast(z, tf.float32)
    return tf.math.l2_normalize(z, -1) if hidden_norm else z


def _masked_logit(dtype: tf.DType) -> float:
    """Returns a finite logit far below all others. With -inf, gradients would contain 0 * inf = NaN."""
    return max(-1e9, dtype.min / 2)


def add_supervised_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean softmax cross-entropy.

    Args:
      labels: [n, classes] probabilities, usually one-hot. A row of zeros means that there is no
        label; the loss of this row is 0.
      logits: [n, classes].

    Returns:
      Scalar: the mean over the n rows, in nats.
    """
    labels = tf.cast(labels, logits.dtype)
    losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
    # The gradient of this operation assumes that each row of labels sums to 1.
    has_label = tf.reduce_any(labels > 0, -1)
    return tf.reduce_mean(tf.where(has_label, losses, tf.zeros_like(losses)))


def add_distillation_loss(
    teacher_logits: tf.Tensor,
    logits: tf.Tensor,
    labels: tf.Tensor,
    temperature: float = 1.0,
    alpha: float = 1.0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the two terms of the distillation loss (Chen et al. 2020, arXiv:2006.10029, Eqs. 2 and 3).

    P(c | x; tau) is the softmax of the logits divided by the temperature tau. For an image x, the
    loss is the sum of

        -alpha * sum over classes c of P_teacher(c | x; tau) log P_student(c | x; tau)  and
        -(1 - alpha) * log P_student(y | x; 1), if x has a label y.

    As in the paper, but unlike in the original's notebook, there is no factor tau^2.

    Args:
      teacher_logits: [n, classes], which are treated as constants.
      logits: [n, classes] of the student.
      labels: int [n]; -1 for images without a label.
      temperature: tau > 0.
      alpha: weight in [0, 1].

    Returns:
      Two scalars in nats, means over the n images. The second is 0 if no image has a label.
    """
    targets = tf.nn.softmax(tf.cast(tf.stop_gradient(teacher_logits), logits.dtype) / temperature)
    soft = tf.nn.softmax_cross_entropy_with_logits(targets, logits / temperature)
    hard = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    hard = tf.where(labels >= 0, hard, tf.zeros_like(hard))
    return alpha * tf.reduce_mean(soft), (1 - alpha) * tf.reduce_mean(hard)


def add_multi_label_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the one-vs-rest binary cross-entropy, summed over the classes.

    Args:
      labels: [n, classes] with values 1 (present), 0 (absent) and -1 (unknown; ignored).
      logits: [n, classes].

    Returns:
      Scalar: the mean over the examples, in nats.
    """
    losses = tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(tf.equal(labels, 1), logits.dtype), logits
    )
    return tf.reduce_mean(tf.reduce_sum(tf.where(labels >= 0, losses, tf.zeros_like(losses)), 1))


# --------------------------------------------------------------------------- the losses of Table 2

# For n anchor views u, each function takes the similarities [n] to their positives v+, the
# similarities [n, columns] to candidate negatives v-, and a bool mask [n, columns] that selects the
# negatives among the candidates. The functions return the losses [n]. Where Table 2 uses a single
# negative, the functions average over all negatives.


def nt_xent(
    positive: tf.Tensor, similarities: tf.Tensor, negatives: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Returns -u^T v+ / tau + log(sum over v in {v+, v-} of exp(u^T v / tau)), with temperature tau."""
    positive_logit = positive / temperature
    logits = tf.where(negatives, similarities / temperature, _masked_logit(similarities.dtype))
    return (
        tf.reduce_logsumexp(tf.concat([positive_logit[:, tf.newaxis], logits], 1), 1)
        - positive_logit
    )


def nt_logistic(
    positive: tf.Tensor, similarities: tf.Tensor, negatives: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Returns -log sigma(u^T v+ / tau) - mean over v- of log sigma(-u^T v- / tau), with temperature tau."""
    return tf.nn.softplus(-positive / temperature) + _masked_mean(
        tf.nn.softplus(similarities / temperature), negatives
    )


def margin_triplet(
    positive: tf.Tensor, similarities: tf.Tensor, negatives: tf.Tensor, margin: float
) -> tf.Tensor:
    """Returns the mean over v- of max(u^T v- - u^T v+ + m, 0), with margin m."""
    return _masked_mean(tf.nn.relu(similarities - positive[:, tf.newaxis] + margin), negatives)


def _masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns each row's mean over the entries selected by `mask`, or 0 for rows without selected entries."""
    total = tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)), 1)
    return total / tf.maximum(tf.reduce_sum(tf.cast(mask, values.dtype), 1), 1)


def semi_hard_negatives(
    positive: tf.Tensor, similarities: tf.Tensor, negatives: tf.Tensor, margin: float
) -> tf.Tensor:
    """Selects the hardest semi-hard negative in each row (paper, 5.1).

    Semi-hard negatives are farther from the anchor than the positive, but by less than the margin.

    Returns:
      Bool mask with the shape of `negatives` and at most one True per row.
    """
    distance = positive[:, tf.newaxis] - similarities
    semi_hard = negatives & (distance > 0) & (distance < margin)
    hardest = tf.argmax(tf.where(semi_hard, similarities, similarities.dtype.min), 1)
    return semi_hard & tf.cast(tf.one_hot(hardest, tf.shape(similarities)[1]), tf.bool)


def add_alternative_contrastive_loss(
    hidden: tf.Tensor,
    name: str,
    hidden_norm: bool = True,
    temperature: float = 1.0,
    margin: float | None = None,
    semi_hard: bool = False,
    cross_view_only: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns one of the losses in Table 2. Memory use is quadratic in the batch size.

    The loss is scaled as in `add_contrastive_loss`. With name="nt_xent" and default settings, both
    functions return the same loss.

    Args:
      hidden: [2n, d] projections z, with all first views before all second views. Half-precision
        input is cast to float32.
      name: nt_xent, nt_logistic or margin_triplet.
      hidden_norm: if True, l2-normalizes the rows.
      temperature: > 0; used by nt_xent and nt_logistic.
      margin: used by margin_triplet and by `semi_hard`.
      semi_hard: if True, uses only the negatives selected by `semi_hard_negatives`.
      cross_view_only: if True, uses only second views as negatives for first views, and vice versa.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.

    Returns:
      loss: scalar, summed over both directions and averaged over this replica's n images.
      logits_ab: [n, N] similarities between first and second views, divided by the temperature.
      labels: [n, N] one-hot; the positive for row i is in column i + r, where r is this replica's
        row offset.
    """
    z_a, z_b, all_z_a, all_z_b, positives = _gather_views(hidden, hidden_norm, strategy)
    total = tf.shape(all_z_a)[0]
    labels = tf.one_hot(positives, total, dtype=z_a.dtype)
    negatives = tf.tile(labels == 0, [1, 1 if cross_view_only else 2])
    loss_function, parameter = {
        "nt_xent": (nt_xent, temperature),
        "nt_logistic": (nt_logistic, temperature),
        "margin_triplet": (margin_triplet, margin),
    }[name]

    def one_direction(anchors, opposite_views, same_views):
        candidates = (
            opposite_views if cross_view_only else tf.concat([opposite_views, same_views], 0)
        )
        similarities = tf.matmul(anchors, candidates, transpose_b=True)
        positive = tf.reduce_sum(similarities[:, :total] * labels, 1)
        mask = (
            semi_hard_negatives(positive, similarities, negatives, margin)
            if semi_hard
            else negatives
        )
        return (
            tf.reduce_mean(loss_function(positive, similarities, mask, parameter)),
            similarities[:, :total],
        )

    loss_a, similarities_ab = one_direction(z_a, all_z_b, all_z_a)
    loss_b, _ = one_direction(z_b, all_z_a, all_z_b)
    return loss_a + loss_b, similarities_ab / temperature, labels
