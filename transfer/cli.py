"""Transfer of an encoder to other data sets: the protocol of the paper's twelve, and your own (4.3 and B.8).

    python -m transfer list
    python -m transfer linear --checkpoint=PATH --task=NAME [--dataset=folder:DIR] [--data_dir=DIR] [--out=DIR]
    python -m transfer finetune --checkpoint=PATH --task=NAME [--jobs=N] [--flags='--precision=mixed_bfloat16']
    python -m transfer scratch --checkpoint=PATH --task=NAME [--jobs=N]
    python -m transfer compare PREDICTIONS.npz PREDICTIONS.npz

`linear` is l2-regularized logistic regression on frozen features; `finetune` trains the whole network from these
weights, `scratch` the same network from random ones, both by a grid of learning rates and weight decays. Results and
predictions are kept in --out; the same command resumes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import math

from config import MAX_IMAGE_PIXELS
from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError, first_line
from runtime.paths import check_paths
from transfer import tasks


def _list():
    console.log(console.format_table("the paper's twelve data sets", [
        (name, f"{task.dataset or 'folder:DIR':28} {task.metric:24} "
               f"{task.train_split} | {task.validation_split} | {task.test}")
        for name, task in tasks.TASKS.items()]))


def _numbers(text):
    """Parses comma-separated numbers; for argparse's `type`."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise argparse.ArgumentTypeError(f"expected comma-separated numbers such as 0.01,0.1; got {text!r}")
    return found


def _parser():
    parser = command_line.ArgumentParser(prog="python -m transfer", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("list", help="the paper's data sets").set_defaults(run=None)
    _add_common(commands.add_parser("linear", help="logistic regression on frozen features"),
                "linear_evaluation.run_linear")
    for kind, text in (("finetune", "the whole network, from a checkpoint's weights"),
                       ("scratch", "the network of a checkpoint, from random weights")):
        command = commands.add_parser(kind, help=text)
        _add_common(command, "grid_search.run_grid")
        command.set_defaults(kind=kind)
        command.add_argument("--jobs", type=int, default=1, help="parallel trainings, which share the "
                             "devices of CUDA_VISIBLE_DEVICES (default: 1)")
        command.add_argument("--steps", type=int, help=f"of a training (default: {tasks.GRIDS[kind].steps})")
        for name in ("learning_rates", "weight_decays"):
            command.add_argument(f"--{name}", type=_numbers, help="of the grid, comma-separated (default: "
                                 f"{','.join(f'{value:.2g}' for value in getattr(tasks.GRIDS[kind], name))})")
        command.add_argument("--seed", type=int, default=0, help="of all trainings (default: 0)")
        command.add_argument("--flags", default="", help="further flags of run.py, such as '--precision=...'")
    command = commands.add_parser("compare", help="permutation test of two files of predictions")
    command.set_defaults(run="significance.run_compare")
    command.add_argument("first"), command.add_argument("second")
    command.add_argument("--metric", choices=("top_1", "mean_per_class"), help="default: top_1; with several labels "
                         "per example, accuracy")
    return parser


def _add_common(command, run):
    """Adds the arguments that all protocols share."""
    command.set_defaults(run=run)
    command.add_argument("--checkpoint", required=True, help="any SimCLR network, as for run.py")
    command.add_argument("--task", choices=tasks.TASKS, help="one of the paper's data sets")
    command.add_argument("--dataset", help="as for run.py (default: the task's)")
    command.add_argument("--data_dir", help="as for run.py")
    command.add_argument("--follow_links", action="store_true", help="as for run.py")
    command.add_argument("--metric", choices=tasks.METRICS, help="default: the task's, or top_1")
    for name, text in (("train", "training split"), ("validation", "split for model selection; unset: the last "
                       "fifth of train"), ("test", "test split")):
        command.add_argument(f"--{name}", metavar="SPLIT", help=f"{text} (default: the task's)")
    command.add_argument("--corrupt_images", choices=("error", "skip"), default="error", help="as for run.py")
    command.add_argument("--max_image_pixels", type=int, default=MAX_IMAGE_PIXELS, help="as for run.py (default: "
                         "%(default)d)")
    command.add_argument("--image_size", type=int, help="default: that of the network's training, or 224")
    command.add_argument("--batch_size", type=int, default=256, help="images per batch (default: 256)")
    command.add_argument("--out", help="directory of the results (default: runs/transfer/KIND_TASK)")


@contextlib.contextmanager
def _translate_errors():
    """Translates errors of data and files in the middle of the work into a `UserError`."""
    import tensorflow as tf  # Here: the command line is parsed before TensorFlow is loaded.

    file_errors = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError,
                   tf.errors.ResourceExhaustedError)
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        of_data = "IteratorGetNext" in str(error) or isinstance(error, tf.errors.DataLossError)
        if not (of_data or isinstance(error, (OSError, *file_errors))):
            raise
        raise UserError(f"{'the data' if of_data else '--out, or another file,'} cannot be used "
                        f"({first_line(error)}). Fix that, and run the same command again: finished work is "
                        "kept.") from error


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see `command_line.run_command` for errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():
        if hasattr(arguments, "out"):
            check_paths(arguments, "checkpoint", "out")
        if arguments.run is None:
            _list()
            return
        module, function = arguments.run.split(".")
        run = getattr(tensorflow_startup.load(f"transfer.{module}"), function)
        with _translate_errors():
            run(arguments)

    command_line.run_stoppable(parser.prog, work)
