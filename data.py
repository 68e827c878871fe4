"""Data sets into per-replica `tf.data`: TFDS, folders of images, and the embedded `digits`.

A source yields undecoded records `(key, item, label)`: `key` is an int64 that names the example for good, `item` the
encoded image (or a small uint8 array), `label` an int64, -1 without labels. Order, augmentation and position are
functions of seed, epoch and key alone. What is shuffled is encoded; decoding comes after.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import pathlib

import numpy as np
import tensorflow as tf

import data_util
import progress
from config import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
SPLIT_FOLDERS = ("train", "validation", "val", "test")
_ORDER, _VIEWS, _EVAL_VIEWS = range(3)  # purposes of random draws, folded into the run's seed
_MB = 2**20

# -------------------------------------------------------------------------------------------------------- sources


class Source:
    """A data set. Each kind has

    - `split_names`: names of the whole splits;
    - `num_examples(split, shards=1, shard=0)`: examples of a split (slices allowed), or of one of its shards;
      ValueError for an unknown split;
    - `handles(split, seed=None, shards=1, shard=0, buffer_mb=1024)`: a dataset of what stands for an example until it
      is needed. `seed` is an int64 scalar, a tensor or not: another order for each; None: always the same. `buffer_mb`:
      most memory for shuffling, where examples have no random access.
    - `fetch(split)`: a function from a handle to `(key, item, label)`;
    - `restrict(split, fraction, seed)`: from then on, `split` is `choose_balanced` of its labelled examples;
      `UserError` if these are too few.
    """

    name: str
    class_names: list[str] | None

    @property
    def num_classes(self):
        """Number of classes, or None without labels."""
        return None if self.class_names is None else len(self.class_names)

    def is_sparse(self, split):
        """Whether reading the split means to read much more than its examples, so that they should be cached."""
        del split
        return False

    def records(self, split, seed=None, shards=1, shard=0, buffer_mb=1024):
        """A dataset of `(key, item, label)`; arguments as for `handles`."""
        return self.handles(split, seed, shards, shard, buffer_mb).map(self.fetch(split), tf.data.AUTOTUNE)

    def decode(self, item):
        """An item as uint8 [h, w, 3]."""
        return tf.io.decode_image(item, channels=3, expand_animations=False)


def choose_balanced(labels, fraction, seed):
    """A share of labelled examples with as many of every class, as far as there are.

    Args:
      labels: int [n]; -1: no label, never chosen.
      fraction: in (0, 1], of the labelled examples, rounded.
      seed: which ones.

    Returns:
      sorted indices. Raises ValueError if there would be a class without examples.
    """
    random = np.random.default_rng(seed)
    members = {label: random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels[labels >= 0])}
    wanted = round(fraction * sum(map(len, members.values())))
    if wanted < len(members):
        raise ValueError(f"{wanted} examples for {len(members)} classes")
    # One more of every class, in an order drawn anew for each round, until there are enough.
    turns = [(turn, random.random(), label) for label, rows in members.items() for turn in range(len(rows))]
    chosen = [members[label][turn] for turn, _, label in sorted(turns)[:wanted]]
    return np.sort(np.array(chosen, np.int64))


def _choose(labels, split, fraction, seed):
    """`choose_balanced`, its error told to the user."""
    try:
        return choose_balanced(labels, fraction, seed)
    except ValueError as error:
        least = len(np.unique(labels[labels >= 0])) / max((labels >= 0).sum(), 1)
        raise UserError(f"--label_fraction={fraction:g} of --train_split={split} is {error}: use at least {least:.2g}"
                        ) from error


class IndexedSource(Source):
    """Examples with random access: every epoch is a full permutation."""

    def __init__(self, name, splits, class_names, load):
        """`splits`: name -> (items, labels), two arrays of one length; `load`: from an item's tensor to a record's."""
        self.name = name
        self.class_names = class_names
        self._splits = splits
        self._load = load
        self._selected = {}

    @property
    def split_names(self):
        """Names of the whole splits."""
        return sorted(self._splits)

    def num_examples(self, split, shards=1, shard=0):
        """See `Source`."""
        return len(self._select(split)[0][shard::shards])

    def _select(self, split):
        """Keys, items and labels of a split, in an order of its own: slices of sorted files would miss classes."""
        if split not in self._selected:
            self._selected[split] = self._permute(split)
        return self._selected[split]

    def _permute(self, split):
        import tensorflow_datasets as tfds  # Here: it takes a while, and only slices need it.

        infos = {name: tfds.core.SplitInfo(name=name, shard_lengths=[len(items)], num_bytes=0)
                 for name, (items, _) in self._splits.items()}
        parts = []
        for part in tfds.core.ReadInstruction.from_spec(split).to_absolute(infos):
            items, labels = self._splits[part.splitname]
            index = np.random.default_rng(0).permutation(len(items))[part.from_:part.to]
            offset = sorted(self._splits).index(part.splitname) << 40
            parts.append((index + offset, items[index], labels[index]))
        return [np.concatenate(column) for column in zip(*parts)]

    def restrict(self, split, fraction, seed):
        """See `Source`."""
        columns = self._select(split)
        rows = _choose(columns[2], split, fraction, seed)
        self._selected[split] = [column[rows] for column in columns]

    def handles(self, split, seed=None, shards=1, shard=0, buffer_mb=1024):
        """See `Source`; `buffer_mb` has no use, since only indices are shuffled."""
        count = len(self._select(split)[0])
        indices = tf.data.Dataset.range(count)
        if seed is not None:
            indices = indices.shuffle(count, seed=seed, reshuffle_each_iteration=False)
        return indices.shard(shards, shard)

    def fetch(self, split):
        """See `Source`."""
        keys, items, labels = (tf.constant(column) for column in self._select(split))
        return lambda index: (keys[index], self._load(items[index]), labels[index])

    def decode(self, item):
        """See `Source`."""
        return item if item.dtype == tf.uint8 else super().decode(item)


def digits_source():
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels; four fifths train, one fifth test, stratified."""
    from sklearn import datasets, model_selection  # Here: only this data set needs them.

    digits = datasets.load_digits()
    images = np.repeat(np.uint8(np.round(digits.images * 255 / 16))[..., np.newaxis], 3, axis=-1)
    train, test = model_selection.train_test_split(
        np.arange(len(images)), test_size=0.2, stratify=digits.target, random_state=0)
    labels = digits.target.astype(np.int64)
    splits = {name: (images[rows], labels[rows]) for name, rows in (("train", train), ("test", test))}
    return IndexedSource("digits", splits, [str(digit) for digit in range(10)], tf.identity)


