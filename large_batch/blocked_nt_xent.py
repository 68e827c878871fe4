"""NT-Xent with memory use linear in the batch size: similarities are computed one block of rows at a time.

`objective.add_contrastive_loss` is the more readable form, which stores all similarities of a
replica. The blocked form replaces it if the similarities would take up more than `MATRIX_BYTES`, or
if `--loss_block_rows` is set. The blocked form computes the gradient together with the loss. Both
forms need the same number of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import objective
from runtime import replicas

MATRIX_BYTES = 64 * 2**20  # Use blocks if a replica's similarities [2n, 2N] exceed this size.
# Memory for the similarities of one block. Doubling it would reduce the time by 1 to 4 % (measured
# on 2 cores).
_BLOCK_BYTES = 16 * 2**20
# Smaller blocks are inefficient, because each block updates the gradient of all 2N projections.
_MIN_BLOCK_ROWS = 256


def is_used(z: tf.Tensor, strategy: tf.distribute.Strategy | None, block_rows: int = 0) -> bool:
    """Returns whether to use the blocked form for one replica's projections `z`, [2n, d]."""
    if block_rows or z.shape[0] is None:
        return bool(block_rows)
    replica_count = 1 if strategy is None else strategy.num_replicas_in_sync
    return z.shape[0] ** 2 * replica_count * max(z.dtype.size, 4) > MATRIX_BYTES


