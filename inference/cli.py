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


def _embed(arguments: argparse.Namespace) -> None:
    written, unreadable = tensorflow_startup.load("inference.embedding").embed(
        arguments.model,
        arguments.inputs,
        arguments.out,
        arguments.output,
        command_line.network_settings(arguments),
    )
    _log_unreadable(unreadable)
    console.log(f"wrote {written} vector{'s' * (written != 1)} to {arguments.out}")


def _predict(arguments: argparse.Namespace) -> None:
    prediction = tensorflow_startup.load("inference.prediction")
    given = command_line.network_settings(arguments)
    if arguments.out:
        written, unreadable = prediction.write_predictions(
            arguments.model, arguments.inputs, arguments.out, given
        )
        _log_unreadable(unreadable)
        console.log(f"wrote {written} prediction{'s' * (written != 1)} to {arguments.out}")
        return
    predictions, unreadable = prediction.predict(arguments.model, arguments.inputs, given)
    for path, classes in predictions.items():
        text = ", ".join(f"{name} {probability:.3f}" for name, probability in classes)
        console.log(console.printable_name(f"{path}: {text}"))
    _log_unreadable(unreadable)


def _gallery(arguments: argparse.Namespace) -> None:
    unreadable = tensorflow_startup.load("inference.gallery").write_gallery(
        arguments.model,
        arguments.inputs,
        arguments.out,
        arguments.output,
        command_line.network_settings(arguments),
        arguments.vectors,
        arguments.query,
        arguments.threshold,
        arguments.clusters,
        arguments.seed,
    )
    _log_unreadable(unreadable)


def _log_unreadable(unreadable: Mapping[str, str]) -> None:
    for path, reason in list(unreadable.items())[:_MAX_LISTED]:
        console.log(console.printable_name(f"skipped {path}: {reason}"))
    if len(unreadable) > _MAX_LISTED:
        console.log(f"skipped {len(unreadable) - _MAX_LISTED} more files")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m inference", description=__doc__)
    commands = parser.add_subparsers(required=True)
    embed = commands.add_parser("embed", help="write one vector for each image")
    embed.set_defaults(run=_embed)
    predict = commands.add_parser("predict", help="print or write the classes of images")
    predict.set_defaults(run=_predict)
    gallery = commands.add_parser(
        "gallery",
        help="write a page with nearest neighbors, duplicates, outliers, a map and clusters",
    )
    gallery.set_defaults(run=_gallery)
    for command in (embed, predict, gallery):
        command.add_argument(
            "model",
            help=(
                "network from this program or the original: a run directory, a checkpoint, a "
                "SavedModel, a PyTorch file (FILE.safetensors) or a TF Hub handle"
            ),
        )
        command.add_argument(
            "inputs", nargs="+", metavar="input", help="image file, or folder to search recursively"
        )
        command_line.add_network_settings(command)
    formats = "FILE.npz, FILE.csv or FILE.parquet"
    embed.add_argument("--out", required=True, help=f"output file: {formats}")
    for command in (embed, gallery):
        command.add_argument(
            "--output",
            default="final_avg_pool",
            help="name of the network's output (default: %(default)s)",
        )
    predict.add_argument(
        "--out",
        help=(
            "write the probabilities of all classes to a file instead of printing the most "
            f"probable classes: {formats}"
        ),
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
        help=(
            "file with the vectors of the images, written by "
            "`embed`; if this flag is set, the network is not loaded"
        ),
    )
    gallery.add_argument(
        "--query",
        action="append",
        default=[],
        metavar="FILE",
        help="show the nearest neighbors of this image; may be repeated",
    )
    gallery.add_argument(
        "--threshold",
        type=command_line.number(float, -1, 1),
        default=similarity.DEFAULT_THRESHOLD,
        help="minimum cosine similarity of the pairs in FILE.pairs.csv (default: %(default)s)",
    )
    gallery.add_argument(
        "--clusters",
        type=command_line.number(int, 1, 10**9),
        help=(
            "number of clusters (default: the square root of half "
            "the number of images, but at least 2 and at most 20)"
        ),
    )
    gallery.add_argument(
        "--seed",
        type=command_line.number(int, 0, 2**32 - 1),
        default=0,
        help="seed for the random choices (default: %(default)s)",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():  # The first checks need not wait for TensorFlow to load.
        arguments.inputs = [check_input(path) for path in arguments.inputs]
        if arguments.out:
            arguments.out = check_out(arguments.out, PAGES if arguments.run is _gallery else TABLES)
        arguments.run(arguments)

    command_line.run_stoppable(parser.prog, work)
