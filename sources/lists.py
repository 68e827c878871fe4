"""Images listed in a table with their labels."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pandas as pd

from runtime import console
from runtime.errors import UserError, first_line
from sources import classes, layout
from sources.files import Files, FileSource
from sources.folders import find_groups
from sources.indexed import has_label

_IMAGE_COLUMNS = ("image", "file_name", "filename", "path")
_LABEL_COLUMNS = ("label", "class")
_COLUMN_SEPARATORS, _LABEL_SEPARATOR = ",;\t", "|"


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
    `files.Files`). An image without a label has an empty field. If any field has several labels,
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
            separator = max(_COLUMN_SEPARATORS, key=lines.readline().count)
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
    except pd.errors.ParserWarning as error:
        raise UserError(
            f"{flag}: rows have more fields than the header. Correct the table."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag}: the table cannot be read ({first_line(error)}). Check the path, and the"
            " format (CSV or TSV, UTF-8)."
        ) from error
    table.columns = table.columns.str.strip().str.lower()
    if table.columns.has_duplicates:
        raise UserError(f"{flag}: columns have the same name, except for case. Rename them.")
    root = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else os.path.dirname(file)
    paths = _column(table, flag, "image_key", image_key, _IMAGE_COLUMNS)
    images = paths.map(lambda path: os.path.relpath(os.path.join(root, path), root))
    if table.empty:
        raise UserError(f"{flag}: the table has no rows. Add images.")
    labels = _column(table, flag, "label_key", label_key, _LABEL_COLUMNS).str.normalize("NFC")
    _check_rows(flag, "the same image is listed several times", images, images.duplicated(False))
    exists = images.map(lambda image: os.path.isfile(os.path.join(root, image)))
    missing = f"files are not in {root} (--data_dir selects another directory)"
    _check_rows(flag, missing, images, ~exists)
    splits = pd.Series("train", table.index)
    if "split" in table:
        splits = table["split"].str.strip().str.lower().map(layout.split_named)
        _check_rows(flag, "the split is not train, validation or test", images, splits.isna())
    groups = find_groups([*images], group_pattern)
    if "group" in table and groups is None:
        column = table["group"].str.strip()
        groups = [*column.where(column != "", images)]
    class_names, numbers = _read_labels(labels)
    if class_names and (count := np.count_nonzero(~has_label(numbers))):
        console.log(f"list:{path}: {count:,} of {len(table):,} images have no label")
    files = {}
    for split, rows in splits.groupby(splits).indices.items():
        members = groups and [groups[row] for row in rows]
        files[split] = Files([*images.iloc[rows]], numbers[rows], members)
    return FileSource(f"list:{path}", root, files, class_names or None, numbers.ndim == 2)


def _column(
    table: pd.DataFrame, flag: str, setting: str, given: str | None, names: tuple[str, ...]
) -> pd.Series:
    """Returns a column. The column with labels may be missing; the result is then empty strings."""
    if given is None and setting == "label_key" and not set(names) & set(table):
        console.log(f"no labels: the columns are {', '.join(table)}. --label_key selects one.")
        return pd.Series("", table.index)
    name = given.lower() if given else next((name for name in names if name in table), None)
    if name not in table:
        raise UserError(
            f"{flag}: the table has no column {given or ' or '.join(names)}, only"
            f" {', '.join(table)}. Set --{setting}."
        )
    return table[name].str.strip()


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
    sets = [[*filter(None, map(str.strip, text.split(_LABEL_SEPARATOR)))] for text in labels]
    class_names = sorted({name for names in sets for name in names})
    if all(len(names) <= 1 for names in sets):
        return class_names, np.array(classes.indices_of(map("".join, sets), class_names))
    # Imported here because only multi-label tables require scikit-learn.
    from sklearn import preprocessing

    numbers = preprocessing.MultiLabelBinarizer(classes=class_names).fit_transform(sets)
    numbers[[not names for names in sets]] = -1
    return class_names, numbers
