"""HTML page that shows which images an encoder considers similar."""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from PIL import Image

import metrics
from config import DEFAULT_CONVERSION, Conversion
from inference import analysis, endpoints, similarity, thumbnails, writers
from probing import features
from probing.nearest_neighbors import KNN_NEIGHBORS
from runtime import console, progress, signals, storage
from runtime.errors import UserError, first_line
from runtime.paths import TABLES, check_out, check_path
from sources import image_files
from sources.files import FileSource

_NUM_QUERIES = 12
_NUM_NEIGHBORS = 8  # number of neighbors shown for each query
# number of queries with neighbors by raw pixels, and the side length of the compared images
_NUM_PIXEL_QUERIES, _PIXELS = 3, 32
# number of pairs to show, and number of neighbors to search for (see `similarity.search`)
_NUM_PAIRS = 24
_NUM_OUTLIERS = 24
_NUM_TYPICAL = 8  # number of images shown for each cluster
_MAX_CLASSES = 30  # maximum number of classes shown
_NUM_CONFUSIONS, _NUM_EXAMPLES = 10, 4
_MAX_COLORS = 20  # maximum number of classes with separate colors in the map
_MAX_MAP_IMAGES = 2000
_MAX_SAMPLE = 2000  # maximum number of images in the gallery of a run


@dataclasses.dataclass(frozen=True)
class Images:
    """Readable images of a gallery.

    Attributes:
      paths: paths of the files.
      names: names to show.
      vectors: vectors of the images, float32 [n, d], all finite.
      classes: class names of the images, or None if there are no classes.
      unreadable: dict mapping the names of unreadable images to reasons.
      total: number of images from which the images were chosen at random, or 0 if they were not chosen
        at random.
      conversion: see `image_files.convert`.
    """

    paths: list[str]
    names: list[str]
    vectors: np.ndarray
    classes: list[str] | None
    unreadable: dict[str, str]
    total: int = 0
    conversion: Conversion = DEFAULT_CONVERSION


# ---------------------------------------------------------------------------------------------------------- images


def write_gallery(arguments: argparse.Namespace, given: dict[str, int]) -> dict[str, str]:
    """Writes a gallery of images, and a CSV file of similar pairs next to it (see `write_page`).

    Args:
      arguments: the parsed arguments of `python -m inference gallery`.
      given: see `inspection.inspect_checkpoint`.

    Returns:
      A dict mapping the paths of unreadable images to reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    model, out = arguments.model, arguments.out
    check_out(pairs_path(out), TABLES)
    names = endpoints.find_images(arguments.inputs)
    # A query is a path or, if the only input is a folder, a name relative to this folder.
    path_of = {os.path.abspath(path): path for path in names}
    path_of.update({name: path for path, name in names.items()})
    queries = []
    for query in arguments.query:
        path = path_of.get(query) or path_of.get(os.path.abspath(os.path.expanduser(query)))
        if path is None:
            raise UserError(
                f"--query={query}: this file is not among the images. Use a path or a name in INPUT."
            )
        queries.append(path)
    if arguments.vectors:
        encoded = _read_vectors(arguments.vectors, names)
    else:
        encoded = _compute_vectors(model, list(names), arguments.output, given)
    paths, _, unreadable, _ = encoded
    images = _make_images(names, endpoints.find_classes(arguments.inputs), *encoded)
    rows = [paths.index(path) for path in queries if path in paths]
    write_page(images, model, out, rows, arguments.threshold, arguments.clusters, arguments.seed)
    console.log(f"wrote {out} and {pairs_path(out)}")
    return unreadable


def write_for_run(
    model: str, source: FileSource, split: str, directory: str, seed: int, check: Callable[[], None]
) -> str | None:
    """Writes gallery.html and gallery.pairs.csv for at most 2,000 random images of a split.

    A page that is newer than the model is kept. Images that the source excludes are not used.
    Errors are only logged, because the results of the run are already complete.

    Args:
      model: see `endpoints.load_endpoint`.
      source: the image folder.
      split: the split, or a slice of it.
      directory: run directory.
      seed: seed for sampling the images, and for the random choices made when the page is built.
      check: called before the files are written.

    Returns:
      The path of the page, or None if it was not written.
    """
    out = os.path.join(directory, "gallery.html")
    with contextlib.suppress(OSError):  # One of the files is missing or not local.
        oldest = min(map(os.path.getmtime, (out, pairs_path(out))))
        if oldest > os.path.getmtime(os.path.join(model, "saved_model.pb")):
            return out
    try:
        console.log("writing the gallery")
        paths = sorted(source.labeled_paths(split)[0])
        count = len(paths)
        sample = np.random.default_rng(seed).choice(count, min(_MAX_SAMPLE, count), replace=False)
        names = {paths[row]: os.path.relpath(paths[row], source.root) for row in np.sort(sample)}
        encoded = _compute_vectors(model, list(names))
        images = _make_images(names, endpoints.class_of_names(source, split), *encoded, count)
        check()
        write_page(images, model, out, seed=seed)
        return out
    except Exception as error:
        console.log(f"warning: the gallery was not written: {first_line(error)}")
        return None


def _make_images(
    names: Mapping[str, str],
    classes: Mapping[str, str],
    paths: list[str],
    vectors: np.ndarray,
    unreadable: dict[str, str],
    conversion: Conversion,
    total: int = 0,
) -> Images:
    """Returns the `Images`, from dicts that map paths to names, and names to classes."""
    readable = [names[path] for path in paths]
    return Images(
        paths,
        readable,
        vectors,
        [classes[name] for name in readable] if classes.keys() >= set(readable) else None,
        {names[path]: reason for path, reason in unreadable.items()},
        total,
        conversion,
    )


def _compute_vectors(
    model: str,
    paths: list[str],
    output: str = "final_avg_pool",
    given: dict[str, int] | None = None,
) -> tuple[list[str], np.ndarray, dict[str, str], Conversion]:
    """Returns the readable paths, their vectors [n, d], unreadable paths with reasons, and the network's conversion."""
    console.log(f"computing the features of {len(paths):,} images")
    unreadable = {}
    batches, vectors, (info, *_) = zip(
        *endpoints.compute_endpoint(model, output, given, paths, unreadable)
    )
    vectors = np.concatenate(vectors)
    features.check_finite(vectors, f"MODEL={model}: the vectors")
    return list(itertools.chain(*batches)), vectors, unreadable, info.config.conversion


