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

NOTHING_WRITTEN = "nothing was written; run the same command again"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # Spreadsheets evaluate cells that start with these characters.


def _find_images(folder):
    """Returns the sorted paths of all image files under a folder. Raises `UserError` if there are none."""
    files = image_files.find_images(folder)
    if not files:
        raise UserError(f"FOLDER={folder}: no images found (supported formats: "
                        f"{', '.join(image_files.IMAGE_SUFFIXES)}). Check the path.")
    return files


def _write_strings(file, strings, chunk_size=4096):
    """Writes strings, padded to the same length, as a .npy array. Pads them in chunks to save memory."""
    dtype = np.dtype((np.str_, max(map(len, strings), default=1)))
    np.lib.format.write_array_header_1_0(file, dict(descr=dtype.str, fortran_order=False, shape=(len(strings),)))
    for begin in range(0, len(strings), chunk_size):
        file.write(np.array(strings[begin:begin + chunk_size], dtype).tobytes())


@contextlib.contextmanager
def _npz_writer(path):
    """Yields a function that appends file names and vectors to a .npz file: `files` [n] and float32 `vectors` [n, d].

    Vectors are buffered in a temporary file, not in memory. `path` is created once all vectors are available.
    """
    files, widths = [], set()
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as scratch:
        temporary_path = os.path.join(scratch, "vectors.npz")
        with open(os.path.join(scratch, "raw"), "w+b") as raw:
            def add(names, vectors):
                files.extend(names)
                widths.add(vectors.shape[1])
                # `tofile` would not report the cause of an error.
                raw.write(vectors.astype(np.float32).tobytes())

            yield add
            raw.seek(0)
            with zipfile.ZipFile(temporary_path, "w") as bundle:
                with bundle.open("files.npy", "w", force_zip64=True) as member:
                    _write_strings(member, files)
                with bundle.open("vectors.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(
                        member, dict(descr="<f4", fortran_order=False, shape=(len(files), *widths)))
                    shutil.copyfileobj(raw, member)
        os.replace(temporary_path, path)


@contextlib.contextmanager
def _csv_writer(path):
    """Yields a function that appends file names and vectors to a .csv file, one line per image.

    A name that a spreadsheet would evaluate as a formula is written as ./NAME, which refers to the same file.
    """
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path) or ".") as scratch:
        temporary_path = os.path.join(scratch, "vectors.csv")
        with open(temporary_path, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)

            def add(names, vectors):
                if not file.tell():
                    rows.writerow(["file", *(f"v{column}" for column in range(vectors.shape[1]))])
                rows.writerows([f"./{name}" if name.startswith(_FORMULA_STARTS) else name, *map(str, vector)]
                               for name, vector in zip(names, vectors))

            yield add
        os.replace(temporary_path, path)


_WRITERS = {".npz": _npz_writer, ".csv": _csv_writer}


def embed(saved_model: str, folder: str, out: str, output: str = "final_avg_pool", image_size: int | None = None
         ) -> tuple[int, list[str]]:
    """Writes one vector per image under `folder`. Only file names and two batches are held in memory.

    Args:
      saved_model: see `load_endpoint`.
      folder: directory to search recursively. File names are written relative to it, in sorted order.
      out: path of the output file, either .npz (with arrays `files` and `vectors`) or .csv.
      output: name of the endpoint.
      image_size: image size in pixels. None: the model's image size, or 224 if unknown.

    Returns:
      The number of vectors written, and the paths of unreadable images.

    Raises:
      UserError: an argument is invalid.
      errors.Stopped: a signal arrived; nothing is written.
    """
    saved_model, out = check_weights_path("MODEL", saved_model), check_path("out", out)
    folder = check_path("FOLDER", folder, allow_patterns=True)
    for name, path in (("--out", out), ("FOLDER", folder)):
        if "://" in path:
            raise UserError(f"{name}={path}: only local paths are supported here. Use a local path.")
    out = os.path.realpath(out)  # If `out` is a link, replace its target, not the link.
    writer = _WRITERS.get(os.path.splitext(out)[1].lower())
    if writer is None:
        raise UserError(f"--out={out}: unsupported format. Use a file name that ends in {' or '.join(_WRITERS)}.")
    check_writable_parent("--out", out)
    if os.path.isdir(out):
        raise UserError(f"--out={out}: the path is a directory. Pass the path of a file.")
    paths = _find_images(folder)
    function, description = endpoints.load_endpoint(saved_model, output)
    size = image_size or description.get("image_size", 224)
    written, unreadable = 0, []
    signals.safe_point(NOTHING_WRITTEN)
    with writer(out) as add, progress.terminal_bar(None, len(paths), "images") as bar:
        crop = endpoints.uses_center_crop(description, size)
        for readable, vectors, batch_unreadable in endpoints.compute_endpoint(function, size, crop, paths):
            if readable:
                add([os.path.relpath(path, folder) for path in readable], vectors.reshape(len(readable), -1))
            written, unreadable = written + len(readable), unreadable + batch_unreadable
            bar.update(len(readable) + len(batch_unreadable))
            signals.safe_point(NOTHING_WRITTEN)
        if not written:
            raise UserError(f"FOLDER={folder}: none of the {len(paths)} images can be read. Check the "
                            "image files.")
    return written, unreadable
