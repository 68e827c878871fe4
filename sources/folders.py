"""Image folders, with or without classes and splits."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from runtime import console
from runtime.errors import UserError
from runtime.paths import check_folder
from sources import image_files
from sources.indexed import IndexedSource

# Maps split folder names (case-insensitive) to splits. Names such as `train_set` and `val2017` also
# match.
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
_SPLIT_FOLDER = re.compile(
    rf"({'|'.join(_SPLITS)})([ _-]?(set|split|data|images|\d+))?", re.IGNORECASE
)
_KEY_BITS = 62
_DATE = re.compile(  # a year, a month or another number
    r"[\d\W_]+|(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*", re.IGNORECASE
)


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
        root: str | os.PathLike,
        splits: dict[str, tuple[np.ndarray, np.ndarray]],
        class_names: list[str] | None,
    ):
        """Creates a source from the paths of the image files.

        Args:
          name: value of `--dataset`.
          root: the folder.
          splits: dict mapping split names to two arrays of equal length (paths, labels). Paths
            start with `root`.
          class_names: class names in label order; None if images have no labels.
        """
        self.root, self._class_folders = str(root), class_names
        self._prefix = os.path.join(self.root, "")
        self._keys = {}
        ordered = {}
        for split, (paths, labels) in splits.items():
            keys = np.array(
                [_path_key(path.removeprefix(self._prefix)) for path in paths], np.int64
            )
            order = np.argsort(keys, kind="stable")
            self._keys[split], ordered[split] = keys[order], (paths[order], labels[order])
        super().__init__(name, ordered, class_names, image_files.load)
        self._excluded = np.array([], str)

    def paths(self) -> list[str]:
        """Returns the sorted paths of the image files in all splits."""
        return sorted(str(path) for paths, _ in self._splits.values() for path in paths)

    def labeled_paths(self, split: str = "all") -> tuple[list[str], np.ndarray]:
        """Returns the paths and labels (int64 [n]) of the images in a split. Excluded files are omitted."""
        _, paths, labels = self._select(split)
        return paths.tolist(), labels

    def exclude(self, paths: Iterable[str]) -> None:
        """Excludes files from all splits. The keys and percent slices of the remaining images do not change."""
        self._excluded = np.array(sorted(paths), str)
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
            digest.update(os.fsencode(path.removeprefix(self._prefix)) + f"\0{size}\n".encode())
        return dict(
            super().describe_data(),
            name="folder",
            classes=self._class_folders,
            files=digest.hexdigest(),
        )


def _path_key(path: str) -> int:
    """Returns the key of a relative path: a non-negative hash with `_KEY_BITS` bits."""
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:8], "big") >> 64 - _KEY_BITS


def folder_source(path: str) -> FolderSource:
    """Returns a source for the images below `path`.

    Each sub-folder is a class. Without sub-folders, images have no labels. Classes may be grouped
    in split folders (`train` or `training`, `validation`, `valid` or `val`, `test` or `testing`,
    case-insensitive). Labels are indices into the sorted class names of all splits. If there is only
    one class, the images have no labels. Folders without images and folders that match
    `image_files.is_ignored` are skipped. The skipped folders are logged.

    Args:
      path: the folder; `~` is expanded.

    Raises:
      UserError: the folder is missing or has no images; it mixes images with class folders, or
        split folders with other folders.
    """
    check_folder(path)
    root, flag = pathlib.Path(os.path.expanduser(path)).absolute(), f"--dataset=folder:{path}"
    try:
        listing = _list_folder(root)
        split_roots = _split_folders(root, listing, flag)
        scans = {split: _scan_split(folder, flag) for split, folder in split_roots.items()}
    except OSError as error:
        raise UserError(
            f"{flag}: the directory cannot be read ({error.strerror}). Fix the cause, or use"
            " another directory."
        ) from error
    found = {name for images, _ in scans.values() for name, _ in images}
    if not found:
        raise UserError(
            f"{flag}: the directory has no images ({', '.join(image_files.IMAGE_SUFFIXES)}). Check"
            " the path."
        )
    names = sorted(filter(None, found))
    if names and None in found:
        raise UserError(
            f"{flag}: one split has class folders and another has none. Use the same layout in all"
            " splits."
        )
    labels = {name: label for label, name in enumerate(names)} or {None: -1}
    splits = {
        split: (
            np.array([file for _, file in images]),
            np.array([labels[name] for name, _ in images], np.int64),
        )
        for split, (images, _) in scans.items()
    }
    source = FolderSource(f"folder:{path}", root, splits, names or None)
    if root not in split_roots.values() and listing.empty:
        console.log(f"ignored folders without images: {console.join_first(listing.empty)}")
    empty = sorted(
        {name for _, empty_folders in scans.values() for name in empty_folders} - set(names)
    )
    if names and empty:
        console.log(f"ignored class folders without images: {console.join_first(empty)}")
    runs = [
        child.name
        for folder in dict.fromkeys([root, *split_roots.values()])
        for child in sorted(folder.iterdir())
        if image_files.is_run_directory(child)
    ]
    if runs:
        console.log(f"ignored run directories: {console.join_first(runs)}")
    others = image_files.count_other_files(root)
    if others:
        heif = (
            ""
            if {".heic", ".heif"}.isdisjoint(others)
            else " (HEIC images require: pip install pillow-heif)"
        )
        suffixes = console.join_first([f"{count} {suffix}" for suffix, count in others.items()])
        console.log(f"ignored files that are not images: {suffixes}{heif}")
    if len(names) == 1:
        console.log(f"no labels: all images are in one class folder ({names[0]})")
        source.drop_labels()
    elif names and all(map(_DATE.fullmatch, names)):
        console.log(f"classes: {console.join_first(names)} (run.py --nolabels ignores them)")
    return source


@dataclasses.dataclass(frozen=True)
class _Listing:
    """A folder's content: images, sub-folders with images at any depth, and the names of sub-folders without images."""

    images: list[str]
    folders: list[pathlib.Path]
    empty: list[str]


