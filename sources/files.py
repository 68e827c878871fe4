"""Data sets of image files."""

from __future__ import annotations

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Files:
    """The images of a split.

    Attributes:
      paths: n paths, relative to the root of the data set.
      labels: int64 [n], or [n, classes] (see `Source.multi_label`).
      groups: n names of groups, or None. Images of the same group, such as those of one patient, are
        not divided between slices of a split.
    """

    paths: Sequence[str]
    labels: np.ndarray
    groups: Sequence[str] | None = None


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
        splits: dict[str, Files],
        class_names: list[str] | None,
        multi_label: bool = False,
    ):
        """Creates a source from the paths of the image files.

        Args:
          name: value of `--dataset`.
          root: the directory to which paths are relative.
          splits: dict mapping split names to images.
          class_names: class names in label order; None if images have no labels.
          multi_label: see `Source`.
        """
        self.root, self._all_classes = root, class_names
        self._prefix = os.fsencode(os.path.join(root, ""))
        self._has_groups = any(files.groups is not None for files in splits.values())
        self._keys, self._groups, self._all_labels, ordered = {}, {}, {}, {}
        for split, files in splits.items():
            # Arrays of bytes require less memory than lists, or arrays of strings.
            encoded = np.array([*map(os.fsencode, files.paths)], "S")
            keys = np.array([*map(_hash, files.paths)], np.int64)
            groups = keys if files.groups is None else np.array([*map(_hash, files.groups)])
            order = np.lexsort((keys, groups))
            self._keys[split], self._groups[split] = keys[order], groups[order]
            ordered[split] = (encoded[order], files.labels[order])
            self._all_labels[split] = ordered[split][1]
        super().__init__(name, ordered, class_names, self._load_file)
        self.multi_label, self._excluded = multi_label, np.array([], "S")
        self._report_shared_groups(splits)

    def _report_shared_groups(self, splits: dict[str, Files]) -> None:
        members = {split: set(files.groups or ()) for split, files in splits.items()}
        for first, second in itertools.combinations(sorted(members), 2):
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
        _, paths, labels, _ = self._select(split)
        return self._absolute(paths), labels

    def labeled_names(self, split: str) -> np.ndarray:
        """Returns the relative paths of the labeled images in a split, an array of strings."""
        _, paths, labels, _ = self._select(split)
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
            columns = self._keys[name], paths, labels, self._groups[name]
            yield [column[rows][included] for column in columns]

    def _rows(self, split: str) -> Iterable[tuple[str, slice]]:
        """Yields (split name, row slice) for each term of `split`. Raises ValueError if a term is invalid."""
        for term in self.split_names if split == "all" else split.split("+"):
            if (name := term.strip()) in self._splits:
                yield name, slice(None)
                continue
            import tensorflow_datasets as tfds  # Imported here because the import is slow.

            spec = tfds.core.ReadInstruction.from_spec(name)
            if spec.split_name not in self._splits or spec.unit == "shard":
                raise ValueError(
                    f"{term} is not a valid slice of a split. Specify its bounds as numbers of"
                    " images or as percentages"
                )
            rows = (
                self._row(spec.split_name, boundary, spec.unit == "%")
                for boundary in (spec.from_, spec.to)
            )
            yield spec.split_name, slice(*rows)

    def _row(self, split: str, boundary: int | None, is_percent: bool) -> int | None:
        """Returns the row index for `boundary`: a number of images or a percentage, negative to count from the end."""
        if boundary is None:
            return None
        groups = self._groups[split]
        row = boundary + (100 if is_percent else len(groups)) * (boundary < 0)
        if is_percent:
            return int(np.searchsorted(groups, round(row * 2**_KEY_BITS / 100)))
        if not 0 <= row <= len(groups):
            raise ValueError(f"{split} has {len(groups)} images")
        if 0 < row < len(groups) and groups[row - 1] == groups[row]:
            end = int(np.searchsorted(groups, groups[row], "right"))
            raise UserError(
                f"{split}[:{boundary}]: this boundary divides a group of images. Use {end}, or a"
                " percentage."
            )
        return row

    def largest_values(self, split: str, limit: int) -> tuple[float, float]:
        """See `Source`."""

        def read(path):
            try:
                with image_files.checked_content(path) as content:
                    return image_files.largest_values(content, self.conversion)
            except image_files.UnusableImage:  # `check_images` reports the image.
                return 0.0, 0.0

        paths = self.labeled_paths(split)[0][:limit]
        with contextlib.closing(image_files.map_paths(read, paths)) as values:
            return max(progress.track(values, "reading the largest pixel values", len(paths)))

    def groups(self, split: str) -> np.ndarray | None:
        """Returns the group of each image, int64 [n], or None if images have no groups."""
        return self._select(split)[3] if self._has_groups else None

    def describe_data(self) -> dict:
        """See `Source`. `files` is a hash of paths and sizes and, for a list, of labels and groups."""
        digest = hashlib.sha256()
        for path, size in zip(self.paths(), self._statuses[:, 0].tolist()):
            name = os.fsencode(path).removeprefix(self._prefix)
            digest.update(name + f"\0{None if size < 0 else size}\n".encode())
        kind = self.name.partition(":")[0]
        for split in self.split_names * (kind == "list"):
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
