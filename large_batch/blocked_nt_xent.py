"""NT-Xent with memory use linear in the batch size: similarities are computed one block of images at a time.

`objective.add_contrastive_loss` is the more readable form, which stores all similarities of a
replica. The blocked form replaces it if the similarities would take up more than `MATRIX_BYTES`, or
if `--loss_block_rows` is set. The blocked form computes the gradient together with the loss.
"""

from __future__ import annotations

import tensorflow as tf

import metrics
import objective
from runtime import replicas

MATRIX_BYTES = 64 * 2**20  # Use blocks if a replica's similarities [2n, 2N] exceed this size.
# Memory for the similarities of one block. Doubling it would reduce the time by 1 to 4 % (measured
# on 2 cores).
_BLOCK_BYTES = 16 * 2**20
# Smaller blocks are inefficient, because each block updates the gradient of all 2N projections.
_MIN_BLOCK_ROWS = 256


def needs_blocks(
    z: tf.Tensor, strategy: tf.distribute.Strategy | None, block_rows: int = 0
) -> bool:
    """Returns whether to use the blocked form for one replica's projections `z`, [2n, d]."""
    if block_rows or z.shape[0] is None:
        return bool(block_rows)
    return z.shape[0] ** 2 * replicas.count(strategy) * max(z.dtype.size, 4) > MATRIX_BYTES


def contrastive_loss(
    z: tf.Tensor,
    hidden_norm: bool = True,
    temperature: float = 1.0,
    strategy: tf.distribute.Strategy | None = None,
    block_rows: int = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns NT-Xent and its metrics, as defined by `objective.add_contrastive_loss` and `metrics`.

    The gradient with respect to the projections of all replicas is a sum over blocks of images. Each
    block computes its loss and its part of the gradient, and then releases its similarities. The
    gather operation stays outside the custom gradient, so the gradient of the gather operation sums
    the contributions of the replicas. Second derivatives are not supported.

    Args:
      z: [2n, d] projections, all first views before all second views, with static shape. Half
        precision is cast to float32.
      hidden_norm: if True, l2-normalizes the rows, which makes the similarities cosine
        similarities.
      temperature: tau > 0.
      strategy: the strategy whose replicas share the batch, or None. Call the function in replica
        context.
      block_rows: maximum number of rows per block. A block has two rows per image, and a number of
        images that divides n. If 0, the maximum is chosen so that the similarities of a block take up
        at most 16 MiB, but it is at least 256.

    Returns:
      loss: scalar, the mean over this replica's n images.
      accuracy: scalar, `metrics.contrastive_accuracy` over this replica's images, without a
        gradient.
      entropy: scalar, `metrics.contrastive_entropy` over this replica's images, without a gradient.
    """
    z = objective.prepare_projections(z, hidden_norm)
    views = replicas.gather_all(tf.split(z, 2, 0), strategy)
    n = z.shape[0] // 2
    total = n * replicas.count(strategy)
    limit = block_rows or max(_BLOCK_BYTES // (2 * total * z.dtype.size), _MIN_BLOCK_ROWS)
    size = max(count for count in range(1, max(limit // 2, 1) + 1) if n % count == 0)

    @tf.custom_gradient
    def loss_and_metrics(all_z):
        def add_block(state, block):
            images = replicas.row_offset(n, strategy) + block * size + tf.range(size)
            with tf.GradientTape() as tape:
                tape.watch(all_z)
                all_views = tf.split(all_z, 2)
                rows = [tf.gather(view, images) for view in all_views]
                loss, logits_ab, labels = objective.compare_views(
                    rows[0], rows[1], all_views[0], all_views[1], images, temperature
                )
            scalars = [
                loss,
                metrics.contrastive_accuracy(logits_ab, labels),
                metrics.contrastive_entropy(logits_ab),
            ]
            scalars = tf.stack([tf.cast(scalar, all_z.dtype) for scalar in scalars])
            return state[0] + scalars, state[1] + tape.gradient(loss, all_z)

        blocks, zeros = tf.range(n // size), (tf.zeros([3], all_z.dtype), tf.zeros_like(all_z))
        sums, gradient = tf.foldl(add_block, blocks, zeros, parallel_iterations=1)
        share = size / n
        return tuple(tf.unstack(share * sums)), lambda upstream, *_: upstream * share * gradient

    return loss_and_metrics(tf.concat(views, 0))
