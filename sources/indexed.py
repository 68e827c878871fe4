"""Data sets with random access to examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from sources import label_subsets
from sources.source import Source


def has_label(labels: np.ndarray) -> np.ndarray:
    """Returns whether each example has a label, bool [n], for labels [n] or [n, classes]."""
    return (labels >= 0).reshape(len(labels), -1).any(1)


class IndexedSource(Source):
    """A data set with random access. Each epoch's order is a random permutation of all examples."""

    def __init__(
        self,
        name: str,
        splits: dict[str, tuple[np.ndarray, np.ndarray]],
        class_names: list[str] | None,
        load: Callable,
    ):
        """Creates a source from arrays.

        Args:
          name: name of the data set.
          splits: dict mapping split names to two arrays of equal length (items, labels).
          class_names: class names in label order, or None if examples have no labels.
          load: TensorFlow function that maps an element of `items`, such as a path, to the record's
            item.
        """
        self.name = name
        self.class_names = class_names
        self._splits = splits
        self._load = load
        self._selected = {}

    def drop_labels(self, class_names: list[str] | None = None) -> None:
        """See `Source`."""
        super().drop_labels(class_names)
        self._splits = {
            name: (items, np.full(len(labels), -1, np.int64))
            for name, (items, labels) in self._splits.items()
        }
        self._selected = {}

    def class_counts(self, split: str) -> dict[str, int]:
        """See `Source`."""
        labels = self._select(split)[2]
        if not np.any(labels >= 0):
            return {}
        counts = (
            (labels == 1).sum(0)
            if self.multi_label
            else np.bincount(labels[labels >= 0], minlength=self.num_classes or 0)
        )
        return dict(zip(self.class_names or [], counts.tolist()))

    def describe_data(self) -> dict:
        """See `Source`."""
        return dict(
            name=self.name, splits={name: len(self._splits[name][0]) for name in self.split_names}
        )

    @property
    def split_names(self) -> list[str]:
        """Sorted names of the splits, without slices."""
        return sorted(self._splits)

    def num_examples(self, split: str, shards: int = 1, shard: int = 0) -> int:
        """See `Source`."""
        return len(self._select(split)[0][shard::shards])

    def overlap(self, split: str, other: str) -> int:
        """See `Source`."""
        return len(np.intersect1d(self._select(split)[0], self._select(other)[0]))

    def _select(self, split: str) -> list[np.ndarray]:
        """Returns a split's keys, items and labels in a fixed random order, so that slices contain all classes.

        If examples have groups (see `files.FileSource`), the last array contains them, int64 [n].
        """
        if split not in self._selected:
            self._selected[split] = [
                np.concatenate(slices) for slices in zip(*self._permute(split))
            ]
        return self._selected[split]

    def _permute(self, split: str) -> Iterator[Sequence[np.ndarray]]:
        """Yields the columns of `_select` for each slice of a split."""
        import tensorflow_datasets as tfds  # Imported here because the import is slow.

        infos = {
            name: tfds.core.SplitInfo(name=name, shard_lengths=[len(items)], num_bytes=0)
            for name, (items, _) in self._splits.items()
        }
        for instruction in tfds.core.ReadInstruction.from_spec(split).to_absolute(infos):
            items, labels = self._splits[instruction.splitname]
            rows = np.random.default_rng(0).permutation(len(items))[
                instruction.from_ : instruction.to
            ]
            # Makes keys unique across splits.
            offset = self.split_names.index(instruction.splitname) << 40
            yield rows + offset, items[rows], labels[rows]

    def restrict(self, split: str, fraction: float, seed: int, hide: bool = False) -> None:
        """See `Source`."""
        keys, items, labels, *groups = self._select(split)
        rows = label_subsets.choose_labeled(labels, split, fraction, seed, *groups)
        if hide:
            hidden = np.full_like(labels, -1)
            hidden[rows] = labels[rows]
            self._selected = {**self._selected, split: [keys, items, hidden, *groups]}
        else:
            self._keep(split, rows)

    def drop_unlabeled(self, split: str) -> None:
        """See `Source`."""
        self._keep(split, has_label(self._select(split)[2]))

    def _keep(self, split: str, rows: np.ndarray) -> None:
        """Restricts a split to the given rows (indices, or a mask). Copies of the source are not restricted."""
        kept = [column[rows] for column in self._select(split)]
        self._selected = {**self._selected, split: kept}

    def references(
        self,
        split: str,
        seed: int | tf.Tensor | None = None,
        shards: int = 1,
        shard: int = 0,
        buffer_mb: int = 1024,
    ) -> tf.data.Dataset:
        """See `Source`. References are indices, so the whole split is shuffled regardless of `buffer_mb`."""
        count = len(self._select(split)[0])
        indices = tf.data.Dataset.range(count)
        if seed is not None:
            indices = indices.shuffle(count, seed=seed, reshuffle_each_iteration=False)
        return indices.shard(shards, shard)

    def reader(self, split: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """See `Source`."""
        keys, items, labels = map(tf.constant, self._select(split)[:3])
        return lambda index: (keys[index], self._load(items[index]), labels[index])

    def has_labels(self, split: str) -> bool:
        """Returns whether any example of a split has a label. Reads no items, which may be corrupt files."""
        return bool(self.class_counts(split))

    def decode(self, item: tf.Tensor) -> tf.Tensor:
        """See `Source`."""
        return item if item.dtype == tf.uint8 else super().decode(item)
