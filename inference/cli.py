"""Embeds images, or predicts their classes, with an exported SavedModel.

    python -m inference embed MODEL INPUT... --out=FILE.npz
    python -m inference predict MODEL INPUT... [--out=FILE.csv]
"""

from __future__ import annotations

import argparse

from runtime import command_line, console, tensorflow_startup

_TRUST_NOTICE = "The graph in MODEL is executed: use only models from trusted sources."
_MAX_LISTED = 10  # maximum number of unreadable files to list


def _embed(arguments):
    embedding = tensorflow_startup.load("inference.embedding")
    written, unreadable = embedding.embed(arguments.model, arguments.inputs, arguments.out, arguments.output,
                                          arguments.image_size)
    _log_unreadable(unreadable)
    console.log(f"wrote {written} vectors to {arguments.out}")


def _predict(arguments):
    prediction = tensorflow_startup.load("inference.prediction")
    if arguments.out:
        written, unreadable = prediction.write_predictions(
            arguments.model, arguments.inputs, arguments.out, arguments.image_size)
        _log_unreadable(unreadable)
        console.log(f"wrote {written} predictions to {arguments.out}")
        return
    predictions, unreadable = prediction.predict(arguments.model, arguments.inputs, arguments.image_size)
    for path, classes in predictions.items():
        text = ", ".join(f"{console.printable_name(name)} {probability:.3f}" for name, probability in classes)
        console.log(f"{console.printable_name(path)}: {text}")
    _log_unreadable(unreadable)


def _log_unreadable(unreadable):
    for path, reason in list(unreadable.items())[:_MAX_LISTED]:
        console.log(f"skipped {console.printable_name(path)}: {console.printable_name(reason)}")
    if len(unreadable) > _MAX_LISTED:
        console.log(f"skipped {len(unreadable) - _MAX_LISTED} more")


def _parser():
    parser = command_line.ArgumentParser(prog="python -m inference", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    embed = commands.add_parser("embed", help="write one vector for each image",
                                description=f"Writes one vector per image. {_TRUST_NOTICE}")
    embed.set_defaults(run=_embed)
    predict = commands.add_parser("predict", help="print or write the classes of images",
                                  description=f"Prints or writes the classes of images. {_TRUST_NOTICE}")
    predict.set_defaults(run=_predict)
    for command, head in ((embed, ""), (predict, " with a linear head")):
        command.add_argument("model", help=f"SavedModel{head}, run directory (its newest SavedModel is used) or TF Hub "
                             "handle, from this program or the original")
        command.add_argument("inputs", nargs="+", metavar="input", help="image file, or folder to search recursively")
        command.add_argument("--image_size", type=command_line.parse_image_size,
                             help="image size in pixels (default: the image size of the model, or 224)")
    formats = "FILE.npz, FILE.csv or FILE.parquet"
    embed.add_argument("--out", required=True, help=f"output file: {formats}")
    embed.add_argument("--output", default="final_avg_pool", help="name of the model output (default: %(default)s)")
    predict.add_argument("--out", help="write the probabilities of all classes to a file instead of printing the most "
                         f"probable classes: {formats}")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)
    command_line.run_stoppable(parser.prog, lambda: arguments.run(arguments))
