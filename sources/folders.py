"""Image folders, with or without classes and splits."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime import console
from runtime.errors import UserError
from runtime.paths import check_folder
from sources import classes, image_files, layout, tfds_source
from sources.files import FileSource


def folder_source(path: str, labels: bool = True, group_pattern: str | None = None) -> FileSource:
    """Returns a source for the images below `path`.

    For the layout of classes and splits, see `layout.find_layout`. Labels are indices into the sorted
    class names of all splits. What is ignored is logged.

    Args:
      path: the folder; `~` is expanded.
      labels: whether the labels will be used. If not, images are also used if the layout is
        ambiguous.
      group_pattern: value of `--group_pattern`.

    Raises:
      UserError: the folder is missing or has no images, or the layout is ambiguous.
    """
    check_folder(path)
    root, name = os.path.abspath(os.path.expanduser(path)), f"folder:{path}"
    found = image_files.search(root)
    others = console.join_first([f"{count} {suffix}" for suffix, count in found.others.items()])
    if not any(found.folder.files()):
        remedy = tfds_source.prepared_data_set(root) or "Check the path."
        raise UserError(
            f"--dataset={name}: the directory has no images (other files: {others or 'none'})."
            f" {remedy}"
        )
    try:
        splits, lines = layout.find_layout(found.folder, name, labels)
    except UserError:
        if labels:
            raise
        splits, lines = {"train": {None: [*found.folder.files()]}}, []
    console.log_lines(lines)
    if found.runs:
        console.log(f"ignored run directories: {console.join_first(found.runs)}")
    if others:
        if {".heic", ".heif"} & found.others.keys():
            others += " (HEIC images require: pip install pillow-heif)"
        console.log(f"ignored files that are not images: {others}")
    class_names = layout.class_names(splits)
    rows = [
        (split, path, class_name)
        for split, images in splits.items()
        for class_name, paths in images.items()
        for path in paths
    ]
    names_of_splits, paths, names = zip(*rows)
    numbers = np.array(classes.indices_of(names, class_names))
    groups = find_groups(paths, group_pattern)
    return FileSource(name, root, names_of_splits, paths, numbers, groups, class_names or None)


def find_groups(paths: Sequence[str], pattern: str | None) -> list[str] | None:
    """Returns the groups of images: what `--group_pattern` matches in their paths.

    This is the first capturing group of the pattern if there is one, and otherwise the whole match.
    An image whose path does not match forms its own group; the number of such images is logged.

    Raises:
      UserError: no path matches.
    """
    if pattern is None:
        return None
    groups: list[Any] = [
        (match := re.search(pattern, path)) and match[min(match.re.groups, 1)] for path in paths
    ]
    others = [path for path, group in zip(paths, groups) if group is None]
    if len(set(groups)) == 1:
        problem = f"all images are in the group {groups[0]}, so none can be held out"
        if others:
            problem = f"no path matches, for example {paths[0]}"
        raise UserError(f"--group_pattern={pattern}: {problem}. Correct the pattern.")
    if others:
        console.log(
            f"--group_pattern={pattern}: {len(others)} of {len(paths)} paths do not match, so each"
            f" of these images forms its own group: {console.join_first(others)}"
        )
    return [path if group is None else group for path, group in zip(paths, groups)]
