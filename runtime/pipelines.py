"""Parallelism and options of `tf.data` pipelines."""

from __future__ import annotations

import tensorflow as tf

from runtime import child_processes

# Number of elements to process in parallel: one per core that this process may use.
_, PARALLEL_CALLS = child_processes.cpu_info()
# Copying examples into a batch is limited by memory bandwidth, and every parallel call holds a batch.
_PARALLEL_BATCHES = min(PARALLEL_CALLS, 4)
_PREFETCHED_BATCHES = 2


def batched(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns a dataset of batches, up to four of which are assembled in parallel. Drops an incomplete last one."""
    return dataset.batch(size, True, num_parallel_calls=_PARALLEL_BATCHES, deterministic=True)


def with_prefetching(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of batches with prefetching and the options of all our pipelines."""
    options = tf.data.Options()
    # With autotuning, deleting an iterator sometimes takes up to a minute (TensorFlow 2.15 to
    # 2.21): if the tuning thread misses its cancellation, it sleeps until its next update.
    options.autotune.enabled = False
    # Elements are processed in parallel; parallelism within each small operation would only add
    # overhead.
    options.threading.max_intra_op_parallelism = 1
    if tf.config.list_physical_devices("GPU"):
        # The threads of the shared pool start the kernels of the training step.
        options.threading.private_threadpool_size = PARALLEL_CALLS
    return batches.prefetch(_PREFETCHED_BATCHES).with_options(options)
