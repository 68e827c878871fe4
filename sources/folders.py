"""Folders of images, with or without classes and splits."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from runtime import console
from runtime.errors import UserError
from sources import image_files
from sources.indexed import IndexedSource

# Names of split folders, in any case, and the splits that they stand for; also `train_set`, `val2017` and the like.
_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test"}
_SPLIT_FOLDER = re.compile(rf"({'|'.join(_SPLITS)})([ _-]?(set|split|data|images|\d+))?", re.IGNORECASE)
_KEY_BITS = 62  # of the keys of images in folders
_NAMED = 10  # names in a message


class FolderSource(IndexedSource):
    """Images in files, some of which may be found unusable.

    The key of an image is a hash of its path below the root, and the order of a split is that of its keys, so that both
    depend on names only. Percent slices select by the key as a fraction of all possible keys: `train[:90%]` holds each
    image with a probability of 90 %, and images that are added or removed never move others to another side of a
    boundary. Absolute slices (`train[:100]`) count in the order of keys. `train+validation` and `all` are sums.
    """

    def __init__(self, name: str, root: str | os.PathLike, splits: dict[str, tuple[np.ndarray, np.ndarray]],
                 class_names: list[str] | None):
        """`name`: as in `--dataset`; `root`: the folder; `splits`: name -> (paths that begin with it, labels)."""
        self.root = str(root)
        self._prefix = os.path.join(self.root, "")
        self._keys = {}
        ordered = {}
        for split, (paths, labels) in splits.items():
            keys = np.array([_path_key(path.removeprefix(self._prefix)) for path in paths], np.int64)
            order = np.argsort(keys, kind="stable")
            self._keys[split], ordered[split] = keys[order], (paths[order], labels[order])
        super().__init__(name, ordered, class_names, tf.io.read_file)
        self._unusable = np.array([], str)

    def paths(self) -> list[str]:
        """Returns the paths of all image files of all splits, sorted."""
        return sorted(str(path) for paths, _ in self._splits.values() for path in paths)

    def exclude(self, paths: Iterable[str]) -> None:
        """Removes files from all splits; keys and slices of the others stay."""
        self._unusable = np.array(sorted(paths), str)
        self._selected.clear()

    def _permute(self, split):
        parts = []
        for name, rows in self._rows(split):
            paths, labels = self._splits[name]
            kept = ~np.isin(paths[rows], self._unusable)
            parts.append([column[rows][kept] for column in (self._keys[name], paths, labels)])
        return [np.concatenate(column) for column in zip(*parts)]

    def _rows(self, split):
        """Yields (split name, slice of its rows) for each summand of `split`. Raises ValueError."""
        for part in self.split_names if split == "all" else split.split("+"):
            name = part.strip()
            begin = end = None
            if name not in self._splits:
                import tensorflow_datasets as tfds  # Here: it takes a while, and only slices need it.

                spec = tfds.core.ReadInstruction.from_spec(name)
                name, begin, end = spec.split_name, spec.from_, spec.to
                if name not in self._splits or spec.unit == "shard":
                    raise ValueError(f"{part} is not a slice of a split by number or percent")
                begin, end = (self._row(name, boundary, spec.unit == "%") for boundary in (begin, end))
            yield name, slice(begin, end)

    def _row(self, split, boundary, is_percent):
        """Returns the row of a slice's boundary, which is a number of images or percent; negative: from the end."""
        if boundary is None:
            return None
        count = len(self._keys[split])
        if is_percent:
            share = boundary if boundary >= 0 else 100 + boundary
            return int(np.searchsorted(self._keys[split], round(share * 2**_KEY_BITS / 100)))
        if abs(boundary) > count:
            raise ValueError(f"{split} has {count} images")
        return boundary if boundary >= 0 else count + boundary

    def describe_missing_classes(self) -> list[str]:
        """Returns one line for each split that has no images of some classes."""
        lines = []
        for split in self.split_names if self.class_names else ():
            present = set(self._select(split)[2].tolist())
            missing = [name for number, name in enumerate(self.class_names) if number not in present]
            if missing:
                lines.append(f"{self.name}: {split} has no images of {len(missing)} of {self.num_classes} classes "
                             f"({_enumerate(missing)})")
        return lines

    def describe_data(self) -> dict:
        """See `Source`. `files` is a hash of the paths below the root and the sizes of all image files."""
        digest = hashlib.sha256()
        for path in self.paths():
            size = os.path.getsize(path) if os.path.exists(path) else None
            digest.update(os.fsencode(path.removeprefix(self._prefix)) + f"\0{size}\n".encode())
        return dict(super().describe_data(), name="folder", classes=self.class_names, files=digest.hexdigest())


def _path_key(path):
    """Returns a non-negative key of `_KEY_BITS` bits for a relative path."""
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:8], "big") >> 64 - _KEY_BITS