def _read_vectors(
    path: str, names: Mapping[str, str]
) -> tuple[list[str], np.ndarray, dict[str, str], Conversion]:
    """Returns the values of `_compute_vectors`, with vectors from a .npz file."""
    path = check_path("vectors", path, allow_patterns=True)
    try:
        with np.load(path) as content:
            vectors = content["vectors"].astype(np.float32)
            vector_of = dict(zip(content["files"].tolist(), vectors, strict=True))
    except Exception as error:  # Corrupt archives raise errors from zlib, zipfile or NumPy.
        raise UserError(
            f"--vectors={path}: the arrays `files` [n] and `vectors` [n, d] cannot be read"
            f" ({first_line(error)}). Write the file with `python -m inference embed`."
        ) from error
    paths = [path for path, name in names.items() if name in vector_of]
    if not paths:
        raise UserError(
            f"--vectors={path}: none of the listed files is among the images. Use the same folder."
        )
    vectors = np.array([vector_of[names[path]] for path in paths])
    features.check_finite(vectors, f"--vectors={path}: the vectors")
    if missing := len(vector_of) - len(paths):
        console.log(f"warning: {missing} of the files in {path} are not among the images")
    unreadable = dict.fromkeys(sorted(names.keys() - set(paths)), f"not in {path}")
    return paths, vectors, unreadable, DEFAULT_CONVERSION


# ------------------------------------------------------------------------------------------------------------ page


def pairs_path(out: str) -> str:
    """Returns the path of the CSV file for a page: FILE.pairs.csv for FILE.html."""
    return f"{os.path.splitext(out)[0]}.pairs.csv"


