"""Describes the contents of a SimCLR checkpoint or SavedModel.

python -m checkpoints describe PATH
"""

from __future__ import annotations

from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_weights_path


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_command` for the handling of errors and signals."""
    parser = command_line.ArgumentParser(prog="python -m checkpoints", description=__doc__)
    parser.add_argument(
        "command",
        choices=["describe"],
        help="print the format, step, network, heads and matching flags",
    )
    parser.add_argument(
        "path",
        help=(
            "a directory, a checkpoint prefix, a SavedModel, a PyTorch file "
            "(FILE.safetensors) or a TF Hub handle"
        ),
    )
    path = parser.parse_args(arguments).path

    def work():
        checked = check_weights_path("PATH", path)
        console.log(tensorflow_startup.load("checkpoints.summary").describe(checked))

    command_line.run_command(parser.prog, work)
