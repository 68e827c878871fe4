"""Embeds the images in a folder, or predicts the classes of image files, with an exported SavedModel.

    python -m inference embed MODEL FOLDER --out=FILE.npz
    python -m inference predict MODEL IMAGE...
"""

from __future__ import annotations

import argparse

from runtime import command_line, console, tensorflow_startup

_TRUST_NOTICE = "The graph in MODEL is executed: use only models from trusted sources."
_MAX_LISTED = 10  # maximum number of unreadable files to list


def _embed(arguments):
    embedding = tensorflow_startup.load("inference.embedding")
    written, unreadable = embedding.embed(arguments.model, arguments.folder, arguments.out, arguments.output,
                                          arguments.image_size)
    for path in unreadable[:_MAX_LISTED]:
        console.log(f"skipped: {console.printable_name(path)} cannot be read as an image")
    skipped = f"; skipped {len(unreadable)} unreadable images" if unreadable else ""
    console.log(f"wrote {written} vectors to {arguments.out}{skipped}")


def _predict(arguments):
    prediction = tensorflow_startup.load("inference.prediction")
    for path, classes in prediction.predict(arguments.model, arguments.images, arguments.image_size).items():
        text = "cannot be read as an image" if classes is None else ", ".join(
            f"{console.printable_name(name)} {probability:.3f}" for name, probability in classes)
        console.log(f"{console.printable_name(path)}: {text}")


def _parser():
    parser = command_line.ArgumentParser(prog="python -m inference", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("embed", help="write one vector for each image in a folder",
                                  description=f"Writes one vector per image in a folder. {_TRUST_NOTICE}")
    command.set_defaults(run=_embed)
    command.add_argument("model", help="directory or TF Hub handle of a SavedModel from this program or the original")
    command.add_argument("folder", help="folder, searched recursively")
    command.add_argument("--out", required=True, help="output file: FILE.npz or FILE.csv")
    command.add_argument("--output", default="final_avg_pool", help="name of the model output (default: %(default)s)")
    command.add_argument("--image_size", type=command_line.parse_image_size,
                         help="image size in pixels (default: the image size of the model, or 224)")
    command = commands.add_parser("predict", help="print the most probable classes of image files",
                                  description=f"Prints the most probable classes of image files. {_TRUST_NOTICE}")
    command.set_defaults(run=_predict)
    command.add_argument("model", help="SavedModel with a linear head")
    command.add_argument("images", nargs="+", help="image files")
    command.add_argument("--image_size", type=command_line.parse_image_size,
                         help="image size in pixels (default: the image size of the model, or 224)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. See `command_line.run_command` for errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)
    command_line.run_stoppable(parser.prog, lambda: arguments.run(arguments))
