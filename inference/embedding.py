"""Embeddings of all images in a folder."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import tempfile
import zipfile

import numpy as np

from inference import endpoints
from runtime import progress, signals
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path, check_writable_parent
from sources import image_files

NOTHING_WRITTEN = "nothing was written; start the same command again"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # Spreadsheets evaluate cells that begin with one of them.


def _find_images(folder):
    """Returns all image files below a folder, sorted. Raises `UserError` if there are none."""
    files = image_files.find_images(folder)
    if not files:
        raise UserError(f"FOLDER={folder} has no images ({', '.join(image_files.IMAGE_SUFFIXES)}): check the path")
    return files


def _write_strings(file, strings, at_once=4096):
    """Writes strings as a .npy array; few of them at once, since each takes as much room as the longest."""
    kind = np.dtype((np.str_, max(map(len, strings), default=1)))
    np.lib.format.write_array_header_1_0(file, dict(descr=kind.str, fortran_order=False, shape=(len(strings),)))
    for begin in range(0, len(strings), at_once):
        file.write(np.array(strings[begin:begin + at_once], kind).tobytes())


@contextlib.contextmanager
def _npz_writer(path):
    """Gives a function that appends (files, vectors) to `files` [n] and `vectors` [n, d] float32 of a .npz.

    The vectors pass through a file, not through memory. `path` appears once all is written.
    """
    files, widths = [], set()
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as scratch:
        part = os.path.join(scratch, "part.npz")
        with open(os.path.join(scratch, "raw"), "w+b") as raw:
            def add(names, vectors):
                files.extend(names)
                widths.add(vectors.shape[1])
                raw.write(vectors.astype(np.float32).tobytes())  # `tofile` does not say why it fails.

            yield add
            raw.seek(0)
            with zipfile.ZipFile(part, "w") as bundle:
                with bundle.open("files.npy", "w", force_zip64=True) as member:
                    _write_strings(member, files)
                with bundle.open("vectors.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(
                        member, dict(descr="<f4", fortran_order=False, shape=(len(files), *widths)))
                    shutil.copyfileobj(raw, member)
        os.replace(part, path)


@contextlib.contextmanager
def _csv_writer(path):
    """Yields the same for a .csv: one line per file, its name and the numbers of its vector.

    A name that a spreadsheet would evaluate as a formula is written as ./NAME, which is the same file.
    """
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as scratch:
        part = os.path.join(scratch, "part.csv")
        with open(part, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)

            def add(names, vectors):
                if not file.tell():
                    rows.writerow(["file", *(f"v{number}" for number in range(vectors.shape[1]))])
                rows.writerows([f"./{name}" if name.startswith(_FORMULA_STARTS) else name, *map(str, vector)]
                               for name, vector in zip(names, vectors))

            yield add
        os.replace(part, path)


_WRITERS = {".npz": _npz_writer, ".csv": _csv_writer}


def embed(saved_model: str, folder: str, out: str, output: str = "final_avg_pool", image_size: int | None = None
         ) -> tuple[int, list[str]]:
    """Writes a vector for every image below `folder`, holding their names and two batches in memory.

    Args:
      saved_model: see `load_endpoint`.
      folder: searched at any depth; names are written relative to it, in sorted order.
      out: .npz (`files`, `vectors`) or .csv.
      output: endpoint to write.
      image_size: in pixels; used if the model does not specify it.

    Returns:
      number of vectors written, and the files that cannot be read.

    Raises:
      UserError: an argument cannot be used.
      errors.Stopped: by a signal; nothing is written.
    """
    saved_model, out = check_weights_path("MODEL", saved_model), check_path("out", out)
    folder = check_path("FOLDER", folder, allow_patterns=True)
    for name, path in (("--out", out), ("FOLDER", folder)):
        if "://" in path:
            raise UserError(f"{name}={path}: only local paths are supported here. Use a local path.")
    out = os.path.realpath(out)  # Through links.
    writer = _WRITERS.get(os.path.splitext(out)[1].lower())
    if writer is None:
        raise UserError(f"--out={out}: name a file that ends in {' or '.join(_WRITERS)}")
    check_writable_parent("--out", out)
    if os.path.isdir(out):
        raise UserError(f"--out={out} is a directory: name a file")
    paths = _find_images(folder)
    function, description = endpoints.load_endpoint(saved_model, output)
    size = image_size or description.get("image_size", 224)
    written, unreadable = 0, []
    signals.safe_point(NOTHING_WRITTEN)
    with writer(out) as add, progress.terminal_bar(None, len(paths), "images") as bar:
        crop = endpoints.uses_center_crop(description, size)
        for good, vectors, bad in endpoints.compute_endpoint(function, size, crop, paths):
            if good:
                add([os.path.relpath(path, folder) for path in good], vectors.reshape(len(good), -1))
            written, unreadable = written + len(good), unreadable + bad
            bar.update(len(good) + len(bad))
            signals.safe_point(NOTHING_WRITTEN)
        if not written:
            raise UserError(f"FOLDER={folder}: none of its {len(paths)} images can be read")
    return written, unreadable