def write_page(
    images: Images,
    model: str,
    out: str,
    queries: Collection[int] = (),
    threshold: float = similarity.DEFAULT_THRESHOLD,
    num_clusters: int | None = None,
    seed: int = 0,
) -> None:
    """Writes the page, and next to it a CSV file of near-duplicates with columns `first`, `second` and `similarity`.

    Each file is replaced only when it is complete. The page is self-contained. The same
    images, model and seed give the same page.

    Args:
      images: the images.
      model: name of the model, for the header.
      out: path of the page. `pairs_path` returns the path of the CSV file.
      queries: indices of images whose neighbors are shown in addition to those of random images.
      threshold: minimum cosine similarity of near-duplicates, in [-1, 1].
      num_clusters: maximum number of clusters. None: see `analysis.find_clusters`.
      seed: seed for the random choices.

    Raises:
      errors.Stopped: a signal arrived; nothing is written.
    """
    vectors = similarity.center(images.vectors)
    random = np.random.default_rng(seed)
    count = len(vectors)
    on_map = np.sort(random.choice(count, min(_MAX_MAP_IMAGES, count), replace=False))
    chosen = np.sort(random.choice(on_map, min(_NUM_QUERIES, count), replace=False)).tolist()
    _begin(f"searching for the neighbors of {count:,} images")
    neighbors = similarity.search(vectors, _NUM_PAIRS, threshold)
    voters = neighbors.similarities[:, :KNN_NEIGHBORS]
    scores = voters.mean(1) if count > 1 else np.ones(1)
    _begin("clustering the images")
    clusters = analysis.find_clusters(vectors, num_clusters, seed, _NUM_TYPICAL)
    _begin("drawing the map")
    # If there are many thumbnails, they are smaller, so that the page remains small.
    on_map_images = dict(
        zip(on_map.tolist(), _load_thumbnails(images, on_map, 96 if len(on_map) <= 500 else 48))
    )
    page = dict(
        model=model,
        images=images,
        count=count,
        is_centered=count >= similarity.MIN_CENTERED,
        mean_similarity=analysis.mean_similarity(similarity.normalize(images.vectors)),
        seed=seed,
        threshold=threshold,
        neighbors=neighbors,
        num_neighbors=_NUM_NEIGHBORS,
        max_pairs=_NUM_PAIRS,
        queries=dict.fromkeys([*queries, *chosen]),
        given_queries=queries,
        pixel_neighbors=_pixel_neighbors(on_map_images, chosen[:_NUM_PIXEL_QUERIES]),
        pairs_file=os.path.basename(pairs_path(out)),
        num_voters=voters.shape[1],
        scores=scores,
        outliers=np.argsort(scores, kind="stable")[:_NUM_OUTLIERS],
        clusters=clusters,
        common_classes=[
            _most_common(images.classes, clusters.assignments == number)
            for number in range(len(clusters.sizes))
        ],
        num_clusters=num_clusters,
        map=_map(images, vectors, clusters, on_map, seed),
        map_thumbnails=[*map(thumbnails.encode, on_map_images.values())],
        classes=images.classes and _classes(images.classes, neighbors),
    )
    page["thumbnails"] = encoded = collections.defaultdict(str)
    _render(page)  # This adds the rows of the images that the page shows to `encoded`.
    shown = sorted(encoded)
    encoded.update(zip(shown, map(thumbnails.encode, _load_thumbnails(images, shown, 96))))
    content = _render(page).encode()
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["first", "second", "similarity"])
    for pair, value in zip(
        neighbors.pairs[: neighbors.num_pairs].tolist(), neighbors.pair_similarities
    ):
        rows.writerow([*(writers.quote_path(images.names[row]) for row in pair), f"{value:.5f}"])
    signals.safe_point(storage.NOTHING_WRITTEN)
    storage.write_bytes(pairs_path(out), table.getvalue().encode())
    storage.write_bytes(out, content)
    console.log(
        f"gallery: {count:,} images, {len(content) / 1e6:.1f} MB, {neighbors.num_pairs:,} similar pairs"
    )


def _begin(description: str) -> None:
    """Logs the description of the next part of the work. A signal that arrived before stops the program."""
    console.log(description)
    signals.safe_point(storage.NOTHING_WRITTEN)


def _most_common(classes: Sequence[str] | None, selected: np.ndarray) -> tuple[str, float] | None:
    """Returns the most common class of the selected images and its relative frequency, or None without classes."""
    if not classes:
        return None
    counts = collections.Counter(itertools.compress(classes, selected))
    name, count = counts.most_common(1)[0]
    return name, count / counts.total()


