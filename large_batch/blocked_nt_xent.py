"""NT-Xent with memory use linear in the batch size: similarities are computed one block of images at a time.

`objective.add_contrastive_loss` is the more readable form, which stores all similarities of a
replica. The blocked form replaces it if the similarities would take up more than `MATRIX_BYTES`, or
if `--loss_block_rows` is set. The blocked form computes the gradient together with the loss. Both
forms need the same number of matrix products.
"""

from __future__ import annotations

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
    return z.shape[0] ** 2 * _replica_count(strategy) * max(z.dtype.size, 4) > MATRIX_BYTES


def _replica_count(strategy: tf.distribute.Strategy | None) -> int:
    return 1 if strategy is None else strategy.num_replicas_in_sync


def contrastive_loss(
    z: tf.Tensor,
    hidden_norm: bool = True,
    temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None,
    block_rows: int = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns NT-Xent and its metrics, as defined by `objective.add_contrastive_loss` and `metrics`.

    Derivation: Let z_j be the 2N projections of all replicas, s_ij = <z_i, z_j> / tau the logits, and
    p(i) the column that holds row i's positive. The negatives of row i are all columns j except i
    and p(i). With L_i = log(sum over the negatives j of exp(s_ij)), the loss of row i is

        l_i = log(exp(s_ip(i)) + exp(L_i)) - s_ip(i) = softplus(L_i - s_ip(i)),

    which has the derivatives

        dl_i / ds_ij = q_i exp(s_ij - L_i) for negatives j,    dl_i / ds_ip(i) = -q_i,

    where q_i = sigmoid(L_i - s_ip(i)) is the probability that the softmax assigns to the negatives.
    Since s_ij depends on row i and on column j, the gradient has two terms:

        tau dl_i / dz_i = sum over j of (dl_i / ds_ij) z_j,    tau dl_i / dz_j = (dl_i / ds_ij) z_i.

    Both are added up over blocks of rows i. Each block needs three matrix products: the logits and
    the two terms. The gather operation stays outside the custom gradient, so the gradient of the
    gather operation sums the contributions of the replicas. Second derivatives are not supported.

    Args:
      z: [2n, d] projections, all first views before all second views, with static shape. Half
        precision is cast to float32.
      hidden_norm: if True, l2-normalizes the rows, which makes the similarities cosine
        similarities.
      temperature: tau > 0.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.
      block_rows: maximum number of rows per block, rounded to whole images (two rows). If 0, the
        maximum is chosen so that the similarities of a block take up at most 16 MiB, but it is at
        least 256.

    Returns:
      loss: scalar, the mean over this replica's n images.
      accuracy: scalar, `metrics.contrastive_accuracy` over this replica's images, without a
        gradient.
      entropy: scalar, `metrics.contrastive_entropy` over this replica's images, without a gradient.
    """
    z = objective.prepare_projections(z, hidden_norm)
    views = [replicas.gather(view, strategy) for view in tf.split(z, 2, 0)]
    n = z.shape[0] // 2

    @tf.custom_gradient
    def loss_and_metrics(all_z):
        first = replicas.row_offset(n, strategy)
        sums, gradient = _sum_over_blocks(all_z, first, n, temperature, block_rows)
        return tuple(tf.unstack(sums / n)), lambda upstream, *_: upstream / n * gradient

    # `all_gather` does not set the static shape.
    shape = [2 * n * _replica_count(strategy), z.shape[1]]
    return loss_and_metrics(tf.ensure_shape(tf.concat(views, 0), shape))


def _sum_over_blocks(
    all_z: tf.Tensor, first: int | tf.Tensor, n: int, temperature: float, block_rows: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the loss and the metrics over a replica's images, and computes the gradient of the summed loss.

    Args:
      all_z: [2N, d], the z_j in `contrastive_loss`.
      first: index of the replica's first image among the N images.
      n: number of images on the replica.
      temperature: see `contrastive_loss`.
      block_rows: see `contrastive_loss`.

    Returns:
      sums: [3], the loss, the hits and the entropy of all images.
      gradient: [2N, d], the gradient of the summed loss with respect to `all_z`.
    """
    total = all_z.shape[0] // 2
    block_rows = block_rows or max(_BLOCK_BYTES // (2 * total * all_z.dtype.size), _MIN_BLOCK_ROWS)
    num_blocks = -(-n // max(block_rows // 2, 1))
    size = -(-n // num_blocks)

    def add_block(state, block):
        sums, gradient = state
        # All blocks have the same size, so the last one may repeat images, with weights of 0.
        local = tf.minimum(block * size, n - size) + tf.range(size)
        weights = tf.cast(local >= block * size, all_z.dtype)
        images = first + local
        columns = tf.concat([images, total + images], 0)
        z = tf.gather(all_z, columns)
        rows, positive_z = z / temperature, tf.roll(z, size, 0)

        logits = tf.matmul(rows, all_z, transpose_b=True)
        hits, entropies = _metrics(logits[:size, total:], images)
        with tf.control_dependencies([hits, entropies]):  # Allows reusing the memory of the logits.
            is_same_image = tf.tile(tf.range(total) == images[:, tf.newaxis], [2, 2])
            logits = tf.where(
                is_same_image, tf.constant(logits.dtype.min / 2, logits.dtype), logits
            )
        highest = tf.reduce_max(logits, 1, keepdims=True)
        exponentials = tf.exp(logits - highest)
        exponential_sums = tf.reduce_sum(exponentials, 1, keepdims=True)
        log_ratios = (
            highest
            + tf.math.log(exponential_sums)
            - tf.reduce_sum(rows * positive_z, 1, keepdims=True)
        )
        row_weights = tf.tile(weights[:, tf.newaxis], [2, 1])
        q = row_weights * tf.sigmoid(log_ratios)
        scale = q / exponential_sums
        grad_rows = scale * tf.matmul(exponentials, all_z) - q * positive_z
        grad_columns = tf.matmul(exponentials, scale * rows, transpose_a=True)
        # In a block, the positive of each row is `size` rows before or after it.
        gradient = tf.tensor_scatter_nd_add(
            gradient + grad_columns,
            columns[:, tf.newaxis],
            grad_rows / temperature - tf.roll(q * rows, size, 0),
        )
        losses = row_weights * tf.nn.softplus(log_ratios)
        block_sums = [losses, weights * hits, weights * entropies]
        return sums + tf.stack(list(map(tf.reduce_sum, block_sums))), gradient

    return tf.foldl(
        add_block,
        tf.range(num_blocks),
        (tf.zeros([3], all_z.dtype), tf.zeros_like(all_z)),
        parallel_iterations=1,
    )


def _metrics(logits_ab: tf.Tensor, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the hits [b] (0 or 1) and the entropies [b] of logits [b, N] with positives in the columns `images`."""
    hits = tf.equal(tf.argmax(logits_ab, 1, images.dtype), images)
    probabilities = tf.nn.softmax(logits_ab)
    entropies = -tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8), 1)
    return tf.cast(hits, logits_ab.dtype), entropies
