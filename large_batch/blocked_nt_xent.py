"""NT-Xent in memory linear in the batch: similarities are computed one block of rows at a time."""

from __future__ import annotations

import tensorflow as tf

import objective

# Of the similarities of one block: twice as much takes twice the memory and 1 to 4 % less time (measured on 2 cores).
_BLOCK_BYTES = 16 * 2**20
# Every block adds to the gradient of all rows, which for fewer rows than that is too much work.
_LEAST_ROWS = 256


def contrastive_loss(hidden, hidden_norm=True, temperature=1.0, strategy=None, block_rows=0):
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
    hidden = objective.prepare_hidden(hidden, hidden_norm)
    local = (hidden.shape[0] or tf.shape(hidden)[0]) // 2
    xla = _needs_static_shapes(strategy)

    @tf.custom_gradient
    def loss_and_metrics(hidden, everyone):
        sums, own_gradient, shared_gradient = _all_terms(
            hidden / temperature, everyone, objective.replica_offset(local, strategy), local, block_rows, xla)
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
    return tf.concat([objective.gather_replicas(view, strategy) for view in tf.split(hidden, 2, 0)], 0)


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