def _map(
    images: Images, vectors: np.ndarray, clusters: analysis.Clusters, rows: np.ndarray, seed: int
) -> dict[str, Any]:
    """Returns the template values for the map. Points are colored by class or, without classes, by cluster."""
    points, method = analysis.map_points(vectors[rows], seed)
    groups = clusters.assignments
    names = [f"cluster {number + 1}" for number in range(len(clusters.sizes))]
    if images.classes:
        names, groups = np.unique(images.classes, return_inverse=True)
    order = np.argsort(-np.bincount(groups), kind="stable")  # The largest group is first.
    return dict(
        method=method,
        points=np.round(20 + 1000 * points).astype(int),
        height=round(40 + 1000 * points[:, 1].max()),
        colors=np.argsort(order)[groups[rows]].clip(max=_MAX_COLORS),
        names=[names[group] for group in order[:_MAX_COLORS]],
        num_groups=len(names),
        texts=[
            console.printable_name(f"{images.names[row]} ({names[groups[row]]})") for row in rows
        ],
    )


def _classes(classes: Sequence[str], neighbors: similarity.Neighbors) -> dict[str, Any]:
    """Returns the values for the template's class section: nearest-neighbor accuracies, and confused classes."""
    names, labels = np.unique(classes, return_inverse=True)
    predictions = analysis.predict_from_neighbors(neighbors.indices[:, :KNN_NEIGHBORS], labels)
    sizes, accuracy = np.bincount(labels), np.mean(predictions == labels)
    accuracies = np.bincount(labels, predictions == labels) / sizes
    pairs = zip(labels.tolist(), predictions.tolist())
    confusions = collections.Counter(pair for pair in pairs if pair[0] != pair[1]).most_common()
    confused_with = {label: names[predicted] for (label, predicted), _ in reversed(confusions)}
    pairs = []
    for (label, predicted), count in confusions[:_NUM_CONFUSIONS]:
        images = np.flatnonzero((labels == label) & (predictions == predicted))[:_NUM_EXAMPLES]
        examples = [
            (image, next(other for other in neighbors.indices[image] if labels[other] == predicted))
            for image in images
        ]
        pairs.append((names[label], names[predicted], count, count / sizes[label], examples))
    return dict(
        accuracy=accuracy,
        interval=metrics.wilson_interval(accuracy, len(labels)),
        rows=[
            (names[label], sizes[label], accuracies[label], confused_with.get(label))
            for label in np.argsort(accuracies, kind="stable")[:_MAX_CLASSES]
        ],
        num_classes=len(names),
        majority=sizes.max() / len(labels),
        pairs=pairs,
    )


def _load_thumbnails(
    images: Images, rows: Sequence[int] | np.ndarray, side: int
) -> Iterator[Image.Image | None]:
    """Yields the thumbnails of the images in `rows` (see `thumbnails.load_thumbnail`). Uses several threads."""
    loaded = image_files.map_paths(
        lambda path: thumbnails.load_thumbnail(path, side, images.conversion),
        [images.paths[row] for row in rows],
    )
    for image in progress.terminal_bar(loaded, len(rows), "thumbnails"):
        signals.safe_point(storage.NOTHING_WRITTEN)
        yield image


def _pixel_neighbors(
    loaded: Mapping[int, Image.Image | None], queries: Sequence[int]
) -> dict[int, list[tuple[int, float]]]:
    """Returns the nearest neighbors of the queries and their similarities by raw pixels, for comparison.

    Args:
      loaded: small images by index; None if an image could not be loaded.
      queries: indices in `loaded`.
    """
    pixels = {
        row: np.asarray(image.resize((_PIXELS, _PIXELS))).ravel()
        for row, image in loaded.items()
        if image
    }
    rows = np.array([*pixels])
    nearest = similarity.search(similarity.center(np.array([*pixels.values()])), _NUM_NEIGHBORS, 1)
    return {
        row: list(zip(rows[indices], similarities))
        for row, indices, similarities in zip(pixels, nearest.indices, nearest.similarities)
        if row in queries
    }


def _render(page: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("inference", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Escapes control characters, except in the output of macros and filters, which is HTML.
        finalize=lambda value: (
            console.printable_name(value)
            if isinstance(value, str) and not hasattr(value, "__html__")
            else value
        ),
    )
    return environment.get_template("gallery.html.jinja").render(page)
