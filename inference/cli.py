"""Embeds images, predicts their classes, or shows which of them are similar.

python -m inference embed MODEL INPUT... --out=FILE.npz
python -m inference predict MODEL INPUT... [--out=FILE.csv]
python -m inference gallery MODEL INPUT... --out=FILE.html
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from inference import similarity
from runtime import command_line, console, tensorflow_startup
from runtime.paths import PAGES, TABLES, check_input, check_out

_MAX_LISTED = 10  # maximum number of unreadable files to list


def _embed(
    arguments: argparse.Namespace, given: dict[str, int]
) -> tuple[int | None, Mapping[str, str]]:
    """Writes vectors. Returns their number, and a dict mapping unreadable files to reasons."""
    embedding = tensorflow_startup.load("inference.embedding")
    return embedding.embed(
        arguments.model, arguments.inputs, arguments.out, arguments.output, given
    )


def _predict(
    arguments: argparse.Namespace, given: dict[str, int]
) -> tuple[int | None, Mapping[str, str]]:
    """Writes or prints classes. Returns the number of images written, or None, and the unreadable files."""
    prediction = tensorflow_startup.load("inference.prediction")
    if arguments.out:
        return prediction.write_predictions(arguments.model, arguments.inputs, arguments.out, given)
    predictions, unreadable = prediction.predict(arguments.model, arguments.inputs, given)
    for path, classes in predictions.items():
        text = ", ".join(f"{name} {probability:.3f}" for name, probability in classes)
        console.log(console.printable_name(f"{path}: {text}"))
    return None, unreadable


def _gallery(
    arguments: argparse.Namespace, given: dict[str, int]
) -> tuple[int | None, Mapping[str, str]]:
    """Writes a gallery. Returns None, and the unreadable files."""
    gallery = tensorflow_startup.load("inference.gallery")
    return None, gallery.write_gallery(arguments, given)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m inference", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("embed", _embed, "write one vector for each image"),
        ("predict", _predict, "print or write the classes of images"),
        (
            "gallery",
            _gallery,
            "write a page with neighbors, duplicates, outliers, a map and clusters",
        ),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument(
            "model",
            help="run directory, checkpoint, SavedModel, PyTorch file or TF Hub handle of a network",
        )
        command.add_argument(
            "inputs", nargs="+", metavar="input", help="image file, or folder to search recursively"
        )
        command_line.add_network_settings(command)
        if run is not _predict:
            command.add_argument(
                "--output",
                default="final_avg_pool",
                help="name of the network's output (default: %(default)s)",
            )
    embed, predict, gallery = commands.choices.values()
    formats = "FILE.npz, FILE.csv or FILE.parquet"
    embed.add_argument("--out", required=True, help=f"output file: {formats}")
    predict.add_argument(
        "--out",
        help=f"write the probabilities of all classes to a file, instead of printing: {formats}",
    )
    gallery.add_argument(
        "--out",
        required=True,
        metavar="FILE.html",
        help="output file; similar pairs are written to FILE.pairs.csv",
    )
    gallery.add_argument(
        "--vectors",
        metavar="FILE.npz",
        help="file with the vectors of the images, from `embed`, instead of loading the network",
    )
    gallery.add_argument(
        "--query",
        action="append",
        default=[],
        metavar="FILE",
        help="show the nearest neighbors of this image; may be repeated",
    )
    for name, number, default, text in (
        (
            "threshold",
            command_line.number(float, -1, 1),
            similarity.DEFAULT_THRESHOLD,
            "minimum cosine similarity of pairs in FILE.pairs.csv (default: %(default)s)",
        ),
        (
            "clusters",
            command_line.number(int, 1, 10**9),
            None,
            "maximum number of clusters (default: 2 to 20, depending on the images)",
        ),
        (
            "seed",
            command_line.number(int, 0, 2**32 - 1),
            0,
            "seed for the random choices (default: %(default)s)",
        ),
    ):
        gallery.add_argument(f"--{name}", type=number, default=default, help=text)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():  # The first checks need not wait for TensorFlow to load.
        arguments.inputs = [check_input(path) for path in arguments.inputs]
        if arguments.out:
            arguments.out = check_out(arguments.out, PAGES if arguments.run is _gallery else TABLES)
        written, unreadable = arguments.run(arguments, command_line.network_settings(arguments))
        for path, reason in list(unreadable.items())[:_MAX_LISTED]:
            console.log(console.printable_name(f"skipped {path}: {reason}"))
        if len(unreadable) > _MAX_LISTED:
            console.log(f"skipped {len(unreadable) - _MAX_LISTED} more files")
        if written:
            console.log(f"wrote {written} rows to {arguments.out}")

    command_line.run_stoppable(parser.prog, work)
