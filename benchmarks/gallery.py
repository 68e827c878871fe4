"""Time and peak memory of the similarity search of `python -m inference gallery`, for several numbers of images.

    python -m benchmarks.gallery [--sizes=1000,10000]

Compares `inference.similarity.search` with a baseline, which computes the full similarity matrix
and partially sorts its rows. Both search for 24 neighbors and for pairs with a similarity of at
least 0.95. The vectors have 512 dimensions and form 100 random clusters; 1 % of them are
near-duplicates. Prints one JSON line per case. Each measurement runs in a separate process. The
memory is the increase in peak memory, without the vectors. Requires Linux, because the peak memory
is read and reset in /proc. The baseline is skipped for 100,000 vectors, because its matrix would
take 40 GB.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np

from benchmarks import measure
from inference import similarity

_SIZES = (1_000, 10_000, 100_000)
_LARGEST_PLAIN = 10_000
_WIDTH, _CLUSTERS = 512, 100
_NEIGHBORS, _THRESHOLD = 24, 0.95


def clustered_vectors(count):
    """Returns vectors of norm 1 from random clusters, float32 [count, width].

    Vectors in the same cluster have a cosine similarity of about 0.8.
    """
    random = np.random.default_rng(0)
    centers = similarity.normalize(random.normal(size=[_CLUSTERS, _WIDTH]))
    vectors = np.empty([count, _WIDTH], np.float32)
    # Each copy is fewer than 1,000 rows away from its original.
    for rows in np.array_split(vectors, -(-count // 1000)):
        rows[:] = centers[random.integers(0, _CLUSTERS, len(rows))]
        rows += 0.5 * _WIDTH**-0.5 * random.standard_normal(rows.shape, np.float32)
        originals, copies = random.choice(len(rows), [2, len(rows) // 100], replace=False)
        rows[copies] = rows[originals] + 1e-3 * random.standard_normal(
            [len(copies), _WIDTH], np.float32
        )
        rows[:] = similarity.normalize(rows)
    return vectors


def blocked(vectors):
    """Returns the number of pairs that reach the threshold."""
    return similarity.search(vectors, _NEIGHBORS, _THRESHOLD).num_pairs


def plain(vectors):
    """Computes the same result as `blocked` from the full similarity matrix."""
    matrix = vectors @ vectors.T
    np.fill_diagonal(matrix, -np.inf)
    order = np.argpartition(-matrix, _NEIGHBORS, axis=1)[:, :_NEIGHBORS]
    np.sort(np.take_along_axis(matrix, order, 1), axis=1)
    return int(np.count_nonzero(matrix >= _THRESHOLD)) // 2


def peak_megabytes():
    """Returns the peak resident memory of this process since the last `reset_peak`, in MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def reset_peak():
    """Resets the recorded peak memory usage of this process to its current memory usage."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure_one(form, count):
    """Returns the run time and memory usage of a search, and the number of pairs found. Called in a child process."""
    function = {"blocked": blocked, "plain": plain}[form]
    # Libraries allocate their buffers here, outside the measurement.
    function(clustered_vectors(256))
    vectors = clustered_vectors(int(count))
    reset_peak()
    before, begin = peak_megabytes(), time.perf_counter()
    pairs = function(vectors)
    seconds = time.perf_counter() - begin
    return dict(seconds=seconds, megabytes=peak_megabytes() - before, pairs=pairs)


def main():
    """Measures each case in its own process, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes",
        type=measure.parse_sizes,
        default=_SIZES,
        help="comma-separated numbers of vectors",
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_one(*arguments.child)))
        return
    measure.report_machine()
    for count in arguments.sizes:
        ours = measure.in_child("benchmarks.gallery", "--child", "blocked", count)
        baseline = (
            measure.in_child("benchmarks.gallery", "--child", "plain", count)
            if count <= _LARGEST_PLAIN
            else {}
        )
        for key, unit in (("seconds", "s"), ("megabytes", "MB")):
            measure.report(
                "gallery",
                f"search, {count} x {_WIDTH}",
                unit,
                ours[key],
                baseline.get(key),
                pairs=ours["pairs"],
            )


if __name__ == "__main__":
    main()
