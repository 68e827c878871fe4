"""Table 3: accuracy of small MLPs that predict image transformations from the frozen features h and g(h).

    python -m paper.probes --checkpoint=PATH --dataset=NAME [--probes=color,rotation,noise,sobel]
        [--train_split=train] [--test_split=test] [--flags='--data_dir=DIR'] [--out=FILE.json]

The MLP predicts the random transformation applied to each evaluation crop: color (grayscale or
not), rotation (by 0, 90, 180 or 270 degrees), noise or sobel (applied or not). Each row of the
table except color requires an encoder pretrained with the row's transformation
(--augment_extra=rotate, noise or sobel); the default policy already includes grayscale. In the
paper, g(h) has the same number of dimensions as h (--num_proj_layers=2 --proj_out_dim=2048).

For each probe, the --out file contains three accuracies: `h` is the accuracy on h, `z` is the
accuracy on z = g(h), and `majority_baseline` is the accuracy of always predicting the most frequent
class.
"""

from __future__ import annotations

import argparse
import os

import pandas as pd

from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError
from runtime.paths import check_paths, check_writable_parent


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m paper.probes", description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint or SavedModel, specified as for run.py"
    )
    parser.add_argument("--dataset", required=True, help="data set, specified as for run.py")
    parser.add_argument(
        "--probes",
        default="color,rotation,noise,sobel",
        help="comma-separated probes (default: %(default)s)",
    )
    parser.add_argument(
        "--train_split", default="train", help="training split (default: %(default)s)"
    )
    parser.add_argument("--test_split", default="test", help="test split (default: %(default)s)")
    parser.add_argument(
        "--flags", default="", help="additional flags for run.py, such as '--data_dir=DIR'"
    )
    parser.add_argument("--out", help="JSON file for the results")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs the command-line program."""
    arguments = _parser().parse_args(argv)

    def work():
        probing = tensorflow_startup.load("paper.transformation_probes")
        from paper import common
        from runtime import storage

        check_paths(arguments, "checkpoint", "out")
        check_writable_parent("--out", arguments.out)
        if os.path.isdir(arguments.out or ""):
            raise UserError(
                f"--out={arguments.out}: the path is a directory. Pass the path of a file."
            )
        model, config = common.load(arguments.checkpoint, arguments.dataset, arguments.flags)
        probes = arguments.probes.split(",")
        results = probing.run_probes(
            model, config, probes, arguments.train_split, arguments.test_split
        )
        table = pd.DataFrame(results).T.to_string(float_format="{:.3f}".format)
        console.log(f"probe accuracies for {arguments.checkpoint}\n{table}")
        if arguments.out:
            if os.path.exists(arguments.out):
                console.log(f"replacing {arguments.out}")
            storage.write_json(arguments.out, results)

    command_line.run_command("paper.probes", work)


if __name__ == "__main__":
    main()
