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

from config import settings_with
from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_paths
from transfer import tasks


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m transfer", description=__doc__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("list", help="list the paper's data sets").set_defaults(run=None)
    for protocol, run, text in (
        ("linear", "linear_evaluation.run_linear", "fit a logistic regression to frozen features"),
        ("finetune", "grid_search.run_grid", "train the whole network, starting from a checkpoint"),
        ("scratch", "grid_search.run_grid", "train the checkpoint's network from random weights"),
    ):
        command = commands.add_parser(protocol, help=text)
        command.set_defaults(run=run, protocol=protocol)
        command.add_argument(
            "--checkpoint", required=True, help="path of any SimCLR weights, as for run.py"
        )
        command.add_argument("--task", choices=tasks.TASKS, help="one of the paper's data sets")
        command.add_argument(
            "--metric",
            choices=tasks.METRICS,
            help="metric for selection and testing (default: the metric of --task, or top_1)",
        )
        for name, text in (
            ("dataset", "data set, as for run.py (default: the data set of --task)"),
            ("train", "training split (default: the split of --task, or 'train')"),
            (
                "validation",
                "split for selection (default: as --task, or the last fifth of --train)",
            ),
            ("test", "test split (default: the split of --task, or 'test')"),
            ("out", "output directory (default: runs/transfer/PROTOCOL_TASK)"),
            *((name, "as for run.py") for name in settings_with("data_access")),
        ):
            command.add_argument(f"--{name}", help=text)
        command.add_argument(
            "--image_size",
            type=int,
            help="image size in pixels (default: as in pretraining, or 224 if it is unknown)",
        )
        whole_numbers = [("batch_size", 1, 256, "images per batch")]
        grid = tasks.GRIDS.get(protocol)
        if grid:
            whole_numbers += [
                ("jobs", 1, 1, "number of parallel trials, which share CUDA_VISIBLE_DEVICES"),
                ("steps", 1, grid.steps, "training steps per trial"),
                ("seed", 0, 0, "random seed for all trials"),
            ]
            for name, minimum in (("learning_rates", 1e-9), ("weight_decays", 0)):
                values = getattr(grid, name)
                number = command_line.number(float, minimum)

                def numbers(text, number=number):
                    return tuple(map(number, text.split(",")))

                command.add_argument(
                    f"--{name}",
                    type=numbers,
                    default=values,
                    help=f"grid values (default: {','.join(f'{value:.2g}' for value in values)})",
                )
            command.add_argument(
                "--flags", default="", help="additional flags for run.py, such as '--precision=...'"
            )
        for name, minimum, default, text in whole_numbers:
            command.add_argument(
                f"--{name}",
                type=command_line.number(int, minimum),
                default=default,
                help=f"{text} (default: {default})",
            )
    command = commands.add_parser("compare", help="run a permutation test on two prediction files")
    command.set_defaults(run="significance.run_compare")
    command.add_argument("first", help="prediction file (.npz) of the first model")
    command.add_argument("second", help="prediction file (.npz) of the second model")
    command.add_argument(
        "--metric",
        choices=("top_1", "mean_per_class"),
        help="metric to compare (default: top_1); multi-label data are compared by accuracy",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    parser = _parser()
    arguments = parser.parse_args(arguments)

    def work():
        if hasattr(arguments, "out"):
            check_paths(arguments, "checkpoint", "out")
        if arguments.run is None:
            rows = [
                (
                    f"{name:10}  {task.dataset or 'folder:DIR':28} {task.metric:22}",
                    " | ".join(task.splits.values()),
                )
                for name, task in tasks.TASKS.items()
            ]
            console.log(console.format_table("the paper's twelve data sets", rows))
            return
        module, function = arguments.run.split(".")
        getattr(tensorflow_startup.load(f"transfer.{module}"), function)(arguments)

    command_line.run_stoppable(parser.prog, work)
