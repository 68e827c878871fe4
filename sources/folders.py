"""Image folders, with or without classes and splits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from runtime import console
from runtime.errors import UserError
from runtime.paths import check_folder
from sources import image_files, layout
from sources.indexed import IndexedSource

_KEY_BITS = 62


class FolderSource(IndexedSource):
    """A folder of image files.

    An image's key is a hash of its path relative to the root, and splits are sorted by key, so keys
    and order depend only on file names. Percent slices select a range of the key space:
    `train[:90%]` contains each image with a probability of 90 %, and adding or removing images
    never moves other images across a slice boundary. Absolute slices, such as `train[:100]`, count
    images in key order. `train+validation` and `all` concatenate splits.
    """

    def __init__(
        self,
        name: str,
        root: str,
        splits: dict[str, tuple[Sequence[str], np.ndarray]],
        class_names: list[str] | None,
    ):
        """Creates a source from the paths of the image files.

        Args:
          name: value of `--dataset`.
          root: the folder.
          splits: dict mapping split names to paths, relative to `root`, and labels of equal length.
          class_names: class names in label order; None if images have no labels.
        """
        self.root, self._class_folders = root, class_names
        self._prefix = os.fsencode(os.path.join(root, ""))
        self._keys, ordered = {}, {}
        for split, (paths, labels) in splits.items():
            # Arrays of bytes require less memory than lists, or arrays of strings.
            encoded = np.array([*map(os.fsencode, paths)] or [], "S")
            keys = np.array([*map(_path_key, paths)], np.int64)
            order = np.argsort(keys, kind="stable")
            self._keys[split], ordered[split] = keys[order], (encoded[order], labels[order])
        super().__init__(name, ordered, class_names, self._load_file)
        self._excluded = np.array([], "S")

    def _load_file(self, path: tf.Tensor) -> tf.Tensor:
        return image_files.load(tf.strings.join([self._prefix, path]))

    def _absolute(self, paths: np.ndarray) -> list[str]:
        return [os.fsdecode(self._prefix + path) for path in paths.tolist()]

    def paths(self) -> list[str]:
        """Returns the sorted paths of the image files in all splits."""
        return sorted(path for paths, _ in self._splits.values() for path in self._absolute(paths))

    def labeled_paths(self, split: str = "all") -> tuple[list[str], np.ndarray]:
        """Returns the paths and labels (int64 [n]) of the images in a split. Excluded files are omitted."""
        _, paths, labels = self._select(split)
        return self._absolute(paths), labels

    def exclude(self, paths: Iterable[str]) -> None:
        """Excludes files from all splits. The keys and percent slices of the remaining images do not change."""
        relative = [os.fsencode(path).removeprefix(self._prefix) for path in paths]
        self._excluded = np.array(relative, "S")
        self._selected.clear()

    def _permute(self, split: str) -> list[np.ndarray]:
        slices = []
        for name, rows in self._rows(split):
            paths, labels = self._splits[name]
            included = ~np.isin(paths[rows], self._excluded)
            slices.append([column[rows][included] for column in (self._keys[name], paths, labels)])
        return [np.concatenate(column) for column in zip(*slices)]

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
        count = len(self._keys[split])
        if is_percent:
            percent = boundary if boundary >= 0 else 100 + boundary
            return int(np.searchsorted(self._keys[split], round(percent * 2**_KEY_BITS / 100)))
        if abs(boundary) > count:
            raise ValueError(f"{split} has {count} images")
        return boundary if boundary >= 0 else count + boundary

    def describe_data(self) -> dict:
        """See `Source`. The value of `files` is a hash of the relative paths and sizes of all image files."""
        digest = hashlib.sha256()
        for path in self.paths():
            size = os.path.getsize(path) if os.path.exists(path) else None
            name = os.fsencode(path).removeprefix(self._prefix)
            digest.update(name + f"\0{size}\n".encode())
        return dict(
            super().describe_data(),
            name="folder",
            classes=self._class_folders,
            files=digest.hexdigest(),
        )


def _path_key(path: str) -> int:
    """Returns the key of a relative path: a non-negative hash with `_KEY_BITS` bits."""
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:8], "big") >> 64 - _KEY_BITS


def folder_source(path: str, labels: bool = True) -> FolderSource:
    """Returns a source for the images below `path`.

    For the layout of classes and splits, see `layout.find_layout`. Labels are indices into the sorted
    class names of all splits. What is ignored is logged.

    Args:
      path: the folder; `~` is expanded.
      labels: whether the labels will be used. If not, images are also used if the layout is
        ambiguous.

    Raises:
      UserError: the folder is missing or has no images, or the layout is ambiguous.
    """
    check_folder(path)
    root, name = os.path.abspath(os.path.expanduser(path)), f"folder:{path}"
    found = image_files.search(root)
    others = console.join_first([f"{count} {suffix}" for suffix, count in found.others.items()])
    if not any(found.folder.files()):
        raise UserError(
            f"--dataset={name}: the directory has no images, but {others or 'nothing'}. Check the"
            f" path; images are files that end in {', '.join(image_files.IMAGE_SUFFIXES)}."
        )
    try:
        splits, lines = layout.find_layout(found.folder, name, labels)
    except UserError:
        if labels:
            raise
        splits, lines = {"train": {None: [*found.folder.files()]}}, []
    for line in lines:
        console.log(line)
    if found.runs:
        console.log(f"ignored run directories: {console.join_first(found.runs)}")
    if others:
        needs_heif = not {".heic", ".heif"}.isdisjoint(found.others)
        heif = " (HEIC images require: pip install pillow-heif)" * needs_heif
        console.log(f"ignored files that are not images: {others}{heif}")
    class_names = sorted({name for images in splits.values() for name in images if name})
    indices = {name: label for label, name in enumerate(class_names)}
    return FolderSource(
        name,
        root,
        {
            split: (
                [path for paths in images.values() for path in paths],
                np.repeat(
                    np.array([indices.get(name, -1) for name in images], np.int64),
                    [*map(len, images.values())],
                ),
            )
            for split, images in splits.items()
        },
        class_names or None,
    )
