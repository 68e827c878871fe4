"""NT-Xent in memory linear in the batch: similarities are computed one block of rows at a time.

`objective.add_contrastive_loss` is the readable form, and holds all similarities of a replica. This form replaces it
when they would take more than `MATRIX_BYTES`, or if `--loss_block_rows` is set. It computes the gradient together with
the loss, with as many matrix products as the readable form, so that memory is all that it saves.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import objective
from runtime import replicas

MATRIX_BYTES = 64 * 2**20  # of the similarities [2n, 2N] of a replica, from which on blocks are used
# Similarities of one block: twice as many take twice the memory and save 1 to 4 % of the time (measured on 2 cores).
_BLOCK_BYTES = 16 * 2**20
# Each block adds to the gradient of all 2N projections, which is too much work for fewer rows.
_LEAST_ROWS = 256


def is_used(hidden: tf.Tensor, strategy: tf.distribute.Strategy | None, block_rows: int = 0) -> bool:
    """Returns whether this form replaces the readable one for projections [2n, d] of one replica."""
    if block_rows or hidden.shape[0] is None:
        return bool(block_rows)
    replica_count = 1 if strategy is None else strategy.num_replicas_in_sync
    return hidden.shape[0] ** 2 * replica_count * max(hidden.dtype.size, 4) > MATRIX_BYTES


def contrastive_loss(
    hidden: tf.Tensor, hidden_norm: bool = True, temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None, block_rows: int = 0
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns NT-Xent and its metrics, as `objective.add_contrastive_loss` and `metrics` define them.

    Derivation. Let u_j be the 2N projections of all replicas, r_i = u_i / t those of this replica divided by the
    temperature, s_ij = <r_i, u_j> the logits, and p(i) the column of the other view of the same image. The loss of
    row i is

        l_i = log Z_i - s_ip(i),   Z_i = sum over j except i of exp(s_ij),

    so that dl_i / ds_ij = w_ij, where w_ij = exp(s_ij) / Z_i for negatives, w_ii = 0, and

        w_ip(i) = exp(s_ip(i)) / Z_i - 1 = -(sum over the negatives j of exp(s_ij)) / Z_i.

    The last form is used, since the difference would be lost in rounding where the positive has nearly all of the
    weight. The chain rule gives two parts of the gradient, one through the rows and one through the columns:

        grad_rows_i = sum over j of w_ij u_j,    grad_all_j = sum over i of w_ij r_i.

    Both are sums over blocks of rows i, and each block needs three matrix products: s, grad_rows and grad_all.
    Gathering is outside of the function with this gradient, so that the gradient of gathering adds up what all replicas
    pass back. There is no second derivative.

    Args:
      hidden: [2n, d] projections, all first views before all second views. Half precision is cast to float32.
      hidden_norm: l2-normalize the rows, so that similarities are cosines.
      temperature: t, above 0.
      strategy: the strategy whose replicas share the batch, or None. Call it in replica context.
      block_rows: largest number of rows of a block; 0: as many as make 16 MB of similarities, but at least 256.

    Returns:
      loss: scalar, the mean over the n images of this replica.
      accuracy: scalar, `metrics.contrastive_accuracy` of the images of this replica; without gradient.
      entropy: scalar, `metrics.contrastive_entropy` of the images of this replica; without gradient.
    """
    hidden = objective.prepare_hidden(hidden, hidden_norm)
    n = (hidden.shape[0] or tf.shape(hidden)[0]) // 2
    static_shapes = _needs_static_shapes(strategy)

    @tf.custom_gradient
    def loss_and_metrics(hidden, all_hidden):
        sums, grad_rows, grad_all = _sum_over_rows(
            hidden / temperature, all_hidden, replicas.row_offset(n, strategy), n, block_rows, static_shapes)
        loss, accuracy, entropy = tf.unstack(sums / tf.cast(n, sums.dtype))

        def gradient(upstream, *_):
            scale = upstream / tf.cast(n, upstream.dtype)
            return scale / temperature * grad_rows, scale * grad_all

        return (loss, accuracy, entropy), gradient

    return loss_and_metrics(hidden, _gather_views(hidden, strategy))


