"""Data sets of TensorFlow Datasets (TFDS)."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable
from concurrent import futures

import numpy as np
import tensorflow as tf

from runtime import progress
from runtime.errors import UserError, first_line
from sources import label_subsets
from sources.source import Source

_MB = 2**20


class TfdsSource(Source):
    """A prepared TFDS data set, read from its TFRecord files in an order that a seed decides."""

    def __init__(self, name: str, data_dir: str | None):
        """Prepares the data set if need be. Raises `UserError` if it is unknown or cannot be had."""
        import tensorflow_datasets as tfds  # Here: it takes a while, and the other sources do without.

        self.name = name
        self._builder = _tfds_builder(tfds, name, data_dir)
        info = self._builder.info
        if str(info.file_format.value) != "tfrecord":
            raise UserError(f"--dataset={name} is stored as {info.file_format.value}: prepare it as tfrecord")
        self._image, label = self._find_image_and_label(tfds, info)
        several = {} if label else self._find_labels(tfds, info)
        self._label, self._sure, self.multi_label = label or several.get("all"), several.get("sure"), bool(several)
        wanted = {key: True for key in (self._image, self._label, self._sure) if key}
        self._features = tfds.decode.PartialDecoding(wanted).extract_features(info.features)
        self._decoders = {self._image: tfds.decode.SkipDecoding()}
        self._checked = set()  # record files that exist and are not empty
        self._kept = {}  # split -> sorted keys of the examples that it is restricted to
        classes = info.features[self._label] if self._label else None
        self.class_names = list((classes.feature if several else classes).names) if classes else None

    @staticmethod
    def _find_labels(tfds, info) -> dict[str, str]:
        """Names of the features that list several classes, as in PASCAL VOC: `all`; `sure`, without difficult ones."""
        names = {"all": "labels", "sure": "labels_no_difficult"}
        features = dict(info.features.items())
        found = {kind: name for kind, name in names.items()
                 if isinstance(features.get(name), tfds.features.Sequence)
                 and isinstance(features[name].feature, tfds.features.ClassLabel)}
        return found if "all" in found else {}

    def _find_image_and_label(self, tfds, info):
        """Names of the image and of the one class label (or None)."""
        names = info.supervised_keys if info.supervised_keys and len(info.supervised_keys) == 2 else ("image", "label")
        image, label = names
        features = dict(info.features.items())
        if not isinstance(features.get(image), tfds.features.Image):
            raise UserError(f"--dataset={self.name} has no image to train on: its features are {', '.join(features)}")
        return image, label if isinstance(features.get(label), tfds.features.ClassLabel) else None

    @property
    def split_names(self) -> list[str]:
        """Names of the whole splits."""
        return sorted(self._builder.info.splits)

    def describe_data(self) -> dict:
        """See `Source`; also the version and the config."""
        info = self._builder.info
        return dict(name=info.name, version=str(info.version), config=info.config_name or None,
                    splits={name: info.splits[name].num_examples for name in self.split_names})

    def check_files(self, split: str) -> None:
        """See `Source`. Record files that are cut are found when they are read, see `_read_file`."""
        paths = {file.filename for file in self._builder.info.splits[split].file_instructions} - self._checked
        with futures.ThreadPoolExecutor(16) as pool:  # For remote storage.
            problems = [problem for problem in pool.map(_file_problem, sorted(paths)) if problem]
        if problems:
            raise UserError(f"--dataset={self.name}: {problems[0]} ({len(problems)} of {len(paths)} files of "
                            f"{split}). Copy or prepare the data set again.")
        self._checked |= paths

    def _files(self, split, shards, shard):
        """Instructions of a shard: whole files if there are enough of them, else all (and records are divided)."""
        files = self._builder.info.splits[split].file_instructions
        return files[shard::shards] if len(files) >= shards else files

    def num_examples(self, split: str, shards: int = 1, shard: int = 0) -> int:
        """See `Source`."""
        if split in self._kept:
            return len(range(shard, len(self._kept[split]), shards))
        files = self._files(split, shards, shard)
        if len(self._builder.info.splits[split].file_instructions) >= shards:
            return sum(map(_count_records, files))
        total = self._builder.info.splits[split].num_examples
        return len(range(shard, total, shards))

    def references(self, split: str, seed: int | tf.Tensor | None = None, shards: int = 1, shard: int = 0,
                buffer_mb: int = 1024) -> tf.data.Dataset:
        """See `Source`. Files are interleaved in an order drawn from the seed, then records shuffled in a buffer."""
        sparse = self.is_sparse(split)
        files = self._files(split, 1 if sparse else shards, 0 if sparse else shard)
        by_records = sparse or len(self._builder.info.splits[split].file_instructions) < shards
        table = tf.data.Dataset.from_tensor_slices((
            [file.filename for file in files], tf.constant([file.skip for file in files], tf.int64),
            tf.constant([_count_records(file) for file in files], tf.int64),
            [_file_key(file.filename) for file in files]))
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

    def restrict(self, split: str, fraction: float, seed: int) -> None:
        """See `Source`; reads all of the split."""
        if self.multi_label:
            raise UserError(f"--label_fraction={fraction:g} is for one label an example: {self.name} has several")
        read = self.references(split).map(self._key_and_label, tf.data.AUTOTUNE).batch(1024)
        tracked = progress.track(read.as_numpy_iterator(), None, f"labels of {split}")
        keys, labels = (np.concatenate(column) for column in zip(*tracked))
        order = np.argsort(keys)  # Which does not depend on the order of reading.
        self._kept[split] = keys[order][label_subsets.choose_labeled(labels[order], split, fraction, seed)]

    def _key_and_label(self, key, serialized):
        key, _, label = self._parse(key, serialized)
        return key, label

    def is_sparse(self, split: str) -> bool:
        """See `Source`; record files have no random access."""
        return split in self._kept

    def shuffle_buffer_size(self, split: str, buffer_mb: int, shards: int = 1, shard: int = 0) -> int:
        """Examples that fit into `buffer_mb` at their mean encoded size, at most all of the shard."""
        whole = [self._builder.info.splits[name] for name in self.split_names]
        mean_bytes = max(sum(info.num_bytes for info in whole) / max(sum(info.num_examples for info in whole), 1), 1)
        return max(min(self.num_examples(split, shards, shard), int(buffer_mb * _MB / mean_bytes)), 1)

    def reader(self, split: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """See `Source`; a handle is a key and a serialized example."""
        del split
        return self._parse

    def _parse(self, key, serialized):
        example = self._features.deserialize_example(serialized, decoders=self._decoders)
        return key, example[self._image], self._label_of(example)

    def _label_of(self, example):
        if not self.multi_label and not self._label:
            return self.no_label()
        if not self.multi_label:
            label = tf.cast(example[self._label], tf.int64)
            tf.debugging.assert_less(label, tf.constant(self.num_classes, tf.int64),
                                     f"{self.name} has labels for which it has no class name")
            return label
        shown = self._shown(example[self._label])
        return 2 * self._shown(example[self._sure]) - shown if self._sure else shown

    def _shown(self, classes):
        """A list of classes as int64 [classes] of ones and zeros."""
        counts = tf.reduce_sum(tf.one_hot(classes, self.num_classes, dtype=tf.int64), 0)
        return tf.minimum(counts, 1)


def _file_key(filename):
    """31 bits that name a record file wherever it lies."""
    return int.from_bytes(hashlib.sha256(os.path.basename(filename).encode()).digest()[:4], "big") >> 1 << 32


def _count_records(file):
    """Returns the number of records that a TFDS file instruction reads."""
    return file.take if file.take >= 0 else file.examples_in_shard - file.skip


def _file_problem(path):
    """Returns what is wrong with a record file at first sight, or None."""
    try:
        return None if tf.io.gfile.stat(path).length else f"{path} is empty"
    except tf.errors.NotFoundError:
        return f"{path} is missing"
    except tf.errors.OpError as error:
        return f"{path} cannot be read ({first_line(error)})"


def _read_file(filename, skip, take, file_key):
    """Returns a dataset of (key, serialized example) of one record file: `take` records after `skip`.

    Reading fails with `FailedPreconditionError` if the file has fewer records: TFRecord files have no end mark, so that
    one that was cut between two records looks complete.
    """
    # Zipped, not enumerated and mapped: a function called for every record would cost ten times the reading.
    keys = tf.data.Dataset.range(file_key, file_key + (1 << 32))
    records = tf.data.Dataset.zip((keys, tf.data.TFRecordDataset(filename))).skip(skip).take(take)
    return records.apply(tf.data.experimental.assert_cardinality(take))


def _tfds_builder(tfds, name, data_dir):
    """The prepared builder of a data set."""
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as error:
        near = difflib.get_close_matches(name, ["digits", *tfds.list_builders()], 1)
        hint = f"did you mean {near[0]}?" if near else "use a TFDS name, digits or folder:PATH"
        raise UserError(f"--dataset={name} is not known ({first_line(error)}): {hint}") from error
    except Exception as error:  # Corrupt files of prepared data raise errors of many types.
        raise UserError(f"--data_dir={data_dir or 'the default of TFDS'}: the prepared data of {name} cannot be opened "
                        f"({first_line(error)}). Copy or prepare the data set again.") from error
    if not builder.info.splits:
        try:
            builder.download_and_prepare()
        except Exception as error:  # Whatever a download can raise, the remedy is the same.
            raise UserError(
                f"--dataset={name} is not prepared in {os.path.dirname(os.path.dirname(builder.data_dir))} and could "
                f"not be made ({first_line(error)}): point --data_dir at a prepared copy (docs/data.md)") from error
    if not builder.info.splits:
        raise UserError(f"--dataset={name}: {builder.data_dir} has no dataset_info.json with splits. Copy or prepare "
                        "the data set again.")
    return builder
