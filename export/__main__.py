"""Writes the network of a checkpoint as a SavedModel.

    python -m export --checkpoint=CHECKPOINT --export_dir=DIR [--archive=FILE.tar.gz]
"""

from __future__ import annotations

import argparse
import os

import tensorflow as tf

from checkpoints import inspection
from export import archives, saving
from inference import __main__
from runtime import command_line, console, signals, tensorflow_startup
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path, check_writable_parent

if __name__ == "__main__":

    tensorflow_startup.load_quietly("tensorflow")


def _check_export_places(export_dir, archive_path):
    """Raises `UserError` if `export_dir`, the archive (None: not written) or its card cannot be written."""
    if "://" not in export_dir:
        target = os.path.realpath(export_dir)
        check_writable_parent("--export_dir", target)
        if target == os.getcwd() or os.path.ismount(target):
            raise UserError(f"--export_dir={export_dir}: this directory cannot be replaced. Name a new directory in "
                            "it.")
        if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
            raise UserError(f"--export_dir={export_dir} is not empty: name another, or remove it")
    elif tf.io.gfile.exists(export_dir) and (not tf.io.gfile.isdir(export_dir) or tf.io.gfile.listdir(export_dir)):
        raise UserError(f"--export_dir={export_dir} is not empty: name another, or remove it")
    if archive_path is None:
        return
    if "://" in archive_path + export_dir:
        raise UserError(f"--archive={archive_path}: an archive is made of local files. Use a local path for it and for "
                        "--export_dir.")
    if not os.path.basename(archive_path).removesuffix(archives.ARCHIVE_SUFFIX) or not archive_path.endswith(archives.ARCHIVE_SUFFIX):
        raise UserError(f"--archive={archive_path}: this is not the name of an archive. Use FILE{archives.ARCHIVE_SUFFIX}.")
    check_writable_parent("--archive", archive_path)
    archives.check_absent("archive", (archive_path, archives.card_path(archive_path)))
    for path in (archive_path, archives.card_path(archive_path)):
        if f"{os.path.realpath(path)}/".startswith(f"{target}/"):
            raise UserError(f"--archive={archive_path}: {path} would be in --export_dir. Use another directory.")


def _run(arguments):
    if not (arguments.checkpoint and arguments.export_dir):
        raise UserError("give --checkpoint=PATH and --export_dir=DIR, or one of the commands embed and predict")
    path = check_weights_path("checkpoint", arguments.checkpoint)
    export_dir = check_path("export_dir", arguments.export_dir)
    archive_path = None if arguments.archive is None else check_path("archive", arguments.archive)
    _check_export_places(export_dir, archive_path)
    known = inspection.inspect_checkpoint(path, arguments.image_size)
    signals.safe_point(saving.NOTHING_WRITTEN)
    saving.export(known.config, known.class_names, path, export_dir, known.results, known.training, known.step,
           known.multi_label)
    console.log(f"SavedModel: {export_dir}")
    if archive_path:
        console.log(f"archive: {archive_path}, model card: {archives.archive(export_dir, archive_path)}")


def _parser():
    parser = command_line.ArgumentParser(prog="export.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=_run)
    parser.add_argument("--checkpoint", help="a directory, a prefix, a SavedModel or a TF Hub handle")
    parser.add_argument("--export_dir", help="where the SavedModel is written")
    parser.add_argument("--archive", help="also write FILE.tar.gz for TF Hub, and a model card FILE.md")
    parser.add_argument("--image_size", type=__main__._pixels, help="default: the run's, or 224")
    commands = parser.add_subparsers()
    command = commands.add_parser("embed", help="vectors of all images in a folder",
                                  description=f"Writes a vector for every image in a folder. {__main__._TRUST}")
    command.set_defaults(run=__main__._embed)
    command.add_argument("model", help="SavedModel or TF Hub handle, of this program or the original")
    command.add_argument("folder", help="searched at any depth")
    command.add_argument("--out", required=True, help="FILE.npz or FILE.csv")
    command.add_argument("--output", default="final_avg_pool", help="endpoint (default: %(default)s)")
    command.add_argument("--image_size", type=__main__._pixels, help="default: the model's, or 224")
    command = commands.add_parser("predict", help="classes of image files",
                                  description=f"Prints the most probable classes of image files. {__main__._TRUST}")
    command.set_defaults(run=__main__._predict)
    command.add_argument("model", help="SavedModel with a linear head")
    command.add_argument("images", nargs="+", help="image files")
    command.add_argument("--image_size", type=__main__._pixels, help="default: the model's, or 224")
    return parser


def main(arguments=None):
    """Runs the command line; see `command_line.run_command` for errors and signals."""
    arguments = _parser().parse_args(arguments)
    command_line.run_stoppable("export.py", lambda: arguments.run(arguments))


if __name__ == "__main__":
    main()
