"""Data sets from TensorFlow Datasets (TFDS)."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from runtime import console, progress
from runtime.errors import UserError, first_line
from runtime.pipelines import PARALLEL_CALLS, with_prefetching
from sources import label_subsets
from sources.source import Source

_READ_BYTES = 2**23  # per record file, for disks and networks with a high latency
_BLOCK = 64  # number of records of an array_record file that are read at a time


class TfdsSource(Source):
    """A TFDS data set, read from prepared TFRecord files in an order that depends only on a seed."""

    def __init__(
        self,
        name: str,
        data_dir: str | None,
        may_prepare: bool,
        image_key: str | None,
        label_key: str | None,
    ):
        """Opens the data set, and downloads and prepares it if necessary.

        Args:
          name: name of the TFDS builder, with config and version if needed.
          data_dir: directory of the prepared data, or None for the TFDS default.
          may_prepare: whether data that is not prepared may be downloaded and prepared.
          image_key: name of the feature with images, or None to choose it by its type.
          label_key: name of the feature with labels, or None to choose it by name and type.

        Raises:
          UserError: the data set is unknown, cannot be prepared or opened, or has no images.
        """
        import tensorflow_datasets as tfds  # Imported here because the import is slow.

        self.name = name
        self._info = info = _tfds_builder(tfds, name, data_dir, may_prepare).info
        self._file_format = info.file_format.value
        features, keys = dict(info.features), info.supervised_keys or ()
        self._image = self._find_image(tfds, features, image_key, [*keys[:1], "image"])
        self._label = self._find_label(tfds, features, label_key, [*keys[1:], "label", "labels"])
        if self._label is None and len(features) > 1:
            console.log(
                f"{name}: no labels; --label_key selects one of"
                f" {', '.join(sorted(features.keys() - {self._image}))}"
            )
        classes = features.get(self._label)
        self.multi_label = isinstance(classes, tfds.features.Sequence)
        # PASCAL VOC also lists the classes of easy objects.
        is_voc = self._label == "labels" and "labels_no_difficult" in features
        self._easy_label = "labels_no_difficult" if is_voc else None
        features_read = {self._image, self._label, self._easy_label} - {None}
        self._features = tfds.decode.PartialDecoding(features_read).extract_features(info.features)
        self._decoders = {self._image: tfds.decode.SkipDecoding()}
        # Map splits to the sorted keys of the examples chosen by `restrict`.
        self._restricted, self._labeled = {}, {}
        self.class_names = None
        if classes is not None:
            names = getattr(getattr(classes, "feature", classes), "names", None)
            self.class_names = list(names or self._names_of_integers())

    def drop_labels(self, class_names: list[str] | None = None) -> None:
        """See `Source`."""
        super().drop_labels(class_names)
        self._label = None

    def _find_image(
        self, tfds: Any, features: dict, given: str | None, preferred: Sequence[str]
    ) -> str:
        """Returns the name of the image feature: `given`, the first of `preferred`, or the only one."""
        images = [name for name in features if isinstance(features[name], tfds.features.Image)]
        image = given or _choose(preferred, images, images)
        if image not in images:
            kinds = ", ".join(
                f"{name} ({type(value).__name__})" for name, value in sorted(features.items())
            )
            problem, remedy = "no image feature", "Choose an image data set"
            if images:
                problem, remedy = "several image features", "Set --image_key"
            if image:
                problem = f"no image feature {image}"
            raise UserError(
                f"--dataset={self.name}: the data set has {problem}; its features are {kinds}."
                f" {remedy}."
            )
        if np.issubdtype(features[image].np_dtype, np.floating):
            raise UserError(
                f"--dataset={self.name}: the pixels of {image} are floating-point numbers, which are"
                " not supported. Set --image_key, or choose another data set."
            )
        return image

    def _find_label(
        self, tfds: Any, features: dict, given: str | None, preferred: Sequence[str]
    ) -> str | None:
        """Returns the name of the label feature: `given`, one of `preferred`, the only one with classes, or None."""
        labels = [
            name
            for name, value in features.items()
            if isinstance(getattr(value, "feature", value), tfds.features.ClassLabel)
        ]
        integers = [
            name
            for name, value in features.items()
            if isinstance(value, tfds.features.Tensor)
            and value.shape == ()
            and np.issubdtype(value.np_dtype, np.integer)
        ]
        choices = dict.fromkeys([*labels, *integers])
        if given and given not in choices:
            raise UserError(
                f"--label_key={given}: {self.name} has no such labels. Use one of"
                f" {', '.join(choices)}."
            )
        return given or _choose(preferred, choices, labels)

    def _names_of_integers(self) -> list[str]:
        """Returns the numbers from 0 to the largest label as class names. Reads all labels."""
        largest = max(
            int(label)
            for split in self.split_names
            for label in self.references(split)
            .map(lambda key, serialized: self._example(serialized)[self._label], PARALLEL_CALLS)
            .as_numpy_iterator()
        )
        console.log(f"{self.name}: the labels are integers without names, from 0 to {largest}")
        return [str(number) for number in range(largest + 1)]

    @property
    def split_names(self) -> list[str]:
        """Sorted names of the splits, without slices."""
        return sorted(self._info.splits)

    def describe_data(self) -> dict:
        """See `Source`. The dict also contains the version and the config of the data set."""
        info = self._info
        return dict(
            name=info.name,
            version=str(info.version),
            config=info.config_name or None,
            splits={name: info.splits[name].num_examples for name in self.split_names},
        )

    def check_files(self, split: str) -> None:
        """See `Source`. Truncated files are detected only when they are read (see `_read_file`)."""
        paths = {path for path, *_ in self._slices(split)}
        with futures.ThreadPoolExecutor(16) as pool:  # Remote storage has high latency.
            problems = list(filter(None, pool.map(_file_problem, sorted(paths))))
        if problems:
            raise UserError(
                f"--dataset={self.name}: {problems[0]} ({len(problems)} of {len(paths)} files of "
                f"{split} are affected). Copy or prepare the data set again."
            )

    def num_examples(self, split: str, shards: int = 1, shard: int = 0) -> int:
        """See `Source`. A shard consists of whole files if there are enough (see `references`)."""
        files, chosen = self._slices(split), self._restricted.get(split)
        if chosen is None and len(files) >= shards:
            return sum(count for *_, count in files[shard::shards])
        total = self._info.splits[split].num_examples if chosen is None else len(chosen)
        return len(range(shard, total, shards))

    def overlap(self, split: str, other: str) -> int:
        """See `Source`."""
        others = self._slices(other)
        return sum(
            len(range(max(begin, other_begin), min(begin + count, other_begin + other_count)))
            for path, begin, count in self._slices(split)
            for other_path, other_begin, other_count in others
            if path == other_path
        )

    def _slices(self, split: str) -> list[tuple[str, int, int]]:
        """Returns the parts of record files that form a split: path, number of skipped records, number of records."""
        return [
            (
                file.filename,
                file.skip,
                file.take if file.take >= 0 else file.examples_in_shard - file.skip,
            )
            for file in self._info.splits[split].file_instructions
        ]

    def references(
        self,
        split: str,
        seed: int | tf.Tensor | None = None,
        shards: int = 1,
        shard: int = 0,
        buffer_mb: int = 1024,
    ) -> tf.data.Dataset:
        """See `Source`. Interleaves the files in a seeded random order, then shuffles records in a buffer."""
        files, chosen = self._slices(split), self._restricted.get(split)
        shard_by_record = chosen is not None or len(files) < shards
        if not shard_by_record:
            files = files[shard::shards]
        columns = zip(*((*file, _file_key(file[0])) for file in files))
        file_slices = tf.data.Dataset.from_tensor_slices(tuple(map(np.array, columns)))
        if seed is not None:
            file_slices = file_slices.shuffle(len(files), seed=seed, reshuffle_each_iteration=False)
        cycle_length = min(len(files), 16)
        records = file_slices.interleave(
            functools.partial(_read_file, file_format=self._file_format),
            cycle_length,
            block_length=16,
            deterministic=True,
            num_parallel_calls=min(cycle_length, PARALLEL_CALLS),
        )
        if chosen is not None:
            records = records.filter(lambda key, _: _contains(chosen, key))
        if shard_by_record:
            records = records.shard(shards, shard)
        if seed is not None:
            size = self.shuffle_buffer_size(split, buffer_mb, shards, shard)
            records = records.shuffle(size, seed=seed + 1, reshuffle_each_iteration=False)
        return records

    def restrict(self, split: str, fraction: float, seed: int, hide: bool = False) -> None:
        """See `Source`. Reads the whole split to obtain its labels."""
        batches = with_prefetching(
            self.records(split).map(lambda key, item, label: (key, label)).batch(1024)
        )
        batches = progress.track(batches.as_numpy_iterator(), f"labels of {split}")
        keys, labels = (np.concatenate(column) for column in zip(*batches))
        order = np.argsort(keys)  # The choice must not depend on the reading order.
        chosen = keys[order][label_subsets.choose_labeled(labels[order], split, fraction, seed)]
        if hide:
            self._labeled = {**self._labeled, split: chosen}
        else:
            self._restricted = {**self._restricted, split: chosen}

    def drop_unlabeled(self, split: str) -> None:
        """See `Source`. Without labels hidden by `restrict`, all examples of a split have one."""
        if split in self._labeled:
            self._restricted = {**self._restricted, split: self._labeled[split]}

    def is_sparse(self, split: str) -> bool:
        """See `Source`. A restricted split is sparse, because record files do not support random access."""
        return split in self._restricted

    def shuffle_buffer_size(self, split: str, buffer_mb: int, shards: int, shard: int) -> int:
        """Returns the number of average-sized examples that fit into `buffer_mb` MB, at most the size of the shard."""
        info = self._info
        mean_bytes = max(info.dataset_size / info.splits.total_num_examples, 1)
        return max(
            min(self.num_examples(split, shards, shard), int(buffer_mb * 2**20 / mean_bytes)), 1
        )

    def reader(self, split: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """See `Source`. A reference consists of a key and a serialized example."""
        if (labeled := self._labeled.get(split)) is None:
            return self._parse

        def read(key, serialized):
            key, item, label = self._parse(key, serialized)
            return key, item, tf.where(_contains(labeled, key), label, self.no_label())

        return read

    def _example(self, serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._features.deserialize_example(serialized, decoders=self._decoders)

    def _parse(
        self, key: tf.Tensor, serialized: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        example = self._example(serialized)
        return key, example[self._image], self._label_of(example)

    def _label_of(self, example: dict[str, tf.Tensor]) -> tf.Tensor:
        if self._label is None:
            return self.no_label()
        if not self.multi_label:
            label = tf.cast(example[self._label], tf.int64)
            tf.debugging.assert_less(
                label,
                tf.constant(self.num_classes, tf.int64),
                f"{self.name} has labels without a class name",
            )
            return label
        present = self._multi_hot(example[self._label])
        if self._easy_label is None:
            return present
        # 1 for classes with easy objects, -1 for classes with only difficult objects, 0 for absent
        # classes.
        return 2 * self._multi_hot(example[self._easy_label]) - present

    def largest_values(self, split: str, limit: int) -> tuple[float, float]:
        """See `Source`."""
        if self._info.features[self._image].np_dtype != np.uint16:
            return 0.0, 0.0
        values = (
            tf.io.decode_png(item, dtype=tf.uint16).numpy().max()
            for _, item, _ in self.records(split).take(limit)
        )
        return float(max(values)), 65535.0

    def decode(self, item: tf.Tensor) -> tf.Tensor:
        """See `Source`."""
        dtype, bands = self._info.features[self._image].np_dtype, self.conversion.bands
        if dtype == np.uint8 and not bands:
            return super().decode(item)
        values = tf.io.decode_image(item, dtype=dtype, expand_animations=False)
        if bands:
            values = tf.gather(values, [band - 1 for band in bands], axis=-1)
        white = (self.conversion.white_level or 65535) if dtype == np.uint16 else 255
        values = tf.minimum(tf.cast(values, tf.float32) / white, 1)
        return tf.cast(tf.round(255 * values), tf.uint8) + tf.zeros([3], tf.uint8)

    def _multi_hot(self, classes: tf.Tensor) -> tf.Tensor:
        """Converts a list of classes to a multi-hot vector, int64 [classes]."""
        counts = tf.reduce_sum(tf.one_hot(classes, self.num_classes, dtype=tf.int64), 0)
        return tf.minimum(counts, 1)


def _choose(
    preferred: Sequence[str], choices: Collection[str], default: Sequence[str]
) -> str | None:
    """Returns the first of `preferred` that is in `choices`, the only element of `default`, or None."""
    for name in preferred:
        if name in choices:
            return name
    return default[0] if len(default) == 1 else None


def _contains(keys: np.ndarray, key: tf.Tensor) -> tf.Tensor:
    """Returns whether `key`, an int64 scalar, is in `keys`, a sorted int64 array. The result is a bool scalar."""
    row = tf.searchsorted(keys, [key])[0]
    return tf.constant(keys)[tf.minimum(row, len(keys) - 1)] == key


def _file_key(path: str) -> int:
    """Returns the upper bits of a file's example keys: 31 bits that depend only on the name of the file."""
    digest = hashlib.sha256(os.path.basename(path).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1 << 32


@functools.cache
def _file_problem(path: str) -> str | None:
    """Returns a description of the problem if a record file is missing or empty, otherwise None."""
    try:
        return None if tf.io.gfile.stat(path).length else f"{path} is empty"
    except tf.errors.NotFoundError:
        return f"{path} is missing"


def _read_file(
    filename: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, file_key: tf.Tensor, file_format: str
) -> tf.data.Dataset:
    """Returns a dataset of (key, serialized example) with the `take` records that follow the first `skip` records.

    Reading fails with `FailedPreconditionError` if the file has fewer records. This check is
    necessary because TFRecord files have no end marker, so a file that is truncated between two
    records looks complete.
    """
    # Zip keys with records, because mapping a function over `enumerate` takes ten times as long as
    # reading.
    keys = tf.data.Dataset.range(file_key, file_key + (1 << 32))
    if file_format == "tfrecord":
        records = tf.data.TFRecordDataset(filename, buffer_size=_READ_BYTES)
    else:
        records = tf.data.Dataset.from_generator(
            _array_records, args=[filename], output_signature=tf.TensorSpec([], tf.string)
        )
    records = tf.data.Dataset.zip((keys, records)).skip(skip).take(take)
    return records.apply(tf.data.experimental.assert_cardinality(take))


def _array_records(filename: bytes) -> Iterator[bytes]:
    """Yields the records of an array_record file."""
    from array_record.python import array_record_module  # TFDS's reader has no `tf.data` dataset.

    reader = array_record_module.ArrayRecordReader(filename.decode())
    for first in range(0, reader.num_records(), _BLOCK):
        yield from reader.read(first, min(first + _BLOCK, reader.num_records()))
    reader.close()


def _tfds_builder(tfds: Any, name: str, data_dir: str | None, may_prepare: bool) -> Any:
    """Prepares a data set if necessary, and returns its TFDS builder. Raises `UserError` if this fails."""
    if data_dir and "://" not in data_dir and not os.path.isdir(os.path.expanduser(data_dir)):
        raise UserError(
            f"--data_dir={data_dir}: the directory does not exist. Correct the path, or create the"
            f" directory to prepare {name} in it."
        )
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as error:
        similar = difflib.get_close_matches(name.lower(), ["digits", *tfds.list_builders()], 1)
        suggestion = (
            f"Did you mean {similar[0]}?" if similar else "Use a TFDS name, digits or folder:PATH."
        )
        suggestion += " For a data set that you have prepared, set --data_dir."
        if os.path.isdir(name):
            suggestion = prepared_data_set(name) or f"Did you mean folder:{name}?"
        raise UserError(
            f"--dataset={name}: the data set is unknown ({first_line(error)}). {suggestion}"
        ) from error
    except Exception as error:  # Corrupt metadata files cause many types of errors.
        remedy = "Copy or prepare the data set again"
        if name.startswith("huggingface:"):
            remedy = "Run `pip install datasets`, and check the name"
        raise UserError(
            f"--dataset={name}: the data set cannot be loaded ({first_line(error)}). {remedy}."
        ) from error
    if not builder.info.splits:
        _prepare(builder, name, may_prepare)
    return builder


def prepared_data_set(path: str) -> str | None:
    """Returns a sentence with the flags for a data set that TFDS has prepared in a directory, or None."""
    for file in sorted(pathlib.Path(path).absolute().glob("**/dataset_info.json")):
        info = json.loads(file.read_text())
        name = "/".join(filter(None, (info["name"], info.get("configName"))))
        data_dir = str(file.parent).removesuffix(f"/{name}/{info['version']}")
        return f"Use --dataset={name} --data_dir={data_dir}."
    return None


def _prepare(builder: Any, name: str, may_prepare: bool) -> None:
    """Downloads and prepares a data set. Raises `UserError` if this fails, or if `may_prepare` is False."""
    root = os.path.dirname(os.path.dirname(builder.data_dir))
    if not may_prepare:
        raise UserError(
            f"--dataset: no data set is selected, and {name} is not prepared in {root}. Use"
            " folder:PATH for your own images, digits for a small data set, or"
            f" {name} to download it."
        )
    console.log(f"downloading and preparing {name} in {builder.data_dir}")
    try:
        builder.download_and_prepare()
    except Exception as error:
        # Downloads can fail with many types of errors, all with the same remedy.
        raise UserError(
            f"--dataset={name}: the data set is not in {root} and cannot be prepared"
            f" ({first_line(error)}). Set --data_dir to a prepared copy (see docs/data.md)."
        ) from error
    if not builder.info.splits:
        raise UserError(
            f"--dataset={name}: {builder.data_dir} has no dataset_info.json with splits. Copy or"
            " prepare the data set again; other TFRecord files need tfds.folder_dataset.write_metadata."
        )
