"""Exports a checkpoint's network as a SavedModel for TF Hub.

    python -m export --checkpoint=CHECKPOINT --export_dir=DIR [--archive=FILE.tar.gz]
"""

from __future__ import annotations

import argparse

from runtime import command_line, tensorflow_startup


def _parser():
    parser = command_line.ArgumentParser(prog="python -m export", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True,
                        help="a directory, a checkpoint prefix, a SavedModel or a TF Hub handle")
    parser.add_argument("--export_dir", required=True, help="new or empty directory for the SavedModel")
    parser.add_argument("--archive", help="also write a TF Hub archive FILE.tar.gz and a model card FILE.md")
    parser.add_argument("--image_size", type=command_line.parse_image_size,
                        help="image size in pixels (default: the image size of the run, or 224)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():
        exporting = tensorflow_startup.load("export.exporting")
        exporting.export_checkpoint(arguments.checkpoint, arguments.export_dir, arguments.archive, arguments.image_size)

    command_line.run_stoppable(parser.prog, work)