def _enumerate(names):
    """Returns names as text, the first `_NAMED` of them."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def folder_source(path: str, follow_links: bool = False) -> FolderSource:
    """Returns the source of the images under `path`.

    Sub-folders are classes, with or without split folders above them (`train` or `training`, `validation`, `valid` or
    `val`, `test` or `testing`, in any case); without sub-folders, images are unlabelled. Labels number the sorted names
    of the classes of all splits. Folders without images and those of `image_files.is_ignored` do not count. Logs which
    folders and classes have no images.

    Args:
      path: the folder; `~` is expanded.
      follow_links: accept links that lead out of the folder.

    Raises:
      UserError: the folder is missing, empty, mixes images with class folders or split folders with others, or has
        links that lead out of it.
    """
    root, flag = pathlib.Path(os.path.expanduser(path)).absolute(), f"--dataset=folder:{path}"
    if not path or not root.is_dir():
        raise UserError(f"{flag}: there is no such directory. Check the path.")
    try:
        listing = _list(root)
        roots = _split_folders(root, listing, flag)
        found = {split: _scan(folder, flag) for split, folder in roots.items()}
    except OSError as error:
        raise UserError(f"{flag}: it cannot be read ({error.strerror}). Fix this, or choose another directory."
                        ) from error
    if not any(files for files, _ in found.values()):
        raise UserError(f"{flag}: it has no images ({', '.join(image_files.IMAGE_SUFFIXES)}). Check the path.")
    if not follow_links:
        _check_links(root, [file for files, _ in found.values() for _, file in files], flag)
    names = sorted({name for files, _ in found.values() for name, _ in files if name is not None})
    if names and any(name is None for files, _ in found.values() for name, _ in files):
        raise UserError(f"{flag}: it has class folders in one split and none in another. Use one layout.")
    number = {name: label for label, name in enumerate(names)} or {None: -1}
    splits = {split: (np.array([file for _, file in files]), np.array([number[name] for name, _ in files], np.int64))
              for split, (files, _) in found.items()}
    source = FolderSource(f"folder:{path}", root, splits, names or None)
    if root not in roots.values() and listing.empty:
        console.log(f"left out: folders without images: {_enumerate(listing.empty)}")
    empty = sorted({name for _, without_images in found.values() for name in without_images} - set(names))
    if names and empty:
        console.log(f"left out: class folders without images: {_enumerate(empty)}")
    runs = [name for folder in dict.fromkeys([root, *roots.values()]) for name in _runs_in(folder)]
    if runs:
        console.log(f"left out: directories of runs: {_enumerate(runs)}")
    for line in source.describe_missing_classes():
        console.log(line)
    return source


def _runs_in(folder):
    """Returns the names of the sub-folders that are directories of runs."""
    return [child.name for child in sorted(folder.iterdir()) if child.is_dir() and image_files.is_run_directory(child)]


@dataclasses.dataclass(frozen=True)
class _Listing:
    """Content of a folder: paths of images, sub-folders with images at any depth, and names of those without."""

    images: list[str]
    folders: list[pathlib.Path]
    empty: list[str]


def _split_of(folder):
    """Returns the split that a folder's name stands for, or None."""
    match = _SPLIT_FOLDER.fullmatch(folder.name)
    return match and _SPLITS[match[1].lower()]


def _list(folder):
    children = sorted(folder.iterdir())
    folders = [child for child in children if child.is_dir() and not image_files.is_ignored(folder, child.name)]
    has_images = [next(image_files.iterate_images(child), None) is not None for child in folders]
    return _Listing(
        [str(child) for child in children if image_files.is_image_name(child.name) and not child.is_dir()],
        [child for child, filled in zip(folders, has_images) if filled],
        [child.name for child, filled in zip(folders, has_images) if not filled])


def _split_folders(root, listing, flag):
    """Returns a dict: split -> folder, which is `root` alone if its sub-folders are not splits. Raises `UserError`."""
    named = [folder for folder in listing.folders if _split_of(folder)]
    others = [folder.name for folder in listing.folders if folder not in named]
    text = _enumerate([folder.name for folder in named])
    if not named:
        return {"train": root}
    if others and (len(named) > 1 or _list(named[0]).folders):
        raise UserError(f"{flag}: it has folders of splits ({text}) next to others ({_enumerate(others)}). Move the "
                        "others into the split folders or out of the data set, or rename the split folders if they are "
                        "classes.")
    if others:
        console.log(f"{flag.removeprefix('--dataset=')}: {text} is a class, not a split, since it is next to "
                     f"{_enumerate(others)}")
        return {"train": root}
    roots = {_split_of(folder): folder for folder in named}
    if len(roots) < len(named):
        raise UserError(f"{flag}: it has two folders for one split ({text}). Keep one of them.")
    if listing.images:
        raise UserError(f"{flag}: it has images ({os.path.basename(listing.images[0])}, ...) next to its split folders "
                        f"({text}). Move them into one of the split folders.")
    return roots


def _scan(folder, flag):
    """Returns (class name or None, path) of every image below a split's folder, and names of empty class folders."""
    listing = _list(folder)
    if listing.images and listing.folders:
        raise UserError(
            f"{flag}: {folder} has both images ({os.path.basename(listing.images[0])}, ...) and sub-folders "
            f"({listing.folders[0].name}, ...). Sub-folders are classes, so move the images into them.")
    for child in listing.folders:
        named = [inner for inner in _list(child).folders if _split_of(inner)]
        if len(named) > 1 or any(_list(inner).folders for inner in named):
            raise UserError(f"{flag}: {child.name} would be a class, but has folders of splits "
                            f"({_enumerate([inner.name for inner in named])}). Put the split folders above the "
                            f"classes, or pass --dataset=folder:{child} if that is the data set.")
    files = [(child.name, file) for child in listing.folders for file in image_files.find_images(child)]
    return [(None, file) for file in listing.images] + files, listing.empty


def _check_links(root, files, flag):
    """Raises `UserError` for files that lie outside of `root`."""
    inside = os.path.realpath(root) + os.sep
    real = {folder: os.path.realpath(folder) for folder in {os.path.dirname(file) for file in files}}
    outside = [file for file in files if not (
        os.path.realpath(file) if os.path.islink(file) else real[os.path.dirname(file)] + os.sep).startswith(inside)]
    if outside:
        raise UserError(f"{flag}: {len(outside)} images are links that lead out of it ({outside[0]}, ...). Set "
                        "--follow_links if this is intended.")
