"""Exports a checkpoint's network as a SavedModel for TF Hub, or as PyTorch weights.

    python -m export --checkpoint=CHECKPOINT --export_dir=DIR [--archive=FILE.tar.gz]
    python -m export torch --checkpoint=CHECKPOINT --out=FILE.safetensors

The first command writes a SavedModel. The second command writes the encoder and the heads for
PyTorch, a model card FILE.md, and the code that loads them (see `python -m export torch --help`).
"""

from __future__ import annotations

import sys

from runtime import command_line, tensorflow_startup

_TORCH = """Writes the weights of a SimCLR network for PyTorch.

    python -m export torch --checkpoint=CHECKPOINT --out=FILE.safetensors

FILE.safetensors contains the encoder, without a classifier. The tensors are named as in the ResNets of torchvision and
timm. FILE.projection_head.safetensors and FILE.linear_head.safetensors contain the heads, if the network has them.
torch_resnet.py, next to these files, loads them in PyTorch, and the model card FILE.md describes them. Networks with
selective kernels or squeeze-and-excitation can only be loaded with torch_resnet.py.
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program. See `command_line.run_stoppable` for the handling of errors and signals."""
    arguments = sys.argv[1:] if arguments is None else arguments
    torch = arguments[:1] == ["torch"]
    parser = command_line.ArgumentParser(
        prog=f"python -m export{' torch' if torch else ''}",
        description=_TORCH if torch else __doc__,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a directory, a checkpoint prefix, a SavedModel, a PyTorch file or a TF Hub handle",
    )
    if torch:
        parser.add_argument("--out", required=True, help="path of the new file, FILE.safetensors")
    else:
        parser.add_argument(
            "--export_dir", required=True, help="new or empty directory for the SavedModel"
        )
        parser.add_argument(
            "--archive", help="also write a TF Hub archive FILE.tar.gz and a model card FILE.md"
        )
    command_line.add_network_settings(parser)
    arguments = parser.parse_args(arguments[1:] if torch else arguments)

    def work():
        given = command_line.network_settings(arguments)
        if torch:
            tensorflow_startup.load("export.torch_weights").export_torch(
                arguments.checkpoint, arguments.out, given
            )
        else:
            tensorflow_startup.load("export.exporting").export_checkpoint(
                arguments.checkpoint, arguments.export_dir, arguments.archive, given
            )

    command_line.run_stoppable(parser.prog, work)
