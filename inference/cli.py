"""Embeds images, predicts their classes, or shows which of them are similar, with an exported SavedModel.

python -m inference embed MODEL INPUT... --out=FILE.npz
python -m inference predict MODEL INPUT... [--out=FILE.csv]
python -m inference gallery MODEL INPUT... --out=FILE.html
"""

from __future__ import annotations

import argparse
import re

from inference import similarity
from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError

_TRUST_NOTICE = "The graph in MODEL is executed: use only models from trusted sources."
_MAX_LISTED = 10  # maximum number of unreadable files to list


def _embed(arguments):
    if arguments.out is None and arguments.projector is None:
        raise UserError("--out: no output is specified. Set --out=FILE, --projector=DIR or both.")
    embedding = tensorflow_startup.load("inference.embedding")
    written, unreadable = embedding.embed(
        arguments.model,
        arguments.inputs,
        arguments.out,
        arguments.output,
        arguments.image_size,
        arguments.projector,
    )
    _log_unreadable(unreadable)
    if arguments.out is not None:
        console.log(f"wrote {written} vector{'s' * (written != 1)} to {arguments.out}")
    if arguments.projector is not None:
        console.log(
            f"wrote the projector files; show them with: tensorboard --logdir {arguments.projector}"
        )


def _predict(arguments):
    prediction = tensorflow_startup.load("inference.prediction")
    if arguments.out:
        written, unreadable = prediction.write_predictions(
            arguments.model, arguments.inputs, arguments.out, arguments.image_size
        )
        _log_unreadable(unreadable)
        console.log(f"wrote {written} prediction{'s' * (written != 1)} to {arguments.out}")
        return
    predictions, unreadable = prediction.predict(
        arguments.model, arguments.inputs, arguments.image_size
    )
    for path, classes in predictions.items():
        text = ", ".join(
            f"{console.printable_name(name)} {probability:.3f}" for name, probability in classes
        )
        console.log(f"{console.printable_name(path)}: {text}")
    _log_unreadable(unreadable)


def _gallery(arguments):
    gallery = tensorflow_startup.load("inference.gallery")
    _, unreadable = gallery.write_gallery(
        arguments.model,
        arguments.inputs,
        arguments.out,
        arguments.output,
        arguments.image_size,
        arguments.vectors,
        arguments.query,
        arguments.threshold,
        arguments.clusters,
        arguments.seed,
    )
    _log_unreadable(unreadable)


def _log_unreadable(unreadable):
    for path, reason in list(unreadable.items())[:_MAX_LISTED]:
        console.log(f"skipped {console.printable_name(path)}: {console.printable_name(reason)}")
    if len(unreadable) > _MAX_LISTED:
        console.log(f"skipped {len(unreadable) - _MAX_LISTED} more files")


def _parser():
    parser = command_line.ArgumentParser(
        prog="python -m inference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    embed = commands.add_parser(
        "embed",
        help="write one vector for each image",
        description=f"Writes one vector per image. {_TRUST_NOTICE}",
    )
    embed.set_defaults(run=_embed)
    predict = commands.add_parser(
        "predict",
        help="print or write the classes of images",
        description=f"Prints or writes the classes of images. {_TRUST_NOTICE}",
    )
    predict.set_defaults(run=_predict)
    gallery = commands.add_parser(
        "gallery",
        help="write a page with nearest neighbors, duplicates, outliers, a map and clusters",
        description=f"Writes an HTML page that shows which images are similar. {_TRUST_NOTICE}",
    )
    gallery.set_defaults(run=_gallery)
    for command, head in ((embed, ""), (predict, " with a linear head"), (gallery, "")):
        command.add_argument(
            "model",
            help=(
                f"model from this program or the original: a SavedModel{head}, a run "
                "directory (its newest SavedModel is used) or a TF Hub handle"
            ),
        )
        command.add_argument(
            "inputs", nargs="+", metavar="input", help="image file, or folder to search recursively"
        )
        command.add_argument(
            "--image_size",
            type=command_line.parse_image_size,
            help="image size in pixels (default: the model's image size, or 224 if it is unknown)",
        )
    formats = "FILE.npz, FILE.csv or FILE.parquet"
    embed.add_argument("--out", help=f"output file: {formats}")
    embed.add_argument(
        "--projector",
        metavar="DIR",
        help=(
            "write the vectors, file names, classes and thumbnails to a "
            "directory for TensorBoard's Embedding Projector"
        ),
    )
    for command in (embed, gallery):
        command.add_argument(
            "--output",
            default="final_avg_pool",
            help="name of the model output (default: %(default)s)",
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
            "`embed`; if this flag is set, the model is not loaded"
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
        type=_parse_similarity,
        default=similarity.DEFAULT_THRESHOLD,
        help="minimum cosine similarity of the pairs in FILE.pairs.csv (default: %(default)s)",
    )
    gallery.add_argument(
        "--clusters",
        type=_parse_count,
        help=(
            "number of clusters (default: the square root of half "
            "the number of images, but at least 2 and at most 20)"
        ),
    )
    gallery.add_argument(
        "--seed",
        type=_parse_seed,
        default=0,
        help="seed for the random choices (default: %(default)s)",
    )
    return parser


def _parse_similarity(text):
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from -1 to 1; got {text}")
    return value


def _parse_count(text):
    if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text}")
    return int(text)


def _parse_seed(text):
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {2**32 - 1}; got {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)
    command_line.run_stoppable(parser.prog, lambda: arguments.run(arguments))
