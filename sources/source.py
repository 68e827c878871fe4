"""Interface for data sets that yield undecoded `(key, item, label)` records.

`key` is an int64 that permanently identifies the example. `item` is the encoded image or a small
uint8 array. `label` is an int64 (-1 if unlabeled), or int64 [classes] if examples have multiple
labels (see `Source.multi_label`). The order of the records depends only on the seed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from config import DEFAULT_CONVERSION, Conversion
from runtime.pipelines import PARALLEL_CALLS

_SAMPLED_LABELS = 1024  # number of examples in a split that are searched for labels


class Source(abc.ABC):
    """A data set.

    Attributes:
      name: name of the data set.
      class_names: class names in label order, or None if the examples have no labels.
      multi_label: whether an example may have several classes. If True, each label contains 1 for
        each class that is present, 0 for each class that is absent, and -1 for each class to ignore
        in training and evaluation (in PASCAL VOC, a class whose objects in the image are all marked
        as difficult).
      conversion: how pixels are converted to 8-bit RGB.
    """

    name: str
    class_names: list[str] | None
    multi_label: bool = False
    conversion: Conversion = DEFAULT_CONVERSION

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if the examples have no labels."""
        return None if self.class_names is None else len(self.class_names)

    @property
    @abc.abstractmethod
    def split_names(self) -> list[str]:
        """Sorted names of the splits, without slices."""

    @abc.abstractmethod
    def num_examples(self, split: str, shards: int = 1, shard: int = 0) -> int:
        """Returns the number of examples in one shard of a split or slice (by default, in the whole split or slice).

        Raises ValueError for an unknown split.
        """

    @abc.abstractmethod
    def overlap(self, split: str, other: str) -> int:
        """Returns the number of examples that two splits or slices have in common."""

    @abc.abstractmethod
    def references(
        self,
        split: str,
        seed: int | tf.Tensor | None = None,
        shards: int = 1,
        shard: int = 0,
        buffer_mb: int = 1024,
    ) -> tf.data.Dataset:
        """Returns a dataset of example references, which are cheap to shuffle. `reader` converts them to records.

        A reference is an index if the source has random access, and otherwise a key with a
        serialized example.

        Args:
          split: a split or a slice of it.
          seed: int64 scalar that determines the order, or None for a fixed order.
          shards: number of shards that the split is divided into.
          shard: index of the shard to return.
          buffer_mb: maximum memory of the shuffle buffer in MB, for sources without random access.
        """

    @abc.abstractmethod
    def reader(self, split: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Returns a TensorFlow function that maps a reference from `split` to its record `(key, item, label)`."""

    @abc.abstractmethod
    def restrict(self, split: str, fraction: float, seed: int, hide: bool = False) -> None:
        """Permanently restricts `split` to a class-balanced subset (see `label_subsets.choose_balanced`).

        If `hide` is True, the other examples remain, without their labels. Copies made with
        `copy.copy` before this call are not restricted.

        Raises `UserError` if the split has too few labeled examples.
        """

    @abc.abstractmethod
    def drop_unlabeled(self, split: str) -> None:
        """Permanently restricts `split` to the examples that have a label. Copies are not restricted."""

    def drop_labels(self, class_names: list[str] | None = None) -> None:
        """Makes the source ignore the labels in the data. `class_names` are classes to predict, if any."""
        self.class_names, self.multi_label = class_names, False

    def largest_values(self, split: str, limit: int) -> tuple[float, float]:
        """Returns the largest absolute value in the first images of a split, and the largest of their type.

        Both are 0 if the images have at most 8 bits.
        """
        return 0.0, 0.0

    def class_counts(self, split: str) -> dict[str, int]:
        """Returns the number of examples of each class, or an empty dict if the split would have to be read."""
        return {}

    @abc.abstractmethod
    def describe_data(self) -> dict:
        """Returns a JSON-serializable dict that identifies the data.

        The dict contains at least `name` and `splits` (split name -> number of examples). It does
        not depend on slices, `restrict` or excluded images, so a resumed run can use it to detect
        changed data.
        """

    def check_files(self, split: str) -> None:  # noqa: B027 (Optional: most sources have nothing to check.)
        """Raises `UserError` if files of the split are missing or empty. Does not read their contents."""

    def has_labels(self, split: str) -> bool:
        """Returns whether any of the first 1,024 examples of a split has a label.

        If several splits are combined, such as `unlabelled+train`, the first examples of each split
        are searched.
        """
        if self.num_classes is None:
            return False
        return any(
            np.any(label >= 0)
            for part in split.split("+")
            for _, _, label in self.records(part).take(_SAMPLED_LABELS).as_numpy_iterator()
        )

    def no_label(self) -> tf.Tensor:
        """Returns the label of an unlabeled example: -1 (int64), repeated for each class if `multi_label` is True."""
        return tf.fill([self.num_classes] if self.multi_label else [], tf.constant(-1, tf.int64))

    def is_sparse(self, split: str) -> bool:
        """Returns whether reading the split is much slower than its size suggests, so that caching is worthwhile."""
        return False

    def records(self, split: str, *order: Any) -> tf.data.Dataset:
        """Returns a dataset of records `(key, item, label)`. For the arguments, see `references`."""
        return self.references(split, *order).map(self.reader(split), PARALLEL_CALLS)

    def decode(self, item: tf.Tensor) -> tf.Tensor:
        """Decodes an item into an image: uint8 [height, width, 3]."""
        return tf.io.decode_image(item, channels=3, expand_animations=False)