def folder_source(path):
    """Images under `path`: sub-folders are classes, with or without split folders above them; none: unlabelled.

    Raises `UserError` for a folder that is missing, empty, or mixes images with class folders.
    """
    root = pathlib.Path(path).expanduser()
    flag = f"--dataset=folder:{path}"
    if not root.is_dir():
        raise UserError(f"{flag}: there is no such directory; check the path")
    children = _folders(root)
    has_splits = bool(children) and all(child.name in SPLIT_FOLDERS for child in children)
    roots = {child.name: child for child in children} if has_splits else {"train": root}
    found = {split: _scan(folder, flag) for split, folder in roots.items()}
    if {"val", "validation"} <= set(roots):
        raise UserError(f"{flag} has both val/ and validation/: keep one of them")
    if has_splits and _images(root):
        raise UserError(f"{flag} has images beside its split folders: move them into one of them")
    found = {("validation" if split == "val" else split): files for split, files in found.items() if files}
    if not found:
        raise UserError(f"{flag} has no images ({', '.join(IMAGE_SUFFIXES)}): check the path")
    names = sorted({name for files in found.values() for name, _ in files if name is not None})
    if names and any(name is None for files in found.values() for name, _ in files):
        raise UserError(f"{flag} has class folders in one split and none in another: use one layout")
    number = {name: i for i, name in enumerate(names)} or {None: -1}
    splits = {split: (np.array([file for _, file in files]), np.array([number[name] for name, _ in files], np.int64))
              for split, files in found.items()}
    return IndexedSource(f"folder:{path}", splits, names or None, tf.io.read_file)


def _folders(path):
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _images(path):
    return sorted(str(child) for child in path.iterdir()
                  if child.suffix.lower() in IMAGE_SUFFIXES and not child.name.startswith(".") and child.is_file())


def _scan(folder, flag):
    """(class name or None, file) of every image below `folder`, at any depth."""
    flat, classes = _images(folder), _folders(folder)
    if flat and classes:
        raise UserError(
            f"{flag}: {folder} has both images ({os.path.basename(flat[0])}, ...) and sub-folders "
            f"({classes[0].name}, ...): sub-folders are classes, so move the images into them")
    nested = [(child.name, os.path.join(where, name)) for child in classes
              for where, _, names in sorted(os.walk(child)) for name in sorted(names)
              if name.lower().endswith(IMAGE_SUFFIXES)
              and not any(part.startswith(".") for part in pathlib.Path(where, name).relative_to(child).parts)]
    return [(None, file) for file in flat] + nested


