"""`tf.data` input pipelines that read, augment and batch the examples from a source.

The order and the augmentation of examples depend only on the seed, the epoch and the examples'
keys. Examples are shuffled before they are decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import data_util
from augmentation.policies import view_policies
from config import Config
from runtime import rng
from runtime.pipelines import PARALLEL_CALLS, batched, with_prefetching
from sources.files import FileSource
from sources.source import Source

# indices of random-number streams, folded into the run's seed
_ORDER, _VIEWS, _EVAL_VIEWS = range(3)
_DECODING_RATIOS = (1, 2, 4, 8)  # at which libjpeg decodes fast


def _chunk_size(size: int, batch_size: int) -> int:
    """Returns the size of a chunk, which is a group of images to augment together. The size divides `batch_size`.

    To fit in the CPU cache, a chunk is either a single image or has no more pixels than 32 images
    of 32 x 32 pixels. Each batch consists of whole chunks, so a resumed run uses the same chunks.
    """
    limit = max(32**3 // size**2, 1)
    return max(count for count in range(1, min(limit, batch_size) + 1) if batch_size % count == 0)


def _decode_windows(
    source: Source, item: tf.Tensor, draw: Callable, size: int, scaled: bool = False
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decodes only the image region covered by the crop windows.

    Args:
      source: the data set, which decodes items.
      item: an encoded or decoded image.
      draw: function that maps the image shape, int32 [3], to the offsets and the sizes of the
        windows, each int32 [windows, 3].
      size: side length, in pixels, to which the windows will be resized.
      scaled: whether to decode JPEG images at 1/2, 1/4 or 1/8 of their size, rounded up, if the sides
        of all windows stay at least `size` long. Offsets are rounded, and sizes are rounded down.

    Returns:
      The region (uint8 [h, w, 3]), the window offsets within the region, and the window sizes.
    """

    def decode_all():
        image = source.decode(item)
        return image, *draw(tf.shape(image))

    def decode_jpeg_region():
        shape = tf.image.extract_jpeg_shape(item)
        begins, sizes = draw(shape)
        if scaled:
            # libjpeg combines pixels in the frequency domain, which also skips most of the work.
            ratio = tf.reduce_min(sizes[:, :2]) // size
            halvings = tf.reduce_sum(tf.cast(ratio >= _DECODING_RATIOS[1:], tf.int32))
            divisor = tf.gather(_DECODING_RATIOS, halvings)
            begins, sizes = (begins + divisor // 2) // divisor, sizes // divisor
            shape = -(-shape // divisor)
        # Add a one-pixel margin, since the decoder interpolates colors differently at the edge of
        # the region.
        low = tf.maximum(tf.reduce_min(begins[:, :2], 0) - 1, 0)
        high = tf.minimum(tf.reduce_max(begins[:, :2] + sizes[:, :2], 0) + 1, shape[:2])
        decode = functools.partial(
            tf.image.decode_and_crop_jpeg, item, tf.concat([low, high - low], 0), channels=3
        )
        region = (
            tf.switch_case(
                halvings, [functools.partial(decode, ratio=ratio) for ratio in _DECODING_RATIOS]
            )
            if scaled
            else decode()
        )
        return region, begins - tf.pad(low, [[0, 1]]), sizes

    # For small images, detecting the format costs more than a full decode. The other decoder does
    # not select bands.
    if item.dtype != tf.string or size <= 32 or source.conversion.bands:
        return decode_all()
    return tf.cond(tf.io.is_jpeg(item), decode_jpeg_region, decode_all)


def _batch_views(
    records: tf.data.Dataset, read: Callable, source: Source, config: Config, batch_size: int
) -> tf.data.Dataset:
    """Augments examples and batches their views.

    Args:
      records: dataset of (seed, reference); `seed` is an int64 scalar that is the same for all
        examples in an epoch.
      read: maps a reference to (key, item, label).
      source: decodes items.
      config: settings.
      batch_size: examples per batch; an incomplete last batch is dropped.

    Returns:
      Dataset of (views, labels), where views is a tuple of float32 [batch_size, size, size, 3] with
      one tensor for each view. With `--augment_on=device`, dataset of (crops, labels, seeds): the
      views before their operators, in `--crop_dtype`, and the seeds of the examples, int64
      [batch_size, 2].
    """
    policies, size = view_policies(config), config.image_size
    # Both branches use the same crop.
    crop_policies = policies[:1] if config.branch_operators else policies

    # The functions need no conversion, and AutoGraph is slow.
    @tf.autograph.experimental.do_not_convert
    def crop(seed, reference):
        key, item, label = read(*tf.nest.flatten(reference))
        seed = tf.stack([seed, key])

        def draw(shape):
            windows = [
                data_util.random_window(shape, data_util.view_seed(seed, view), policy.area_range)
                for view, policy in enumerate(crop_policies)
            ]
            return map(tf.stack, zip(*windows))

        region, *windows = _decode_windows(source, item, draw, size, config.scaled_decoding)
        crops = [
            data_util.resize_window(region, begin, window_size, size, size)
            for begin, window_size in zip(*map(tf.unstack, windows))
        ]
        if config.crop_dtype == "uint8":
            crops = [tf.clip_by_value(tf.round(255 * image), 0, 255) for image in crops]
        crops = [tf.cast(image, config.crop_dtype) for image in crops]
        return tuple(crops) * (len(policies) // len(crops)), label, seed

    @tf.autograph.experimental.do_not_convert
    def augment(crops, labels, seeds):
        return tuple(data_util.augment_crops(crops, policies, seeds)), labels

    @tf.autograph.experimental.do_not_convert
    def merge(*chunks):
        return tf.nest.map_structure(
            lambda chunk: tf.reshape(chunk, [-1, *chunk.shape[2:]]), chunks
        )

    crops = records.map(crop, PARALLEL_CALLS)
    if config.augment_on == "device":
        return batched(crops, batch_size)
    chunk_size = _chunk_size(size, batch_size)
    chunks = crops.batch(chunk_size, drop_remainder=True).map(augment, PARALLEL_CALLS)
    # `rebatch` would not run in parallel. Merging the first two axes copies nothing.
    return batched(chunks, batch_size // chunk_size).map(merge)


def _with_seed(seed: tf.Tensor, references: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of (seed, reference) pairs."""
    # Use zip instead of map, because calling a function for every record would dominate the cost of
    # this stage.
    return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(seed).repeat(), references))


def build_train_dataset(
    config: Config,
    source: Source,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns the infinite training `tf.data.Dataset` for one input pipeline.

    The shuffle buffer holds up to `config.shuffle_buffer_mb` MB of encoded examples; for image
    folders and `digits`, it holds only a permutation of indices (8 bytes per example). With
    `config.cache_dataset`, all encoded examples are kept in memory. Each core also holds a few
    chunks of decoded views, and two batches are prefetched.

    Args:
      config: settings.
      source: the data set.
      seed: the run's seed, an int.
      batch_size: batch size per replica.
      start_step: step of the first batch; earlier steps are skipped.
      input_context: `tf.distribute.InputContext`, or None for a single pipeline.

    Returns:
      Dataset of (views, labels [batch] int64), where views is a tuple of float32 [batch, size,
      size, 3] in [0, 1], one for each view. With `--augment_on=device`, dataset of (crops, labels,
      seeds), where crops (in `--crop_dtype`) and seeds (int64 [batch, 2]) are arguments of
      `simclr.views`.
    """
    shards, shard = _shards(input_context)
    split = config.train_split
    cache = config.cache_dataset or source.is_sparse(split)
    cached = source.records(split, None, shards, shard).cache() if cache else None
    read = source.reader(split) if cached is None else lambda *record: record
    records = _training_references(config, source, seed, start_step, shards, shard, cached)
    dataset = _batch_views(records, read, source, config, batch_size)
    # If the cardinality were unknown, workers would synchronize at every step to check for the end
    # of the data.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return with_prefetching(dataset)


def _training_references(
    config: Config,
    source: Source,
    seed: int,
    start_step: int,
    shards: int = 1,
    shard: int = 0,
    cached: tf.data.Dataset | None = None,
) -> tf.data.Dataset:
    """Returns the infinite dataset of (seed, reference) from `start_step` on. `cached` contains all records."""
    split = config.train_split
    epoch_size = source.num_examples(split, shards, shard)
    first_epoch, num_skipped = divmod(start_step * (config.train_batch_size // shards), epoch_size)

    @tf.autograph.experimental.do_not_convert
    def records_of_epoch(epoch):
        order, views = (
            rng.scalar_seed(rng.fold_in(tf.constant([seed, purpose], tf.int64), epoch))
            for purpose in (_ORDER, _VIEWS)
        )
        if cached is None:
            references = source.references(split, order, shards, shard, config.shuffle_buffer_mb)
        else:
            references = cached.shuffle(epoch_size, seed=order, reshuffle_each_iteration=False)
        return _with_seed(views, references)

    return (
        tf.data.Dataset.range(first_epoch, tf.int64.max)
        .flat_map(records_of_epoch)
        .skip(num_skipped)
    )


def training_paths(source: FileSource, config: Config, start_step: int) -> list[str]:
    """Returns the paths of all training images, in the order in which they are read from `start_step` on."""
    paths, _ = source.labeled_paths(config.train_split)
    references = _training_references(config, source, config.seed, start_step).take(len(paths))
    order = [int(index) for _, index in references.as_numpy_iterator()]
    return list(dict.fromkeys([paths[index] for index in order] + paths))


def eval_batch_size(config: Config, source: Source, split: str, replicas: int) -> int:
    """Returns the evaluation batch size per replica, for `build_eval_dataset`.

    This is `config.eval_batch_size` divided by the number of replicas, or less for a small split,
    since a larger batch would only contain more padding.
    """
    return max(
        min(config.eval_batch_size // replicas, -(-source.num_examples(split) // replicas)), 1
    )


def build_eval_dataset(
    config: Config,
    source: Source,
    split: str,
    batch_size: int,
    input_context: tf.distribute.InputContext | None = None,
    replicas: int = 1,
) -> tf.data.Dataset:
    """Returns a dataset that contains each example of a split once, in order.

    Padding examples with weight 0 are appended, so that all batches are full.

    Args:
      config: settings.
      source: the data set.
      split: name of a split or slice.
      batch_size: batch size per replica.
      input_context: `tf.distribute.InputContext`, or None for a single pipeline.
      replicas: number of replicas that this pipeline feeds.

    Returns:
      Dataset of (images [batch, size, size, 3] float32 in [0, 1], labels [batch] int64 ([batch,
      classes] for multi-label data), weights [batch] float32).
    """
    shards, shard = _shards(input_context)
    size = config.image_size

    @tf.autograph.experimental.do_not_convert
    def preprocess(key, item, label):
        image = data_util.preprocess_image(
            source.decode(item),
            size,
            size,
            test_crop=config.center_crop_eval,
            resize=config.eval_resize,
        )
        return image, label, tf.ones([])

    dataset = source.records(split, None, shards, shard).map(preprocess, PARALLEL_CALLS)
    # All shards get the same number of batches.
    largest_shard = max(source.num_examples(split, shards, index) for index in range(shards))
    num_batches = -(-largest_shard // (batch_size * replicas)) * replicas
    num_padding = num_batches * batch_size - source.num_examples(split, shards, shard)
    padding = (tf.zeros([size, size, 3]), source.no_label(), tf.zeros([]))
    dataset = dataset.concatenate(tf.data.Dataset.from_tensors(padding).repeat(num_padding))
    return with_prefetching(batched(dataset, batch_size))


def build_view_pairs(
    config: Config, source: Source, split: str, seed: int, batch_size: int
) -> tf.data.Dataset:
    """Returns a dataset of the augmented views of all examples in a split, in order.

    An incomplete last batch is dropped.

    Returns:
      Dataset of (views, labels [batch] int64), where views is a tuple of float32 [batch, size,
      size, 3] in [0, 1], one for each view.
    """
    seed = rng.scalar_seed(tf.constant([seed, _EVAL_VIEWS], tf.int64))
    records = _with_seed(seed, source.references(split))
    config = config.replace(augment_on="host", crop_dtype="float32")
    return with_prefetching(_batch_views(records, source.reader(split), source, config, batch_size))


def _shards(input_context: tf.distribute.InputContext | None) -> tuple[int, int]:
    if input_context is None:
        return 1, 0
    return input_context.num_input_pipelines, input_context.input_pipeline_id


def distribute(
    strategy: tf.distribute.Strategy,
    build: Callable[[tf.distribute.InputContext, int], tf.data.Dataset],
) -> Any:
    """Returns a distributed dataset that combines the datasets of all input pipelines.

    `build(input_context, num_replicas)` returns the dataset for one input pipeline, which feeds
    `num_replicas` replicas. Without a strategy, a GPU receives each batch while it processes the
    previous one.
    """

    def function(context):
        return build(context, context.num_replicas_in_sync // context.num_input_pipelines)

    dataset = strategy.distribute_datasets_from_function(function)
    gpus = tf.config.list_logical_devices("GPU")
    # The datasets of the other strategies are of other types, and also copy batches in advance.
    if isinstance(dataset, tf.data.Dataset) and gpus:
        copy = tf.data.experimental.prefetch_to_device(gpus[0].name, buffer_size=1)
        # The iterators on the two devices run separately, and both need the options.
        dataset = dataset.apply(copy).with_options(dataset.options())
    return dataset