def contrastive_loss(
    z: tf.Tensor,
    hidden_norm: bool = True,
    temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None,
    block_rows: int = 0,
    jit_compile: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns NT-Xent and its metrics, as defined by `objective.add_contrastive_loss` and `metrics`.

    Derivation: Let z_j be the 2N projections of all replicas, r_i = z_i / t the projections of this
    replica divided by the temperature, s_ij = <r_i, z_j> the logits, and p(i) the column that holds
    row i's positive. The loss of row i is

        l_i = log Z_i - s_ip(i),   Z_i = sum over j != i of exp(s_ij).

    Hence dl_i / ds_ij = w_ij, where w_ij = exp(s_ij) / Z_i for negatives, w_ii = 0, and

        w_ip(i) = exp(s_ip(i)) / Z_i - 1 = -(sum over the negatives j of exp(s_ij)) / Z_i.

    The code uses the last form, since the difference suffers from cancellation if the positive has
    nearly all the weight. By the chain rule, the gradient has two terms, one through the rows and
    one through the columns:

        grad_rows_i = sum over j of w_ij z_j,    grad_all_j = sum over i of w_ij r_i.

    Both terms are accumulated over blocks of rows. Each block needs three matrix products: s,
    grad_rows and grad_all. The gather operation stays outside the custom gradient, so the gradient
    of the gather operation sums the contributions of the replicas.
    Second derivatives are not supported.

    Args:
      z: [2n, d] projections, all first views before all second views. Half precision is cast to
        float32.
      hidden_norm: if True, l2-normalizes the rows, which makes the similarities cosine
        similarities.
      temperature: t > 0.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.
      block_rows: maximum number of rows per block. If 0, the maximum is chosen so that the
        similarities of a block take up at most 16 MiB, but it is at least 256.
      jit_compile: whether XLA compiles the computation. All shapes must then be static, and with
        `block_rows` 0, all rows are in one block.

    Returns:
      loss: scalar, the mean over this replica's n images.
      accuracy: scalar, `metrics.contrastive_accuracy` over this replica's images, without a
        gradient.
      entropy: scalar, `metrics.contrastive_entropy` over this replica's images, without a gradient.
    """
    z = objective.prepare_projections(z, hidden_norm)
    n = (z.shape[0] or tf.shape(z)[0]) // 2
    # XLA compiles TPU programs.
    static_shapes = jit_compile or isinstance(strategy, tf.distribute.TPUStrategy)

    @tf.custom_gradient
    def loss_and_metrics(z, all_z):
        sums, grad_rows, grad_all = _sum_over_rows(
            z / temperature, all_z, replicas.row_offset(n, strategy), n, block_rows, static_shapes
        )
        loss, accuracy, entropy = tf.unstack(sums / tf.cast(n, sums.dtype))

        def gradient(upstream, *_):
            scale = upstream / tf.cast(n, upstream.dtype)
            return scale / temperature * grad_rows, scale * grad_all

        return (loss, accuracy, entropy), gradient

    return loss_and_metrics(z, _gather_views(z, strategy))


def _gather_views(z, strategy):
    """Returns the projections [2N, d] of all replicas, with all first views before all second views."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return z
    return tf.concat([replicas.gather(view, strategy) for view in tf.split(z, 2, 0)], 0)


def _sum_over_rows(rows, all_z, offset, n, block_rows, static_shapes):
    """Sums the loss and the metrics over this replica's rows, and computes the gradients of the loss.

    Args:
      rows: [2n, d], the r_i in `contrastive_loss`.
      all_z: [2N, d], the projections z_j of all replicas.
      offset: row offset of this replica in the global batch.
      n: int or scalar tensor, the number of images on this replica.
      block_rows: see `contrastive_loss`.
      static_shapes: whether all shapes must be static.

    Returns:
      sums: [3], the loss (summed over both views), the hits and the entropy (summed over the first
        views).
      grad_rows: [2n, d], gradient of the loss with respect to `rows`.
      grad_all: [2N, d], gradient of the loss with respect to `all_z`.
    """
    total = (all_z.shape[0] or tf.shape(all_z)[0]) // 2
    num_blocks = _count_blocks(block_rows, n, 2 * total * all_z.dtype.size, static_shapes)
    sums, grad_all, grad_rows = tf.zeros([3], rows.dtype), tf.zeros_like(all_z), []
    for is_first in (True, False):
        view = rows[:n] if is_first else rows[n:]

        def block(begin, end, view=view, is_first=is_first):
            columns = offset + begin, total + offset + begin
            self_column, positive_column = columns if is_first else columns[::-1]
            return _block_terms(
                view[begin:end],
                all_z,
                self_column,
                positive_column,
                total if is_first else None,
                static_shapes,
            )

        unroll = static_shapes or isinstance(num_blocks, int) and num_blocks == 1
        sum_blocks = _sum_blocks_unrolled if unroll else _sum_blocks_in_loop
        sums, grad_view, grad_all = sum_blocks(block, n, num_blocks, sums, grad_all)
        grad_rows.append(grad_view)
    return sums, tf.concat(grad_rows, 0), grad_all


def _count_blocks(block_rows, n, row_bytes, static_shapes):
    """Returns the number of blocks per view, as an int if all shapes are static."""
    if not block_rows:
        if static_shapes:
            return 1
        if isinstance(row_bytes, int):
            block_rows = max(_BLOCK_BYTES // row_bytes, _MIN_BLOCK_ROWS)
        else:
            block_rows = tf.maximum(_BLOCK_BYTES // row_bytes, _MIN_BLOCK_ROWS)
    return -(-n // block_rows)


def _sum_blocks_unrolled(
    block: Callable, n: int, num_blocks: int, sums: tf.Tensor, grad_all: tf.Tensor
):
    """Computes the same results as `_sum_blocks_in_loop`, without a loop in the graph."""
    size, grad_rows = -(-n // num_blocks), []
    for begin in range(0, n, size):
        # Run blocks one at a time to limit memory. If each view is a single block, both views may
        # run in parallel, which lets small matrix products use multiple cores.
        with tf.control_dependencies([sums, grad_all] if num_blocks > 1 else []):
            block_sums, block_grad_rows, block_grad_all = block(begin, min(begin + size, n))
        sums, grad_all = sums + block_sums, grad_all + block_grad_all
        grad_rows.append(block_grad_rows)
    return sums, tf.concat(grad_rows, 0), grad_all


def _sum_blocks_in_loop(block: Callable, n, num_blocks, sums: tf.Tensor, grad_all: tf.Tensor):
    """Calls `block(begin, end)` for all blocks of a view, and accumulates the results.

    Returns:
      sums: `sums` plus the sums of all blocks.
      grad_rows: the gradients with respect to the rows, concatenated.
      grad_all: `grad_all` plus the gradients of all blocks with respect to all projections.
    """
    size = -(-n // num_blocks)

    def body(index, sums, grad_rows, grad_all):
        begin = index * size
        block_sums, block_grad_rows, block_grad_all = block(begin, tf.minimum(begin + size, n))
        return (
            index + 1,
            sums + block_sums,
            grad_rows.write(index, block_grad_rows),
            grad_all + block_grad_all,
        )

    grad_rows = tf.TensorArray(
        sums.dtype, num_blocks, infer_shape=False, element_shape=[None, grad_all.shape[1]]
    )
    _, sums, grad_rows, grad_all = tf.while_loop(
        lambda index, *_: index < num_blocks,
        body,
        (0, sums, grad_rows, grad_all),
        parallel_iterations=1,
    )
    return sums, grad_rows.concat(), grad_all


def _block_terms(rows, all_z, self_column, positive_column, total, static_shapes):
    """Returns the loss, metrics and gradients of consecutive rows of one view.

    Args:
      rows: [b, d], divided by the temperature.
      all_z: [2N, d].
      self_column: column of the first row's own projection; increases by one per row.
      positive_column: column of the first row's positive; increases by one per row.
      total: N for first views. None for second views, which have no metrics.
      static_shapes: see `_diagonal`.

    Returns:
      sums [3], grad_rows [b, d] and grad_all [2N, d]; see `_sum_over_rows`.
    """
    logits = tf.matmul(rows, all_z, transpose_b=True)
    logits = _set_diagonal(
        logits, self_column, tf.fill([tf.shape(rows)[0]], logits.dtype.min), static_shapes
    )
    positive_logit, max_logit = (
        _diagonal(logits, positive_column, static_shapes),
        tf.reduce_max(logits, 1),
    )
    metrics = [tf.zeros([], rows.dtype)] * 2
    if total is not None:
        metrics = _block_metrics(logits[:, total:], positive_column - total)
    with tf.control_dependencies([positive_logit, *metrics]):
        # Allows the weights to reuse the memory of the logits.
        weights = tf.exp(logits - max_logit[:, tf.newaxis])
    positive_weight = tf.exp(positive_logit - max_logit)
    weights = _set_diagonal(weights, positive_column, tf.zeros_like(positive_weight), static_shapes)
    negatives_sum = tf.reduce_sum(weights, 1)
    weights = _set_diagonal(weights, positive_column, -negatives_sum, static_shapes)
    # The loss is log(1 + negatives / positive). Each branch uses the form that is numerically
    # accurate in its case.
    losses = tf.where(
        positive_weight > negatives_sum,
        tf.math.log1p(tf.math.divide_no_nan(negatives_sum, positive_weight)),
        max_logit - positive_logit + tf.math.log(negatives_sum + positive_weight),
    )
    scale = 1 / (negatives_sum + positive_weight)[:, tf.newaxis]
    grad_rows = scale * tf.matmul(weights, all_z)
    grad_all = tf.matmul(weights, scale * rows, transpose_a=True)
    return tf.stack([tf.reduce_sum(losses), *metrics]), grad_rows, grad_all


def _block_metrics(logits_ab, positive_column):
    """Returns the number of hits and the summed entropies for logits [b, N]; see `_block_terms`."""
    positives = tf.cast(positive_column + tf.range(tf.shape(logits_ab)[0]), tf.int64)
    hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits_ab, 1), positives), logits_ab.dtype))
    probabilities = tf.nn.softmax(logits_ab)
    return hits, -tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8))


def _diagonal(matrix, start, static_shapes):
    """Returns the elements (i, start + i) of a matrix [b, columns].

    If `static_shapes` is True, uses a mask, because XLA supports `diag_part` only if `start` is a
    compile-time constant.
    """
    if static_shapes:
        return tf.reduce_sum(tf.where(_diagonal_mask(matrix, start), matrix, 0), 1)
    diagonal = tf.linalg.diag_part(matrix, k=start)
    diagonal.set_shape(matrix.shape[:1])  # The static shape is lost if `start` is a tensor.
    return diagonal


def _set_diagonal(matrix, start, values, static_shapes):
    """Returns `matrix` with `_diagonal(matrix, start)` replaced by `values`."""
    if static_shapes:
        return tf.where(_diagonal_mask(matrix, start), values[:, tf.newaxis], matrix)
    result = tf.linalg.set_diag(matrix, values, k=start)
    result.set_shape(matrix.shape)
    return result


def _diagonal_mask(matrix, start):
    shape = tf.shape(matrix)
    return tf.range(shape[1]) == start + tf.range(shape[0])[:, tf.newaxis]