class TfdsSource(Source):
    """A prepared TFDS data set, read from its TFRecord files in an order that a seed decides."""

    def __init__(self, name, data_dir):
        """Prepares the data set if need be. Raises `UserError` if it is unknown or cannot be had."""
        import tensorflow_datasets as tfds  # Here: it takes a while, and the other sources do without.

        self.name = name
        self._builder = _tfds_builder(tfds, name, data_dir)
        info = self._builder.info
        if str(info.file_format.value) != "tfrecord":
            raise UserError(f"--dataset={name} is stored as {info.file_format.value}: prepare it as tfrecord")
        image, label = self._find_features(tfds, info)
        wanted = {key: True for key in (image, label) if key}
        self._image, self._label = image, label
        self._features = tfds.decode.PartialDecoding(wanted).extract_features(info.features)
        self._decoders = {image: tfds.decode.SkipDecoding()}
        self._kept = {}  # split -> sorted keys of the examples that it is restricted to
        self.class_names = list(info.features[label].names) if label else None

    def _find_features(self, tfds, info):
        """Names of the image and of the class label (or None)."""
        names = info.supervised_keys if info.supervised_keys and len(info.supervised_keys) == 2 else ("image", "label")
        image, label = names
        features = dict(info.features.items())
        if not isinstance(features.get(image), tfds.features.Image):
            raise UserError(f"--dataset={self.name} has no image to train on: its features are {', '.join(features)}")
        return image, label if isinstance(features.get(label), tfds.features.ClassLabel) else None

    @property
    def split_names(self):
        """Names of the whole splits."""
        return sorted(self._builder.info.splits)

    def _files(self, split, shards, shard):
        """Instructions of a shard: whole files if there are enough of them, else all (and records are divided)."""
        files = self._builder.info.splits[split].file_instructions
        return files[shard::shards] if len(files) >= shards else files

    def num_examples(self, split, shards=1, shard=0):
        """See `Source`."""
        if split in self._kept:
            return len(range(shard, len(self._kept[split]), shards))
        files = self._files(split, shards, shard)
        if len(self._builder.info.splits[split].file_instructions) >= shards:
            return sum(file.take if file.take >= 0 else file.examples_in_shard - file.skip for file in files)
        total = self._builder.info.splits[split].num_examples
        return len(range(shard, total, shards))

    def handles(self, split, seed=None, shards=1, shard=0, buffer_mb=1024):
        """See `Source`. Files are interleaved in an order drawn from the seed, then records shuffled in a buffer."""
        sparse = self.is_sparse(split)
        files = self._files(split, 1 if sparse else shards, 0 if sparse else shard)
        by_records = sparse or len(self._builder.info.splits[split].file_instructions) < shards
        table = tf.data.Dataset.from_tensor_slices((
            [file.filename for file in files], tf.constant([file.skip for file in files], tf.int64),
            tf.constant([file.take for file in files], tf.int64), [_file_key(file.filename) for file in files]))
        if seed is not None:
            table = table.shuffle(len(files), seed=seed, reshuffle_each_iteration=False)
        records = table.interleave(_read_file, cycle_length=min(len(files), 16), block_length=16,
                                   num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if sparse:
            kept = tf.constant(self._kept[split])
            last = len(self._kept[split]) - 1
            records = records.filter(lambda key, _: kept[tf.minimum(tf.searchsorted(kept, [key])[0], last)] == key)
        if by_records:
            records = records.shard(shards, shard)
        if seed is not None:
            size = self.shuffle_buffer_size(split, buffer_mb, shards, shard)
            records = records.shuffle(size, seed=seed + 1, reshuffle_each_iteration=False)
        return records

    def restrict(self, split, fraction, seed):
        """See `Source`; reads all of the split."""
        read = self.handles(split).map(self._key_and_label, tf.data.AUTOTUNE).batch(1024)
        tracked = progress.track(read.as_numpy_iterator(), None, f"labels of {split}")
        keys, labels = (np.concatenate(column) for column in zip(*tracked))
        order = np.argsort(keys)  # Which does not depend on the order of reading.
        self._kept[split] = keys[order][_choose(labels[order], split, fraction, seed)]

    def _key_and_label(self, key, serialized):
        key, _, label = self._parse(key, serialized)
        return key, label

    def is_sparse(self, split):
        """See `Source`; record files have no random access."""
        return split in self._kept

    def shuffle_buffer_size(self, split, buffer_mb, shards=1, shard=0):
        """Examples that fit into `buffer_mb` at their mean encoded size, at most all of the shard."""
        whole = [self._builder.info.splits[name] for name in self.split_names]
        mean_bytes = max(sum(info.num_bytes for info in whole) / max(sum(info.num_examples for info in whole), 1), 1)
        return max(min(self.num_examples(split, shards, shard), int(buffer_mb * _MB / mean_bytes)), 1)

    def fetch(self, split):
        """See `Source`; a handle is a key and a serialized example."""
        del split
        return self._parse

    def _parse(self, key, serialized):
        example = self._features.deserialize_example(serialized, decoders=self._decoders)
        label = tf.cast(example[self._label], tf.int64) if self._label else tf.constant(-1, tf.int64)
        return key, example[self._image], label


def _file_key(filename):
    """31 bits that name a record file wherever it lies."""
    return int.from_bytes(hashlib.sha256(os.path.basename(filename).encode()).digest()[:4], "big") >> 1 << 32


def _read_file(filename, skip, take, file_key):
    """(key, serialized example) of the wanted part of one record file."""
    # Zipped, not enumerated and mapped: a function called for every record would cost ten times the reading.
    keys = tf.data.Dataset.range(file_key, file_key + (1 << 32))
    return tf.data.Dataset.zip((keys, tf.data.TFRecordDataset(filename))).skip(skip).take(take)


def _tfds_builder(tfds, name, data_dir):
    """The prepared builder of a data set."""
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as error:
        near = difflib.get_close_matches(name, ["digits", *tfds.list_builders()], 1)
        hint = f"did you mean {near[0]}?" if near else "use a TFDS name, digits or folder:PATH"
        raise UserError(f"--dataset={name} is not known ({_first_line(error)}): {hint}") from error
    if not builder.info.splits:
        try:
            builder.download_and_prepare()
        except Exception as error:  # Whatever a download can raise, the remedy is the same.
            raise UserError(
                f"--dataset={name} is not prepared in {os.path.dirname(os.path.dirname(builder.data_dir))} and could "
                f"not be made ({_first_line(error)}): point --data_dir at a prepared copy (README, 'Data')") from error
    return builder


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def open_source(dataset, data_dir=None) -> Source:
    """The source that `--dataset` names. Raises `UserError`."""
    if dataset == "digits":
        return digits_source()
    if dataset.startswith("folder:"):
        return folder_source(dataset[len("folder:"):])
    return TfdsSource(dataset, data_dir)


# --------------------------------------------------------------------------------------------------------- checks


def check_split(source, flag, split):
    """Examples of a split. Raises `UserError` if it is unknown or empty."""
    try:
        count = source.num_examples(split)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"--{flag}={split}: {source.name} has no such split; it has {', '.join(source.split_names)}, and slices "
            "such as train[:90%]") from error
    if count == 0:
        raise UserError(f"--{flag}={split} of {source.name} is empty: widen the slice")
    return count


