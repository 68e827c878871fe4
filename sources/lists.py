"""Images listed in a table with their labels."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pandas as pd

from runtime import console
from runtime.errors import UserError, first_line
from sources import layout
from sources.files import FileSource
from sources.folders import find_groups
from sources.indexed import has_label

_IMAGE_COLUMNS = ("image", "file_name", "filename", "path")
_LABEL_COLUMNS = ("label", "class")


def list_source(
    path: str,
    data_dir: str | None,
    image_key: str | None,
    label_key: str | None,
    group_pattern: str | None,
) -> FileSource:
    """Returns a source for the images in a table (CSV or TSV).

    The table has a column with paths of images, relative to `data_dir` or to the directory of the
    table, and optionally columns with a label, a split (`split`) and a group (`group`; see
    `files.FileSource`). An image without a label has an empty field. If any field has several labels,
    separated by `|`, the source is multi-label.

    Args:
      path: the table; `~` is expanded.
      data_dir: directory of the images, or None.
      image_key: name of the column with paths, or None for `image`, `file_name`, `filename` or `path`.
      label_key: name of the column with labels, or None for `label` or `class`.
      group_pattern: value of `--group_pattern`, which replaces the column `group`, or None.

    Raises:
      UserError: the table cannot be read, a column or an image is missing, or an image is listed
        twice.
    """
    flag, file = f"--dataset=list:{path}", os.path.abspath(os.path.expanduser(path))
    try:
        with open(file, encoding="utf-8-sig") as lines:
            separator = max(",;\t", key=lines.readline().count)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                file,
                sep=separator,
                dtype=str,
                keep_default_na=False,
                encoding="utf-8-sig",
                index_col=False,
            )
    except (OSError, ValueError, pd.errors.ParserWarning) as error:  # The last: too many fields.
        raise UserError(
            f"{flag}: the table cannot be read ({first_line(error)}). Check the path, and the"
            " format (CSV or TSV, UTF-8, as many fields in each row as in the header)."
        ) from error
    table.columns = table.columns.str.strip().str.lower()
    root = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else os.path.dirname(file)
    paths = _column(table, flag, "image_key", image_key, _IMAGE_COLUMNS)
    images = paths.map(lambda path: os.path.relpath(os.path.join(root, path), root))
    labels = _column(table, flag, "label_key", label_key, _LABEL_COLUMNS).str.normalize("NFC")
    _check_rows(flag, "the same image is listed several times", images, images.duplicated(False))
    exists = images.map(lambda image: os.path.isfile(os.path.join(root, image)))
    missing = f"files are not in {root} (--data_dir selects another directory)"
    _check_rows(flag, missing, images, ~exists)
    splits = pd.Series("train", table.index)
    if "split" in table:
        splits = table["split"].str.strip().str.lower().map(layout.split_named)
        _check_rows(flag, "the split is not train, validation or test", images, splits.isna())
    groups = find_groups(images, group_pattern)
    if "group" in table and groups is None:
        column = table["group"].str.strip()
        groups = [*column.where(column != "", images)]
    class_names, numbers = _read_labels(labels)
    if class_names and (count := np.count_nonzero(~has_label(numbers))):
        console.log(f"list:{path}: {count:,} of {len(table):,} images have no label")
    return FileSource(f"list:{path}", root, splits, images, numbers, groups, class_names or None)


def _column(
    table: pd.DataFrame, flag: str, setting: str, given: str | None, names: tuple[str, ...]
) -> pd.Series:
    """Returns a column. The column with labels may be missing; the result is then empty strings."""
    for name in [given.lower()] if given else names:
        if name in table:
            return table[name].str.strip()
    if setting == "label_key" and not given:
        console.log(f"no labels: the columns are {', '.join(table)}. --label_key selects one.")
        return pd.Series("", table.index)
    raise UserError(
        f"{flag}: the table has no column {given or ' or '.join(names)}, only"
        f" {', '.join(table)}. Set --{setting}."
    )


def _check_rows(flag: str, problem: str, images: pd.Series, is_wrong: pd.Series) -> None:
    """Raises `UserError` if the mask `is_wrong` contains any row. The first row has number 2, as in a spreadsheet."""
    rows = np.flatnonzero(is_wrong)
    if len(rows):
        names = [f"{images.iloc[row]} (row {row + 2})" for row in rows]
        raise UserError(
            f"{flag}: {problem}: {console.join_first(names, limit=3)}. Correct the table."
        )


def _read_labels(labels: pd.Series) -> tuple[list[str], np.ndarray]:
    """Returns the sorted class names, and labels as numbers: int64 [n], or [n, classes] (see `Source.multi_label`)."""
    names = labels.str.split("|").explode().str.strip()
    names = names[names != ""]
    columns, class_names = pd.factorize(names, sort=True)
    if names.index.is_unique:
        numbers = np.full(len(labels), -1)
        numbers[names.index] = columns
    else:
        numbers = np.full([len(labels), len(class_names)], -1)
        numbers[names.index] = 0
        numbers[names.index, columns] = 1
    return [*class_names], numbers
