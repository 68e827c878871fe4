"""Finds the classes and the splits in the folders of a data set."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from runtime import console
from runtime.errors import UserError
from sources.image_files import Folder

# The images of a split: class names, or None for images without a class -> relative paths.
Images = dict[str | None, list[str]]
# Maps split folder names (case-insensitive) to splits. Names such as `train_set` and `val2017` also
# match.
SPLITS = {
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
    rf"({'|'.join(SPLITS)})([ _-]?(set|split|data|images|\d+))?", re.IGNORECASE
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NOT_CLASSES = re.compile(
    r"(jpeg)?im(age|g)s?|annotations?|masks?|edges|labels?|ground_?truth|segmentation\w*",
    re.IGNORECASE,
)
_PART = re.compile(r"im(age|g)|part|batch|chunk", re.IGNORECASE)
_DATE = re.compile(  # a year, a month or another number
    r"[\d\W_]+|(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*", re.IGNORECASE
)


def find_layout(root: Folder, name: str, labels: bool) -> tuple[dict[str, Images], list[str]]:
    """Finds splits and classes.

    Each sub-folder is a class, and contains images at any depth. Without sub-folders, images have no
    class. Classes may be in split folders. A folder that contains only one folder of folders is
    replaced by that folder. A split without classes is not used if `train` has classes.

    Args:
      root: the folder of the data set.
      name: value of `--dataset`.
      labels: whether the classes will be used.

    Returns:
      A dict that maps splits to their images, and lines to log.

    Raises:
      UserError: the layout is ambiguous.
    """
    flag, lines = f"--dataset={name}", []
    folder = _without_wrappers(root, may_be_split=False)
    if folder is not root:
        inner = os.path.join(name, folder.path)
        lines.append(f"{name}: the data set is in its sub-folder {folder.path} (--dataset={inner})")
    folders = {
        split: _without_wrappers(inner)
        for split, inner in _split_folders(folder, flag, lines).items()
    }
    splits = {split: _classes(inner, flag, lines) for split, inner in folders.items()}
    if labels:
        splits = _labeled_splits(splits, flag, lines)
    names = class_names(splits)
    found = {child.name for each in (folder, *folders.values()) for child in each.empty}
    empty = sorted(found - set(names))
    if names and empty:
        lines.append(f"ignored class folders without images: {console.join_first(empty)}")
    if len(names) > 1 and all(map(_DATE.fullmatch, names)):
        lines.append(f"classes: {console.join_first(names)} (run.py --nolabels ignores them)")
    return splits, lines


def class_names(splits: Mapping[str, Iterable[str | None]]) -> list[str]:
    """Returns the sorted class names of all splits."""
    return sorted(set().union(*splits.values()) - {None})


def _without_wrappers(folder: Folder, may_be_split: bool = True) -> Folder:
    """Descends from folders that contain only one folder, which in turn contains only folders."""
    while not folder.images and len(folder.folders) == 1:
        (inner,) = folder.folders
        if inner.images or (split_named(inner.name) and not may_be_split):
            break
        folder = inner
    return folder


def split_named(name: str) -> str | None:
    """Returns the split that a name denotes, or None."""
    match: Any = _SPLIT_FOLDER.fullmatch(name)
    return match and SPLITS[match[1].lower()]


def _split_in(name: str) -> tuple[str | None, str]:
    """Returns the split that a word in a name denotes, or None, and the name without this word."""
    for match in _WORD.finditer(name):
        if split := SPLITS.get(match[0].lower()):
            return split, name[: match.start()] + name[match.end() :]
    return None, name


def _names(folders: list[Folder]) -> str:
    return console.join_first([folder.name for folder in folders])


def _split_folders(root: Folder, flag: str, lines: list[str]) -> dict[str, Folder]:
    """Returns a dict mapping splits to folders. Without split folders, it maps `train` to `root`."""
    split_folders = [folder for folder in root.folders if split_named(folder.name)]
    others = [folder for folder in root.folders if not split_named(folder.name)]
    names = _names(split_folders)
    if not split_folders:
        return {"train": root}
    if others:
        if len(split_folders) > 1 or split_folders[0].folders:
            raise UserError(
                f"{flag}: split folders ({names}) are next to other folders ({_names(others)}). Move"
                " the other folders into the split folders or out of the data set, or rename the"
                " split folders if they are classes."
            )
        lines.append(
            f"{flag.removeprefix('--dataset=')}: the folder {names} counts as a class, not as a"
            f" split, because it is next to {_names(others)}"
        )
        return {"train": root}
    folders = {split_named(folder.name): folder for folder in split_folders}
    if len(folders) < len(split_folders):
        raise UserError(
            f"{flag}: two folders contain the same split ({names}). Keep only one of them."
        )
    if root.images:
        raise UserError(
            f"{flag}: images ({root.images[0]}, ...) are next to split folders ({names}). Move them"
            " into one of the split folders."
        )
    return folders


def _classes(folder: Folder, flag: str, lines: list[str]) -> Images:
    """Returns the images of a folder by class."""
    if folder.images and folder.folders:
        place = f" in {folder.path}" if folder.path else ""
        raise UserError(
            f"{flag}: there are both images ({folder.images[0]}, ...) and sub-folders"
            f" ({folder.folders[0].name}, ...){place}. Set --nolabels to use all images without"
            " labels, or move the images into the sub-folders, which are the classes."
        )
    for child in folder.folders:
        inner = [folder for folder in child.folders if split_named(folder.name)]
        if len(inner) > 1 or any(each.folders for each in inner):
            raise UserError(
                f"{flag}: {child.name} would be a class, but contains split folders"
                f" ({_names(inner)}). Pass the folder that is the data set, {flag}/{child.path} or"
                " another, or move the split folders above the class folders."
            )
    if not folder.folders:
        return {None: [*folder.files()]}
    inner = {
        child.name: {each.name for each in _without_wrappers(child).folders}
        for child in folder.folders
    }
    for name, within in inner.items():
        copies = within & inner.keys()
        if len(copies) > 1:
            raise UserError(
                f"{flag}: the folder {name} contains folders with the names of other classes"
                f" ({console.join_first(sorted(copies))}). Remove one of the copies."
            )
    counts = collections.Counter(name for within in inner.values() for name in within)
    shared = [name for name, count in counts.items() if 2 * count > len(inner) > 1]
    if len(shared) > 1:
        lines.append(
            f"{_names(folder.folders)} are the classes, although they contain the same folders"
            f" ({console.join_first(sorted(shared))}). If those are the classes, move them up."
        )
    images = collections.defaultdict(list)
    for child in folder.folders:
        images[child.name] += child.files()
    return images


def _labeled_splits(splits: dict[str, Images], flag: str, lines: list[str]) -> dict[str, Images]:
    """Returns the splits to use. Raises `UserError` if their classes contradict each other."""
    names = class_names(splits)
    found = {_split_in(name) for name in names}
    kinds = {split for split, _ in found}
    rests = [rest for split, rest in found if split]
    # Names that differ only in a number.
    parts = {re.sub(r"\d+", "", name) for name in names}
    problem = None
    if (len(kinds) > 1 and None not in kinds) or len(set(rests)) < len(rests):
        problem = "splits rather than classes. Rename them (train, test)"
    elif len(names) > 1 and (
        all(map(_NOT_CLASSES.fullmatch, names)) or (len(parts) == 1 and _PART.search(min(parts)))
    ):
        problem = "not classes. Pass the folder with the images"
    if problem:
        raise UserError(
            f"{flag}: the folders {console.join_first(names)} are {problem}, or set --nolabels"
            " to use all images without labels."
        )
    unlabeled = [split for split in splits if None in splits[split]]
    if names and "train" in unlabeled:
        raise UserError(
            f"{flag}: train has no class folders, but other splits have. Use the same layout in all"
            " splits, or set --nolabels."
        )
    classes, used = splits.get("train", {}), {}
    for split, images in splits.items():
        if split in unlabeled and names:
            reason = "it has no class folders"
        elif len(images) == 1 and len(classes) > 1 and not images.keys() & classes.keys():
            reason = f"its only folder, {min(images)}, is not a class of train"
        else:
            used[split] = images
            continue
        lines.append(f"{split} is not used, because {reason} (with --nolabels, it is used)")
    return used
