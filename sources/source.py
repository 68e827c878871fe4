"""Where examples come from: TFDS, folders of images, and the embedded `digits`.

A source yields undecoded records `(key, item, label)`: `key` is an int64 that names the example for good, `item` the
encoded image (or a small uint8 array), `label` an int64, -1 without labels; where examples have several labels, int64
[classes], see `Source.multi_label`. Order is a function of the seed alone.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

import tensorflow as tf


class Source(abc.ABC):
    """A data set.

    Attributes:
      name: name of the data set.
      class_names: names of the classes, in the order of their labels; None if examples have no labels.
      multi_label: whether an example may show several classes. Then its label is, for each class, 1: shown; 0: not; -1:
        neither is to be learnt or tested (objects that PASCAL VOC calls difficult).
    """

    name: str
    class_names: list[str] | None
    multi_label: bool = False

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None without labels."""
        return None if self.class_names is None else len(self.class_names)

    @property
    @abc.abstractmethod
    def split_names(self) -> list[str]:
        """Names of the whole splits, sorted."""

    @abc.abstractmethod
    def num_examples(self, split: str, shards: int = 1, shard: int = 0) -> int:
        """Returns the number of examples of a split or a slice of it, or of one of its shards.

        Raises ValueError for an unknown split.
        """

    @abc.abstractmethod
    def references(self, split: str, seed: int | tf.Tensor | None = None, shards: int = 1, shard: int = 0,
                buffer_mb: int = 1024) -> tf.data.Dataset:
        """Returns a dataset of handles: small values that stand for examples until `reader` reads them.

        Args:
          split: a split or a slice of it.
          seed: int64 scalar that decides the order; None: the same order each time.
          shards: number of parts that the split is divided into.
          shard: index of the part to return.
          buffer_mb: largest memory for shuffling, in MB, where examples have no random access.
        """

    @abc.abstractmethod
    def reader(self, split: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Returns a function from a handle of `split` to `(key, item, label)`."""

    @abc.abstractmethod
    def restrict(self, split: str, fraction: float, seed: int) -> None:
        """Restricts `split` from now on to a class-balanced share of its examples, see `label_subsets.choose_balanced`.

        Raises `UserError` if it has too few labelled examples for that.
        """

    @abc.abstractmethod
    def describe_data(self) -> dict:
        """Returns what identifies the data, as JSON types: at least `name` and `splits`, name -> number of examples.

        Neither slices, `restrict` nor images that are left out change it, so that a run can compare it at each start.
        """

    def check_files(self, split: str) -> None:  # noqa: B027 (Most sources have nothing to check.)
        """Raises `UserError` if files that hold the split are missing or empty, where that can be checked quickly."""

    def no_label(self) -> tf.Tensor:
        """Returns the label of an example without one: int64 scalar, or [classes], of -1."""
        return tf.fill([self.num_classes] if self.multi_label else [], tf.constant(-1, tf.int64))

    def is_sparse(self, split: str) -> bool:
        """Returns whether reading the split means to read much more than its examples, so that caching them pays."""
        del split
        return False

    def records(self, split: str, seed: int | tf.Tensor | None = None, shards: int = 1, shard: int = 0,
                buffer_mb: int = 1024) -> tf.data.Dataset:
        """Returns a dataset of `(key, item, label)`; arguments as for `references`."""
        return self.references(split, seed, shards, shard, buffer_mb).map(self.reader(split), tf.data.AUTOTUNE)

    def decode(self, item: tf.Tensor) -> tf.Tensor:
        """Returns the image of an item: uint8 [h, w, 3]."""
        return tf.io.decode_image(item, channels=3, expand_animations=False)