def _needs_static_shapes(strategy):
    return isinstance(strategy, tf.distribute.TPUStrategy)  # which compiles with XLA


def _gather_views(hidden, strategy):
    """Returns the projections [2N, d] of all replicas: all first views before all second views."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return hidden
    return tf.concat([replicas.gather(view, strategy) for view in tf.split(hidden, 2, 0)], 0)


def _sum_over_rows(rows, all_hidden, offset, n, block_rows, static_shapes):
    """Returns sums over the rows of this replica, and the gradients of the first sum.

    Args:
      rows: [2n, d], r above.
      all_hidden: [2N, d], u above.
      offset: row of the first image of this replica among those of all replicas.
      n: int or scalar tensor.
      block_rows: see `contrastive_loss`.
      static_shapes: whether all shapes must be static.

    Returns:
      sums: [3]: loss over both views, hits and entropy over the first views.
      grad_rows: [2n, d], with respect to `rows`.
      grad_all: [2N, d], with respect to `all_hidden`.
    """
    total = (all_hidden.shape[0] or tf.shape(all_hidden)[0]) // 2
    count = _count_blocks(block_rows, n, 2 * total * all_hidden.dtype.size, static_shapes)
    sums, grad_all, grad_rows = tf.zeros([3], rows.dtype), tf.zeros_like(all_hidden), []
    for is_first in (True, False):
        view = rows[:n] if is_first else rows[n:]

        def block(begin, end, view=view, is_first=is_first):
            columns = offset + begin, total + offset + begin
            self_column, positive_column = columns if is_first else columns[::-1]
            return _block_terms(view[begin:end], all_hidden, self_column, positive_column, total if is_first else None,
                                static_shapes)

        is_unrolled = static_shapes or isinstance(count, int) and count == 1
        sums, grad_view, grad_all = (_unrolled if is_unrolled else _looped)(block, n, count, sums, grad_all)
        grad_rows.append(grad_view)
    return sums, tf.concat(grad_rows, 0), grad_all


def _count_blocks(block_rows, n, row_bytes, static_shapes):
    """Returns the number of blocks of one view; an int if all shapes are known."""
    if not block_rows:
        if static_shapes:
            return 1
        if isinstance(row_bytes, int):
            block_rows = max(_BLOCK_BYTES // row_bytes, _LEAST_ROWS)
        else:
            block_rows = tf.maximum(_BLOCK_BYTES // row_bytes, _LEAST_ROWS)
    return -(-n // block_rows)


def _unrolled(block: Callable, n: int, count: int, sums: tf.Tensor, grad_all: tf.Tensor):
    """Computes the same as `_looped`, without a loop in the graph."""
    size, grad_rows = -(-n // count), []
    for begin in range(0, n, size):
        # Blocks that run in parallel would take the memory of all of them. The single blocks of the two views may run
        # in parallel, so that small products use several cores.
        with tf.control_dependencies([sums, grad_all] if count > 1 else []):
            block_sums, grad_block, grad_others = block(begin, min(begin + size, n))
        sums, grad_all = sums + block_sums, grad_all + grad_others
        grad_rows.append(grad_block)
    return sums, tf.concat(grad_rows, 0), grad_all


def _looped(block: Callable, n, count, sums: tf.Tensor, grad_all: tf.Tensor):
    """Adds up what `block(begin, end)` returns for all rows of a view.

    Returns:
      sums: with those of all blocks added.
      grad_view: the gradients of the rows of all blocks, concatenated.
      grad_all: with those of all blocks added.
    """
    size = -(-n // count)

    def body(number, sums, grad_rows, grad_all):
        begin = number * size
        block_sums, grad_block, grad_others = block(begin, tf.minimum(begin + size, n))
        return number + 1, sums + block_sums, grad_rows.write(number, grad_block), grad_all + grad_others

    grad_rows = tf.TensorArray(sums.dtype, count, infer_shape=False, element_shape=[None, grad_all.shape[1]])
    _, sums, grad_rows, grad_all = tf.while_loop(
        lambda number, *_: number < count, body, (0, sums, grad_rows, grad_all), parallel_iterations=1)
    return sums, grad_rows.concat(), grad_all


def _block_terms(rows, all_hidden, self_column, positive_column, total, static_shapes):
    """Returns loss, metrics and gradients of consecutive rows of one view.

    Args:
      rows: [b, d], divided by the temperature.
      all_hidden: [2N, d].
      self_column: column of the similarity of the first row to itself; that of each next row is one further.
      positive_column: column of the similarity of the first row to its other view, likewise.
      total: N for first views; None for second views, which have no metrics.
      static_shapes: see `_diagonal`.

    Returns:
      sums [3], grad_rows [b, d] and grad_all [2N, d], as for `_sum_over_rows`.
    """
    logits = tf.matmul(rows, all_hidden, transpose_b=True)
    logits = _set_diagonal(logits, self_column, tf.fill([tf.shape(rows)[0]], logits.dtype.min), static_shapes)
    positive_logit, largest = _diagonal(logits, positive_column, static_shapes), tf.reduce_max(logits, 1)
    metrics = [tf.zeros([], rows.dtype)] * 2
    if total is not None:
        metrics = _block_metrics(logits[:, total:], positive_column - total)
    with tf.control_dependencies([positive_logit, *metrics]):  # The weights may then take the place of the logits.
        weights = tf.exp(logits - largest[:, tf.newaxis])
    positive_weight = tf.exp(positive_logit - largest)
    weights = _set_diagonal(weights, positive_column, tf.zeros_like(positive_weight), static_shapes)
    negatives_sum = tf.reduce_sum(weights, 1)
    weights = _set_diagonal(weights, positive_column, -negatives_sum, static_shapes)
    # log(1 + negatives / positive), in the form that is accurate for the larger of the two.
    losses = tf.where(positive_weight > negatives_sum,
                      tf.math.log1p(tf.math.divide_no_nan(negatives_sum, positive_weight)),
                      largest - positive_logit + tf.math.log(negatives_sum + positive_weight))
    scale = 1 / (negatives_sum + positive_weight)[:, tf.newaxis]
    grad_rows = scale * tf.matmul(weights, all_hidden)
    grad_all = tf.matmul(weights, scale * rows, transpose_a=True)
    return tf.stack([tf.reduce_sum(losses), *metrics]), grad_rows, grad_all


def _block_metrics(logits_ab, positive_column):
    """Returns the sums of hits and of entropies over the rows of [b, N]; the positive of row i is column start + i."""
    positives = tf.cast(positive_column + tf.range(tf.shape(logits_ab)[0]), tf.int64)
    hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits_ab, 1), positives), logits_ab.dtype))
    probabilities = tf.nn.softmax(logits_ab)
    return hits, -tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8))


def _diagonal(matrix, start, static_shapes):
    """Returns the elements (i, start + i) of [b, columns].

    With `static_shapes`, in a form for which XLA does not require `start` to be a constant.
    """
    if static_shapes:
        return tf.reduce_sum(tf.where(_diagonal_mask(matrix, start), matrix, 0), 1)
    diagonal = tf.linalg.diag_part(matrix, k=start)
    diagonal.set_shape(matrix.shape[:1])  # It is lost if `start` is a tensor.
    return diagonal


def _set_diagonal(matrix, start, values, static_shapes):
    """Returns `matrix` with `values` in place of `_diagonal(matrix, start)`."""
    if static_shapes:
        return tf.where(_diagonal_mask(matrix, start), values[:, tf.newaxis], matrix)
    changed = tf.linalg.set_diag(matrix, values, k=start)
    changed.set_shape(matrix.shape)
    return changed


def _diagonal_mask(matrix, start):
    shape = tf.shape(matrix)
    return tf.range(shape[1]) == start + tf.range(shape[0])[:, tf.newaxis]
