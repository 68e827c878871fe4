"""Output files with one row per image, as .npz, .csv or .parquet."""

from __future__ import annotations

import collections
import contextlib
import csv
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from runtime import storage

# Spreadsheets evaluate cells that start with these characters.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@contextlib.contextmanager
def open_writer(out: str, name: str) -> Iterator[Callable[..., None]]:
    """Returns a context manager that yields a function to append rows to a file.

    The function takes a dict of lists of strings, such as `{"file": [...]}`, an array of values of
    shape [n, d] and, optionally, a list of the names of the d values, by default v0, v1, ... The
    file is created when the context ends without an error. Rows are buffered on disk, not in
    memory.

    Args:
      out: result of `paths.check_out`.
      name: name of the values in .npz and .parquet files.
    """
    writer = _WRITERS[os.path.splitext(out)[1].lower()]
    storage.makedirs(os.path.dirname(out))
    with storage.replacing(out) as (path,), writer(path, name) as add:
        yield add


@contextlib.contextmanager
def _npz_writer(path: str, name: str) -> Iterator[Callable[..., None]]:
    """Writes the arrays `files` [n], `name` [n, d] and, if there are classes, `classes` [n] and `class_names` [d]."""
    strings: dict[str, Any] = collections.defaultdict(list)
    with tempfile.TemporaryFile(dir=os.path.dirname(path)) as raw, open(path, "wb") as file:

        def add(texts, values, columns=None):
            for column, items in texts.items():
                strings[{"file": "files", "class": "classes"}[column]].extend(items)
            if columns:
                strings["class_names"] = columns
            # `tofile` would not report the cause of an error.
            raw.write(values.astype(np.float32).tobytes())

        yield add
        raw.flush()
        values = np.memmap(raw, np.float32, "r").reshape(len(strings["files"]), -1)
        np.savez(file, **{**strings, name: values})


@contextlib.contextmanager
def _csv_writer(path: str, name: str) -> Iterator[Callable[..., None]]:
    """Writes one line per image, and quotes cells that a spreadsheet would evaluate as formulas."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)

        def add(texts, values, columns=None):
            if not file.tell():
                names = columns or [f"v{column}" for column in range(values.shape[1])]
                rows.writerow([*texts, *map(_quote, names)])
            texts = {**texts, "file": list(map(quote_path, texts["file"]))}
            rows.writerows(
                [*map(_quote, row), *map(str, vector)]
                for *row, vector in zip(*texts.values(), values)
            )

        yield add


def quote_path(path: str) -> str:
    """Returns a path that refers to the same file and that spreadsheets do not evaluate as a formula."""
    return f"./{path}" if path.startswith(_FORMULA_STARTS) else path


def _quote(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


@contextlib.contextmanager
def _parquet_writer(path: str, name: str) -> Iterator[Callable[..., None]]:
    """Writes columns of strings and a column of lists. The metadata of the schema contains the class names."""
    import pyarrow  # Imported here because only this format requires it.
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        writer = None

        def add(texts, values, columns=None):
            nonlocal writer
            lists = pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(values.astype(np.float32).ravel()), values.shape[1]
            )
            strings = {
                column: pyarrow.array(items, pyarrow.string()) for column, items in texts.items()
            }
            metadata = {"class_names": "\n".join(columns)} if columns else None
            table = pyarrow.table({**strings, name: lists}, metadata=metadata)
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)

        yield add


_WRITERS = {".npz": _npz_writer, ".csv": _csv_writer, ".parquet": _parquet_writer}
