"""Transfer learning: evaluates an encoder on the paper's twelve data sets or on your own data (section 6 and B.8).

    python -m transfer list
    python -m transfer linear --checkpoint=PATH --task=NAME [--dataset=folder:DIR] [--data_dir=DIR] [--out=DIR]
    python -m transfer finetune --checkpoint=PATH --task=NAME [--jobs=N] [--flags='--precision=mixed_bfloat16']
    python -m transfer scratch --checkpoint=PATH --task=NAME [--jobs=N]
    python -m transfer compare PREDICTIONS.npz PREDICTIONS.npz

`linear` fits an l2-regularized logistic regression to frozen features. `finetune` trains the whole
network, starting from the checkpoint; `scratch` trains the same network from random weights. Both
search a grid of learning rates and weight decays. `compare` runs a permutation test. Results and
predictions are written to --out. To resume an interrupted command, run it again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from config import settings_with
from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_paths
from transfer import tasks


def _list() -> None:
    console.log(
        console.format_table(
            "the paper's twelve data sets",
            [
                (
                    name,
                    (
                        f"{task.dataset or 'folder:DIR':28} {task.metric:24} "
                        f"{task.train_split} | {task.validation_split} | {task.test}"
                    ),
                )
                for name, task in tasks.TASKS.items()
            ],
        )
    )


def _numbers(minimum: float) -> Callable:
    """Returns a function for the `type` of an argument in argparse, which parses comma-separated numbers."""

    def numbers(text):
        return tuple(map(command_line.number(float, minimum), text.split(",")))

    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m transfer", description=__doc__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("list", help="list the paper's data sets").set_defaults(run=None)
    _add_common(
        commands.add_parser("linear", help="fit a logistic regression to frozen features"),
        "linear_evaluation.run_linear",
        "linear",
    )
    for protocol, text in (
        ("finetune", "train the whole network, starting from a checkpoint"),
        ("scratch", "train the checkpoint's network from random weights"),
    ):
        command, grid = commands.add_parser(protocol, help=text), tasks.GRIDS[protocol]
        _add_common(command, "grid_search.run_grid", protocol)
        command.add_argument(
            "--jobs",
            type=command_line.number(int, 1),
            default=1,
            help=(
                "number of trials that run in parallel and share the "
                "devices in CUDA_VISIBLE_DEVICES (default: 1)"
            ),
        )
        command.add_argument(
            "--steps",
            type=command_line.number(int, 1),
            default=grid.steps,
            help="training steps per trial (default: %(default)d)",
        )
        for name, minimum in (("learning_rates", 1e-9), ("weight_decays", 0)):
            values = getattr(grid, name)
            command.add_argument(
                f"--{name}",
                type=_numbers(minimum),
                default=values,
                help=(
                    "comma-separated grid values (default: "
                    f"{','.join(f'{value:.2g}' for value in values)})"
                ),
            )
        command.add_argument(
            "--seed",
            type=command_line.number(int, 0),
            default=0,
            help="random seed for all trials (default: 0)",
        )
        command.add_argument(
            "--flags", default="", help="additional flags for run.py, such as '--precision=...'"
        )
    command = commands.add_parser("compare", help="run a permutation test on two prediction files")
    command.set_defaults(run="significance.run_compare")
    command.add_argument("first", help="prediction file (.npz) of the first model")
    command.add_argument("second", help="prediction file (.npz) of the second model")
    command.add_argument(
        "--metric",
        choices=("top_1", "mean_per_class"),
        help=(
            "metric to compare (default: "
            "top_1); for multi-label data, accuracies are always compared"
        ),
    )
    return parser


def _add_common(command: argparse.ArgumentParser, run: str, protocol: str) -> None:
    """Adds the flags that the commands `linear`, `finetune` and `scratch` share."""
    command.set_defaults(run=run, protocol=protocol)
    command.add_argument(
        "--checkpoint", required=True, help="path of any SimCLR weights, as for run.py"
    )
    command.add_argument("--task", choices=tasks.TASKS, help="one of the paper's data sets")
    command.add_argument(
        "--dataset", help="data set, as for run.py (default: the data set of --task)"
    )
    for name in settings_with("data_access"):
        if name != "corrupt_images":
            command.add_argument(f"--{name}", help="as for run.py")
    command.add_argument(
        "--metric",
        choices=tasks.METRICS,
        help=(
            "metric for model selection and testing (default: the "
            "task's metric, or top_1 without --task)"
        ),
    )
    for name, text in (
        (
            "--train",
            "training split (default: the task's training split, or 'train' without --task)",
        ),
        (
            "--validation",
            "split for model selection (default: the validation split, or the last 20 %% of the"
            " training split if there is no validation split)",
        ),
        ("--test", "test split (default: the task's test split, or 'test' without --task)"),
    ):
        command.add_argument(name, metavar="SPLIT", help=text)
    command.add_argument(
        "--corrupt_images",
        choices=("error", "skip"),
        default="error",
        help=(
            "if a folder contains unusable images: stop with an error, or skip them (default:"
            " error)"
        ),
    )
    command.add_argument(
        "--image_size",
        type=int,
        help="image size in pixels (default: as in pretraining, or 224 if it is unknown)",
    )
    command.add_argument(
        "--batch_size",
        type=command_line.number(int, 1),
        default=256,
        help="images per batch (default: 256)",
    )
    command.add_argument("--out", help="output directory (default: runs/transfer/PROTOCOL_TASK)")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():
        if hasattr(arguments, "out"):
            check_paths(arguments, "checkpoint", "out")
        if arguments.run is None:
            _list()
            return
        module, function = arguments.run.split(".")
        getattr(tensorflow_startup.load(f"transfer.{module}"), function)(arguments)

    command_line.run_stoppable(parser.prog, work)