def choose_eval_split(source, eval_split, given):
    """The evaluation split: `eval_split`, or `test` if it was not `given` and does not exist."""
    if not given and eval_split not in source.split_names and "test" in source.split_names:
        return "test"
    return eval_split


# ------------------------------------------------------------------------------------------------------- datasets


def view_policies(config):
    """The augmentation policy of each view: two views while pretraining, else one; crop and flip in fine-tuning."""
    geometry = dict(min_area=config.min_crop_area, flip=config.random_flip)
    if not config.distorts_views:
        return (data_util.crop_and_flip_policy(**geometry),)
    policy = data_util.simclr_policy(config.color_jitter_strength, config.brightness, **geometry)
    return (policy,) * (2 if config.pretraining else 1)


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


def _batch_views(records, fetch, source, policies, size, batch_size):
    """Augments and batches.

    Args:
      records: dataset of (seed, handle); `seed` is an int64 scalar, the same for all examples of an epoch.
      fetch: from a handle to (key, item, label).
      source: decodes items.
      policies: one a view.
      size: of a view.
      batch_size: examples an element; a last incomplete batch is left out.

    Returns:
      dataset of (views [batch_size, size, size, 3 * len(policies)] float32, labels [batch_size]).
    """
    chunk = _chunk_size(size, batch_size)

    def view_seed(seed, view):
        return data_util.nth_seed(seed, view, data_util.VIEW)

    @tf.autograph.experimental.do_not_convert  # Nothing to convert, and long to look for it.
    def crop(seed, handle):
        key, item, label = fetch(*tf.nest.flatten(handle))
        seed = tf.stack([seed, key])

        def draw(shape):
            return zip(*[data_util.window_by_policy(shape, policy, view_seed(seed, view))
                         for view, policy in enumerate(policies)])

        part, begins, sizes = _decode_windows(source, item, draw, size)
        crops = [data_util.resize_window(part, *window, size, size) for window in zip(begins, sizes)]
        return seed, label, *crops

    @tf.autograph.experimental.do_not_convert
    def finish(seeds, labels, *crops):
        planes = [data_util.finish_by_policy(data_util.to_planes(images), policy, view_seed(seeds, view))
                  for view, (images, policy) in enumerate(zip(crops, policies))]
        return data_util.from_planes(sum(planes, [])), labels

    if chunk == 1:
        views = records.map(lambda *record: _first(finish(*_as_batch(crop(*record)))), tf.data.AUTOTUNE)
        return views.batch(batch_size, drop_remainder=True)
    chunks = records.map(crop, tf.data.AUTOTUNE).batch(chunk, drop_remainder=True).map(finish, tf.data.AUTOTUNE)
    batches = chunks.batch(batch_size // chunk, drop_remainder=True)
    return batches.map(lambda views, labels: (
        tf.reshape(views, [batch_size, *views.shape[2:]]), tf.reshape(labels, [batch_size])))


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


def _with_seed(seed, handles):
    """(seed, handle) for every handle."""
    # Zipped, not mapped: a function call for every record would cost more than all else that happens to it here.
    return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(seed).repeat(), handles))