def _split_of(folder: pathlib.Path) -> str | None:
    """Returns the split that a folder's name denotes, or None."""
    match: Any = _SPLIT_FOLDER.fullmatch(folder.name)
    return match and _SPLITS[match[1].lower()]


def _list_folder(folder: pathlib.Path) -> _Listing:
    children = sorted(folder.iterdir())
    folders = [
        child
        for child in children
        if child.is_dir() and not image_files.is_ignored(folder, child.name)
    ]
    nonempty = [child for child in folders if any(image_files.iterate_images(child))]
    return _Listing(
        [
            str(child)
            for child in children
            if image_files.is_image_name(child.name) and not child.is_dir()
        ],
        nonempty,
        sorted(child.name for child in set(folders).difference(nonempty)),
    )


def _split_folders(root: pathlib.Path, listing: _Listing, flag: str) -> dict[str, pathlib.Path]:
    """Returns a dict mapping splits to folders. Without split folders, it maps `train` to `root`.

    Raises `UserError` if the layout is ambiguous.
    """
    split_folders = [folder for folder in listing.folders if _split_of(folder)]
    others = [folder.name for folder in listing.folders if not _split_of(folder)]
    names = console.join_first([folder.name for folder in split_folders])
    if not split_folders:
        return {"train": root}
    if others and (len(split_folders) > 1 or _list_folder(split_folders[0]).folders):
        raise UserError(
            f"{flag}: split folders ({names}) are next to other folders"
            f" ({console.join_first(others)}). Move the other folders into the split folders or out"
            " of the data set, or rename the split folders if they are classes."
        )
    if others:
        console.log(
            f"{flag.removeprefix('--dataset=')}: the folder {names} counts as a class, not as a"
            f" split, because it is next to {console.join_first(others)}"
        )
        return {"train": root}
    roots = {_split_of(folder): folder for folder in split_folders}
    if len(roots) < len(split_folders):
        raise UserError(
            f"{flag}: two folders contain the same split ({names}). Keep only one of them."
        )
    if listing.images:
        raise UserError(
            f"{flag}: images ({os.path.basename(listing.images[0])}, ...) are next to split folders"
            f" ({names}). Move them into one of the split folders."
        )
    return roots


def _scan_split(folder: pathlib.Path, flag: str) -> tuple[list[tuple[str | None, str]], list[str]]:
    """Returns a list of (class name or None, path) pairs, one per image, and the names of empty class folders."""
    listing = _list_folder(folder)
    if listing.images and listing.folders:
        raise UserError(
            f"{flag}: {folder} has both images ({os.path.basename(listing.images[0])}, ...) and"
            f" sub-folders ({listing.folders[0].name}, ...). Move the images into the sub-folders,"
            " which are the classes."
        )
    for child in listing.folders:
        split_folders = [inner for inner in _list_folder(child).folders if _split_of(inner)]
        if len(split_folders) > 1 or any(_list_folder(inner).folders for inner in split_folders):
            names = console.join_first([inner.name for inner in split_folders])
            raise UserError(
                f"{flag}: {child.name} would be a class, but contains split folders ({names}). Move"
                f" the split folders above the class folders, or pass --dataset=folder:{child} if"
                " that folder is the data set."
            )
    files = [
        (child.name, file) for child in listing.folders for file in image_files.find_images(child)
    ]
    return [(None, file) for file in listing.images] + files, listing.empty
