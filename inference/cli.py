"""Embeds the images of a folder, and predicts the classes of image files, with an exported SavedModel.

    python -m inference embed MODEL FOLDER --out=FILE.npz
    python -m inference predict MODEL IMAGE...
"""

from __future__ import annotations

import argparse

from runtime import command_line, console, tensorflow_startup

_TRUST = "MODEL's graph is executed: use models from trusted sources only."
_LISTED = 10  # unreadable files that are named in the output


def _embed(arguments):
    embedding = tensorflow_startup.load("inference.embedding")
    written, unreadable = embedding.embed(arguments.model, arguments.folder, arguments.out, arguments.output,
                                          arguments.image_size)
    for path in unreadable[:_LISTED]:
        console.log(f"left out: {console.printable_name(path)} cannot be read as an image")
    more = f"; {len(unreadable)} cannot be read" if unreadable else ""
    console.log(f"{written} vectors in {arguments.out}{more}")


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
    command = commands.add_parser("embed", help="vectors of all images in a folder",
                                  description=f"Writes a vector for every image in a folder. {_TRUST}")
    command.set_defaults(run=_embed)
    command.add_argument("model", help="SavedModel or TF Hub handle, of this program or the original")
    command.add_argument("folder", help="searched at any depth")
    command.add_argument("--out", required=True, help="FILE.npz or FILE.csv")
    command.add_argument("--output", default="final_avg_pool", help="endpoint (default: %(default)s)")
    command.add_argument("--image_size", type=command_line.parse_image_size, help="default: that of the model, or 224")
    command = commands.add_parser("predict", help="classes of image files",
                                  description=f"Prints the most probable classes of image files. {_TRUST}")
    command.set_defaults(run=_predict)
    command.add_argument("model", help="SavedModel with a linear head")
    command.add_argument("images", nargs="+", help="image files")
    command.add_argument("--image_size", type=command_line.parse_image_size, help="default: that of the model, or 224")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see `command_line.run_command` for errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)
    command_line.run_stoppable(parser.prog, lambda: arguments.run(arguments))
