"""Sources into per-replica `tf.data`: order, augmentation and position are functions of seed, epoch and key alone.

What is shuffled is encoded; decoding comes after.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import data_util
from augmentation.policies import view_policies
from config import Config
from runtime import rng
from sources.source import Source

_ORDER, _VIEWS, _EVAL_VIEWS = range(3)  # purposes of random draws, folded into the run's seed


def _chunk_size(size, batch_size):
    """Images whose colours are changed together: the divisor of `batch_size` next below 32 images of 32 x 32 pixels.

    More would not stay in the processor's cache. A divisor, so that training continued at any step has the same chunks.
    """
    most = max(32**3 // size**2, 1)
    return max(count for count in range(1, min(most, batch_size) + 1) if batch_size % count == 0)


def _decode_windows(source, item, draw, size):
    """Decodes what windows of an image need of it.

    Args:
      source: of the item.
      item: an image.
      draw: from an image's shape [3] to the windows' begins and sizes, two sequences of int32 [3].
      size: side of what will be made of a window, in pixels.

    Returns:
      part of the image, uint8 [h, w, 3]; begins in it; sizes.
    """
    def whole():
        image = source.decode(item)
        return image, *map(tf.stack, draw(tf.shape(image)))

    def jpeg():
        shape = tf.image.extract_jpeg_shape(item)
        begins, sizes = map(tf.stack, draw(shape))
        # One pixel more: the colours at the edge of what is decoded depend on how far that reaches.
        low = tf.maximum(tf.reduce_min(begins[:, :2], 0) - 1, 0)
        high = tf.minimum(tf.reduce_max(begins[:, :2] + sizes[:, :2], 0) + 1, shape[:2])
        part = tf.image.decode_and_crop_jpeg(item, tf.concat([low, high - low], 0), channels=3)
        return part, begins - tf.pad(low, [[0, 1]]), sizes

    # Small images are decoded faster than it is found out what they are.
    window = whole() if item.dtype != tf.string or size <= 32 else tf.cond(tf.io.is_jpeg(item), jpeg, whole)
    return window[0], *map(tf.unstack, window[1:])


def _batch_views(records, read, source, config, batch_size):
    """Augments and batches.

    Args:
      records: dataset of (seed, reference); `seed` is an int64 scalar, the same for all examples of an epoch.
      read: from a reference to (key, item, label).
      source: decodes items.
      config: settings of the views.
      batch_size: examples an element; a last incomplete batch is left out.

    Returns:
      dataset of (views [batch_size, size, size, 3 * number of views] float32, labels [batch_size]).
    """
    policies, size = view_policies(config), config.image_size
    chunk = _chunk_size(size, batch_size)

    def view_seed(seed, view):
        return rng.nth_seed(seed, view, rng.VIEW)

    @tf.autograph.experimental.do_not_convert  # Nothing to convert, and long to look for it.
    def crop(seed, reference):
        key, item, label = read(*tf.nest.flatten(reference))
        seed = tf.stack([seed, key])

        def draw(shape):
            return zip(*[data_util.random_window(shape, view_seed(seed, view), policy.area_range)
                         for view, policy in enumerate(policies[:1] if config.branch_operators else policies)])

        part, begins, sizes = _decode_windows(source, item, draw, size)
        crops = [data_util.resize_window(part, *window, size, size) for window in zip(begins, sizes)]
        return seed, label, *crops * (len(policies) // len(crops))  # Branches share a crop.

    @tf.autograph.experimental.do_not_convert
    def finish(seeds, labels, *crops):
        channels = [data_util.apply_after_crop(data_util.to_channels(images), policy, view_seed(seeds, view))
                  for view, (images, policy) in enumerate(zip(crops, policies))]
        return data_util.from_channels(sum(channels, [])), labels

    if chunk == 1:
        views = records.map(lambda *record: _first(finish(*_as_batch(crop(*record)))), tf.data.AUTOTUNE)
        return views.batch(batch_size, drop_remainder=True)
    chunks = records.map(crop, tf.data.AUTOTUNE).batch(chunk, drop_remainder=True).map(finish, tf.data.AUTOTUNE)
    batches = chunks.batch(batch_size // chunk, drop_remainder=True)
    return batches.map(lambda views, labels: (
        tf.reshape(views, [batch_size, *views.shape[2:]]), tf.reshape(labels, [batch_size, *labels.shape[2:]])))


def _read_ahead(dataset):
    """The end of every training pipeline."""
    options = tf.data.Options()
    # Examples are worked on in parallel already: to divide each small operation as well costs more than it gains.
    options.threading.max_intra_op_parallelism = 1
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)


def _as_batch(tensors):
    return [tensor[tf.newaxis] for tensor in tensors]


def _first(tensors):
    return tuple(tf.squeeze(tensor, 0) for tensor in tensors)


def _with_seed(seed, references):
    """(seed, reference) for every reference."""
    # Zipped, not mapped: a function call for every record would cost more than all else that happens to it here.
    return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(seed).repeat(), references))


def build_train_dataset(config: Config, source: Source, seed: int, batch_size: int, start_step: int = 0,
                        input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    """The endless training data of one input pipeline.

    Memory: encoded examples are shuffled, at most `config.shuffle_buffer_mb` of them (images in folders and `digits`: 8
    bytes an example, a full permutation of indices); `config.cache_dataset` keeps all encoded examples. Beyond that, a
    few chunks of decoded views for each core, and the batches that are read ahead, which `tf.data` limits to a part of
    the free memory.

    Args:
      config: settings.
      source: where the records come from.
      seed: the run's seed, an int.
      batch_size: examples an element, that is, of one replica.
      start_step: step to begin at, as if the steps before had been taken.
      input_context: `tf.distribute.InputContext`, or None for a single pipeline.

    Returns:
      dataset of (views [batch, size, size, 3 * number of views] float32 in [0, 1], labels [batch] int64).
    """
    shards, shard = _shards(input_context)
    split = config.train_split
    in_epoch = source.num_examples(split, shards, shard)
    first_epoch, done = divmod(start_step * (config.train_batch_size // shards), in_epoch)
    cache = config.cache_dataset or source.is_sparse(split)
    cached = source.records(split, None, shards, shard).cache() if cache else None
    read = source.reader(split) if cached is None else lambda *record: record

    @tf.autograph.experimental.do_not_convert
    def epoch(number):
        order, views = (rng.scalar_seed(rng.fold_in(tf.constant([seed, purpose], tf.int64), number))
                        for purpose in (_ORDER, _VIEWS))
        if cached is None:
            references = source.references(split, order, shards, shard, config.shuffle_buffer_mb)
        else:
            references = cached.shuffle(in_epoch, seed=order, reshuffle_each_iteration=False)
        return _with_seed(views, references)

    records = tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch).skip(done)
    dataset = _batch_views(records, read, source, config, batch_size)
    # Otherwise several hosts ask each other at every step whether there is one more.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return _read_ahead(dataset)


def eval_batch_size(config: Config, source: Source, split: str, replicas: int) -> int:
    """Returns the examples of an evaluation batch on each replica, for `build_eval_dataset`.

    That is `config.eval_batch_size` over the replicas, but not more than the split has for each of them: batches are
    filled up, and larger ones would only take memory.
    """
    return max(min(config.eval_batch_size // replicas, -(-source.num_examples(split) // replicas)), 1)


def build_eval_dataset(config: Config, source: Source, split: str, batch_size: int,
                       input_context: tf.distribute.InputContext | None = None, replicas: int = 1) -> tf.data.Dataset:
    """Every example of a split once, in order, in full batches; the last ones are filled up with weight 0.

    Args:
      config: settings.
      source: where the records come from.
      split: name, slices allowed.
      batch_size: examples an element, that is, of one replica.
      input_context: `tf.distribute.InputContext`, or None for a single pipeline.
      replicas: number of replicas that this pipeline feeds.

    Returns:
      dataset of (images [batch, size, size, 3] float32 in [0, 1], labels [batch] int64, or [batch, classes] where
      examples have several, weights [batch] float32).
    """
    shards, shard = _shards(input_context)
    size = config.image_size

    @tf.autograph.experimental.do_not_convert
    def preprocess(key, item, label):
        image = data_util.preprocess_image(source.decode(item), size, size, test_crop=config.center_crop_eval)
        return image, label, tf.ones([])

    dataset = source.records(split, None, shards, shard).map(preprocess, tf.data.AUTOTUNE)
    most = max(source.num_examples(split, shards, number) for number in range(shards))
    elements = -(-most // (batch_size * replicas)) * replicas
    missing = elements * batch_size - source.num_examples(split, shards, shard)
    filler = (tf.zeros([size, size, 3]), source.no_label(), tf.zeros([]))
    dataset = dataset.concatenate(tf.data.Dataset.from_tensors(filler).repeat(missing))
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def build_view_pairs(config: Config, source: Source, split: str, seed: int, batch_size: int) -> tf.data.Dataset:
    """Augmented views of a split's examples, each once, in order; a last incomplete batch is left out.

    Returns:
      dataset of (views [batch, size, size, 3 * number of views] float32 in [0, 1], labels [batch] int64).
    """
    seed = rng.scalar_seed(tf.constant([seed, _EVAL_VIEWS], tf.int64))
    records = _with_seed(seed, source.references(split))
    dataset = _batch_views(records, source.reader(split), source, config, batch_size)
    return _read_ahead(dataset)


def _shards(input_context):
    if input_context is None:
        return 1, 0
    return input_context.num_input_pipelines, input_context.input_pipeline_id


def distribute(strategy: tf.distribute.Strategy, build: Callable[[tf.distribute.InputContext, int], tf.data.Dataset]
              ) -> Any:
    """The strategy's dataset of `build(input_context, replicas fed by this pipeline)`."""
    def function(context):
        return build(context, context.num_replicas_in_sync // context.num_input_pipelines)
    return strategy.distribute_datasets_from_function(function)