def build_train_dataset(config, source, seed, batch_size, start_step=0, input_context=None):
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
    fetch = source.fetch(split) if cached is None else lambda *record: record

    @tf.autograph.experimental.do_not_convert
    def epoch(number):
        order, views = (data_util.scalar_seed(data_util.fold_in(tf.constant([seed, purpose], tf.int64), number))
                        for purpose in (_ORDER, _VIEWS))
        if cached is None:
            handles = source.handles(split, order, shards, shard, config.shuffle_buffer_mb)
        else:
            handles = cached.shuffle(in_epoch, seed=order, reshuffle_each_iteration=False)
        return _with_seed(views, handles)

    records = tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch).skip(done)
    dataset = _batch_views(records, fetch, source, view_policies(config), config.image_size, batch_size)
    # Otherwise several hosts ask each other at every step whether there is one more.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return _read_ahead(dataset)


def build_eval_dataset(config, source, split, batch_size, input_context=None, replicas=1):
    """Every example of a split once, in order, in full batches; the last ones are filled up with weight 0.

    Args:
      config: settings.
      source: where the records come from.
      split: name, slices allowed.
      batch_size: examples an element, that is, of one replica.
      input_context: `tf.distribute.InputContext`, or None for a single pipeline.
      replicas: number of replicas that this pipeline feeds.

    Returns:
      dataset of (images [batch, size, size, 3] float32 in [0, 1], labels [batch] int64, weights [batch] float32).
    """
    shards, shard = _shards(input_context)
    size = config.image_size

    @tf.autograph.experimental.do_not_convert
    def preprocess(key, item, label):
        image = data_util.preprocess_image(source.decode(item), size, size, test_crop=size > 32)
        return image, label, tf.ones([])

    dataset = source.records(split, None, shards, shard).map(preprocess, tf.data.AUTOTUNE)
    most = max(source.num_examples(split, shards, number) for number in range(shards))
    elements = -(-most // (batch_size * replicas)) * replicas
    missing = elements * batch_size - source.num_examples(split, shards, shard)
    filler = (tf.zeros([size, size, 3]), tf.constant(-1, tf.int64), tf.zeros([]))
    dataset = dataset.concatenate(tf.data.Dataset.from_tensors(filler).repeat(missing))
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def build_view_pairs(config, source, split, seed, batch_size):
    """Augmented views of a split's examples, each once, in order; a last incomplete batch is left out.

    Returns:
      dataset of (views [batch, size, size, 3 * number of views] float32 in [0, 1], labels [batch] int64).
    """
    seed = data_util.scalar_seed(tf.constant([seed, _EVAL_VIEWS], tf.int64))
    records = _with_seed(seed, source.handles(split))
    dataset = _batch_views(records, source.fetch(split), source, view_policies(config), config.image_size, batch_size)
    return _read_ahead(dataset)


def _shards(input_context):
    if input_context is None:
        return 1, 0
    return input_context.num_input_pipelines, input_context.input_pipeline_id


def distribute(strategy, build):
    """The strategy's dataset of `build(input_context, replicas fed by this pipeline)`."""
    def function(context):
        return build(context, context.num_replicas_in_sync // context.num_input_pipelines)
    return strategy.distribute_datasets_from_function(function)
