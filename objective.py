"""Losses: NT-Xent (paper, Eq. 1) and the others of Table 2 across replicas, and the supervised loss."""

from __future__ import annotations

import tensorflow as tf

# Of the similarities of one block: twice as much takes twice the memory and 1 to 4 % less time (measured on 2 cores).
_BLOCK_BYTES = 16 * 2**20
# Every block adds to the gradient of all rows, which for fewer rows than that is too much work.
_LEAST_ROWS = 256


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


def _prepared(hidden, hidden_norm):
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
    hidden = _prepared(hidden, hidden_norm)
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


def contrastive_loss_and_metrics(hidden, hidden_norm=True, temperature=1.0, strategy=None, block_rows=0):
    """NT-Xent and its metrics as `add_contrastive_loss` defines them, in memory linear in the batch.

    The similarities are made, used and dropped one block of rows at a time, and the gradient is computed along with
    the loss: three matrix products a block, as many as without blocks. There is no second derivative.

    Args:
      hidden: [2n, d] projections, all first views before all second views; half precisions become float32.
      hidden_norm: l2-normalise the rows, so that similarities are cosines.
      temperature: above 0.
      strategy: the `tf.distribute.Strategy` whose replicas hold the batch, or None.
      block_rows: most rows of a block; 0: as many as make 16 MB of similarities, but 256 at least.

    Returns:
      loss: scalar, this replica's mean over its n images.
      accuracy: scalar, `metrics.contrastive_accuracy` of this replica's images; without gradient.
      entropy: scalar, `metrics.contrastive_entropy` of this replica's images; without gradient.
    """
    hidden = _prepared(hidden, hidden_norm)
    local = (hidden.shape[0] or tf.shape(hidden)[0]) // 2
    xla = _needs_static_shapes(strategy)

    @tf.custom_gradient
    def loss_and_metrics(hidden, everyone):
        sums, own_gradient, shared_gradient = _all_terms(
            hidden / temperature, everyone, replica_offset(local, strategy), local, block_rows, xla)
        loss, accuracy, entropy = tf.unstack(sums / tf.cast(local, sums.dtype))

        def gradient(upstream, *_):
            scale = upstream / tf.cast(local, upstream.dtype)
            return scale / temperature * own_gradient, scale * shared_gradient

        return (loss, accuracy, entropy), gradient

    # Outside of what has a gradient of its own: that of gathering then brings every replica what the others ask of it.
    return loss_and_metrics(hidden, _gather_views(hidden, strategy))


def _needs_static_shapes(strategy):
    return isinstance(strategy, tf.distribute.TPUStrategy)


