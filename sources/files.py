"""Data sets of image files."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from runtime import console, progress
from runtime.errors import UserError
from sources import image_files
from sources.indexed import IndexedSource, has_label

_KEY_BITS = 62


class FileSource(IndexedSource):
    """Image files with paths relative to a directory.

    An image's key is a hash of its relative path, and splits are sorted by key, so keys and order
    depend only on file names. Percent slices select a range of the key space: `train[:90%]` contains
    each image with a probability of 90 %, and adding or removing images never moves other images
    across a slice boundary. If images have groups, the hash of the group determines the slice.
    Absolute slices, such as `train[:100]`, count images in this order. `train+validation` and `all`
    concatenate splits.
    """

    def __init__(
        self,
        name: str,
        root: str,
        splits: Sequence[str],
        paths: Sequence[str],
        labels: np.ndarray,
        groups: Sequence[str] | None,
        class_names: list[str] | None,
    ):
        """Creates a source from the paths of n image files.

        Args:
          name: value of `--dataset`.
          root: the directory to which paths are relative.
          splits: n names of splits.
          paths: n paths, relative to the root of the data set.
          labels: int64 [n], or [n, classes] (see `Source.multi_label`).
          groups: n names of groups, or None. Images of the same group, such as those of one patient,
            are not divided between slices of a split.
          class_names: class names in label order; None if images have no labels.
        """
        self.root, self._all_classes = root, class_names
        self._prefix = os.fsencode(os.path.join(root, ""))
        self._has_groups = groups is not None
        # Arrays of bytes require less memory than lists, or arrays of strings.
        encoded = np.array([*map(os.fsencode, paths)], "S")
        keys = np.array([*map(_hash, paths)], np.int64)
        hashes = keys if groups is None else np.array([*map(_hash, groups)])
        order = np.lexsort((keys, hashes))
        self._keys, self._groups, self._all_labels, ordered, members = {}, {}, {}, {}, {}
        ordered_splits = np.asarray(splits)[order]
        for split in set(splits):
            rows = order[ordered_splits == split]
            self._keys[split], self._groups[split] = keys[rows], hashes[rows]
            self._all_labels[split] = labels[rows]
            ordered[split] = encoded[rows], labels[rows]
            members[split] = {groups[row] for row in rows} if groups else set()
        super().__init__(name, ordered, class_names, self._load_file)
        self.multi_label, self._excluded = labels.ndim == 2, np.array([], "S")
        for first, second in itertools.combinations(self.split_names, 2):
            if shared := members[first] & members[second]:
                console.log(
                    f"warning: groups in both {first} and {second} ({len(shared)}):"
                    f" {console.join_first(sorted(shared))}"
                )

    def _load_file(self, path: tf.Tensor) -> tf.Tensor:
        return image_files.load(tf.strings.join([self._prefix, path]), self.conversion)

    def _absolute(self, paths: np.ndarray) -> list[str]:
        return [os.fsdecode(self._prefix + path) for path in paths.tolist()]

    def paths(self) -> list[str]:
        """Returns the sorted paths of the image files in all splits."""
        return sorted(path for paths, _ in self._splits.values() for path in self._absolute(paths))

    @functools.cached_property
    def _statuses(self) -> np.ndarray:
        """For each path: size, time of modification and time of change in ns, int64 [n, 3]; -1 for missing files."""
        return np.fromiter(map(_status, self.paths()), np.dtype((np.int64, 3)))

    def files_digest(self) -> str:
        """Returns a hash of the paths, sizes and modification times of all files."""
        digest = hashlib.sha256(self._statuses.tobytes())
        for path in self.paths():
            digest.update(os.fsencode(path) + b"\0")
        return digest.hexdigest()

    def labeled_paths(self, split: str = "all") -> tuple[list[str], np.ndarray]:
        """Returns the paths and labels (int64 [n]) of the images in a split. Excluded files are omitted."""
        paths, labels = self._select(split)[1:3]
        return self._absolute(paths), labels

    def labeled_names(self, split: str) -> np.ndarray:
        """Returns the relative paths of the labeled images in a split, an array of strings."""
        paths, labels = self._select(split)[1:3]
        return np.array([*map(os.fsdecode, paths[has_label(labels)].tolist())])

    def exclude(self, paths: Iterable[str]) -> None:
        """Excludes files from all splits. The keys and percent slices of the remaining images do not change."""
        self._excluded = np.array(
            [os.fsencode(path).removeprefix(self._prefix) for path in paths], "S"
        )
        self._selected.clear()

    def _permute(self, split: str) -> Iterator[list[np.ndarray]]:
        for name, rows in self._rows(split):
            paths, labels = self._splits[name]
            included = ~np.isin(paths[rows], self._excluded)
            columns = [self._keys[name], paths, labels]
            if self._has_groups:
                columns.append(self._groups[name])
            yield [column[rows][included] for column in columns]

    def _rows(self, split: str) -> Iterable[tuple[str, slice]]:
        """Yields (split name, row slice) for each term of `split`. Raises ValueError or KeyError if one is invalid."""
        for term in self.split_names if split == "all" else split.split("+"):
            if (name := term.strip()) in self._splits:
                yield name, slice(None)
                continue
            import tensorflow_datasets as tfds  # Imported here because the import is slow.

            spec = tfds.core.ReadInstruction.from_spec(name)
            rows = (
                self._row(spec.split_name, boundary, spec.unit)
                for boundary in (spec.from_, spec.to)
            )
            yield spec.split_name, slice(*rows)

    def _row(self, split: str, boundary: int | None, unit: str) -> int | None:
        """Returns the row index for `boundary`: a number of images or a percentage, negative to count from the end."""
        if boundary is None:
            return None
        groups = self._groups[split]
        size = {"%": 100, "abs": len(groups)}[unit]  # Slices in shards are not supported.
        row = boundary + size if boundary < 0 else boundary
        if unit == "%":
            return int(np.searchsorted(groups, round(row * 2**_KEY_BITS / 100)))
        if not 0 <= row <= size:
            raise ValueError(f"{split} has {size} images")
        if 0 < row < size and groups[row - 1] == groups[row]:
            end = np.searchsorted(groups, groups[row], "right")
            raise UserError(
                f"{split}[:{boundary}]: this boundary divides a group of images. Use {end}, or a"
                " percentage."
            )
        return row

    def largest_values(self, split: str, limit: int) -> tuple[float, float]:
        """See `Source`."""
        paths = self.labeled_paths(split)[0][:limit]
        read = functools.partial(image_files.largest_values, conversion=self.conversion)
        values = image_files.map_paths(read, paths)
        return max(progress.track(values, "reading the largest pixel values", len(paths)))

    def describe_data(self) -> dict:
        """See `Source`. `files` is a hash of paths and sizes and, for a list, of labels and groups."""
        digest = hashlib.sha256()
        for path, size in zip(self.paths(), self._statuses[:, 0].tolist()):
            name = os.fsencode(path).removeprefix(self._prefix)
            digest.update(name + f"\0{None if size < 0 else size}\n".encode())
        kind = self.name.partition(":")[0]
        if kind == "list":
            for split in self.split_names:
                digest.update(self._all_labels[split].tobytes() + self._groups[split].tobytes())
        return dict(
            super().describe_data(), name=kind, classes=self._all_classes, files=digest.hexdigest()
        )


def _status(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:  # The path is a broken link, which `image_checks` reports.
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash(text: str) -> int:
    """Returns a non-negative hash with `_KEY_BITS` bits."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:8], "big") >> 64 - _KEY_BITS