def _gather_views(hidden, strategy):
    """[2N, d] of all replicas from [2n, d] of this one: all first views before all second views."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return hidden
    return tf.concat([gather_replicas(view, strategy) for view in tf.split(hidden, 2, 0)], 0)


def _all_terms(rows, everyone, offset, local, block_rows, xla):
    """Sums over this replica's rows, and the gradients of the first.

    Args:
      rows: [2n, d], this replica's projections divided by the temperature.
      everyone: [2N, d], those of all replicas as they are.
      offset: place of this replica's first image among all.
      local: n, a number or a tensor.
      block_rows: most rows of a block; 0: automatic.
      xla: whether shapes must be static.

    Returns:
      sums: [3], of losses over both views, of hits and entropies over the first.
      own_gradient: [2n, d], with respect to `rows`.
      shared_gradient: [2N, d], with respect to `everyone`.
    """
    total = (everyone.shape[0] or tf.shape(everyone)[0]) // 2
    count = _block_count(block_rows, local, 2 * total * everyone.dtype.size, xla)
    sums, shared, parts = tf.zeros([3], rows.dtype), tf.zeros_like(everyone), []
    for first in (True, False):
        view = rows[:local] if first else rows[local:]

        def block(begin, end, view=view, first=first):
            places = offset + begin, total + offset + begin
            own, positive = places if first else places[::-1]
            return _block_terms(view[begin:end], everyone, own, positive, total if first else None, xla)

        over = _over_few_blocks if xla or isinstance(count, int) and count == 1 else _over_blocks
        sums, part, shared = over(block, local, count, sums, shared)
        parts.append(part)
    return sums, tf.concat(parts, 0), shared


def _block_count(block_rows, local, row_bytes, xla):
    """Into how many blocks the rows of one view are cut; a number where all shapes are known."""
    if not block_rows:
        if xla:
            return 1
        if isinstance(row_bytes, int):
            block_rows = max(_BLOCK_BYTES // row_bytes, _LEAST_ROWS)
        else:
            block_rows = tf.maximum(_BLOCK_BYTES // row_bytes, _LEAST_ROWS)
    return -(-local // block_rows)


def _over_few_blocks(block, local, count, sums, shared):
    """`_over_blocks` without a loop in the graph."""
    size, parts = -(-local // count), []
    for begin in range(0, local, size):
        # Many blocks side by side would take the memory of all; a single one of each view may run beside the other's,
        # which is how small products occupy several cores.
        with tf.control_dependencies([sums, shared] if count > 1 else []):
            more, part, asked = block(begin, min(begin + size, local))
        sums, shared = sums + more, shared + asked
        parts.append(part)
    return sums, tf.concat(parts, 0), shared


def _over_blocks(block, local, count, sums, shared):
    """Adds up what `block(begin, end)` returns over all rows of a view.

    Returns:
      `sums` and `shared` with those of all blocks added, and between them the blocks' own gradients, joined.
    """
    size = -(-local // count)

    def body(number, sums, parts, shared):
        begin = number * size
        more, part, asked = block(begin, tf.minimum(begin + size, local))
        return number + 1, sums + more, parts.write(number, part), shared + asked

    parts = tf.TensorArray(sums.dtype, count, infer_shape=False, element_shape=[None, shared.shape[1]])
    _, sums, parts, shared = tf.while_loop(
        lambda number, *_: number < count, body, (0, sums, parts, shared), parallel_iterations=1)
    return sums, parts.concat(), shared


def _block_terms(rows, everyone, own, positive, total, xla):
    """Loss, metrics and gradients of consecutive rows of one view.

    Args:
      rows: [b, d], divided by the temperature.
      everyone: [2N, d].
      own: column of the first row's similarity to itself; every next row has the next.
      positive: column of the first row's similarity to its other view, in the same way.
      total: N, for first views; None for second views, of which there are no metrics.
      xla: see `_band`.

    Returns:
      `sums`, `own_gradient` of `rows` and `shared_gradient`, as `_all_terms`.
    """
    logits = tf.matmul(rows, everyone, transpose_b=True)
    logits = _with_band(logits, own, tf.fill([tf.shape(rows)[0]], logits.dtype.min), xla)
    wanted, largest = _band(logits, positive, xla), tf.reduce_max(logits, 1)
    reported = [tf.zeros([], rows.dtype)] * 2 if total is None else _block_metrics(logits[:, total:], positive - total)
    with tf.control_dependencies([wanted, *reported]):  # What follows may then take the logits' place in memory.
        weights = tf.exp(logits - largest[:, tf.newaxis])
    weight = tf.exp(wanted - largest)
    # Without the positive: where it has nearly all of the weight, its share less 1 would be lost in rounding.
    weights = _with_band(weights, positive, tf.zeros_like(weight), xla)
    others = tf.reduce_sum(weights, 1)
    weights = _with_band(weights, positive, -others, xla)
    losses = tf.where(weight > others, tf.math.log1p(tf.math.divide_no_nan(others, weight)),
                      largest - wanted + tf.math.log(others + weight))
    scale = 1 / (others + weight)[:, tf.newaxis]
    sums = tf.stack([tf.reduce_sum(losses), *reported])
    return sums, scale * tf.matmul(weights, everyone), tf.matmul(weights, scale * rows, transpose_a=True)


def _block_metrics(logits_ab, positive):
    """Sums of hits and of entropies over the rows of [b, N]; the first row's positive is column `positive`."""
    places = tf.cast(positive + tf.range(tf.shape(logits_ab)[0]), tf.int64)
    hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits_ab, 1), places), logits_ab.dtype))
    probabilities = tf.nn.softmax(logits_ab)
    return hits, -tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8))


def _band(matrix, start, xla):
    """The elements (i, start + i) of [b, columns]; `xla`: in a form for which `start` need not be a constant there."""
    if xla:
        return tf.reduce_sum(tf.where(_band_mask(matrix, start), matrix, 0), 1)
    band = tf.linalg.diag_part(matrix, k=start)
    band.set_shape(matrix.shape[:1])  # Which a `start` that is a tensor hides.
    return band


def _with_band(matrix, start, values, xla):
    """`matrix` with `values` in place of `_band(matrix, start)`."""
    if xla:
        return tf.where(_band_mask(matrix, start), values[:, tf.newaxis], matrix)
    changed = tf.linalg.set_diag(matrix, values, k=start)
    changed.set_shape(matrix.shape)
    return changed


def _band_mask(matrix, start):
    shape = tf.shape(matrix)
    return tf.range(shape[1]) == start + tf.range(shape[0])[:, tf.newaxis]


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


def add_table_2_loss(hidden, name, hidden_norm=True, temperature=1.0, margin=None, mine=False, both_views=False,
                     strategy=None):
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
    view_a, view_b = tf.split(_prepared(hidden, hidden_norm), 2, 0)
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
