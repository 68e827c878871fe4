"""Table 3: which transformations small MLPs can predict from h and from g(h), on frozen features.

    python -m paper.probes --checkpoint=PATH --dataset=NAME [--probes=colour,rotation,noise,sobel]
        [--train_split=train] [--test_split=test] [--flags='--data_dir=DIR'] [--out=FILE.json]

Images are evaluation crops, each transformed or not by chance. For a row of the table, pretrain with what it asks for
(--augment_extra=rotate, noise or sobel); grayscale is part of the default policy. In the paper g keeps the size of h
(--num_proj_layers=2 --proj_out_dim=2048).
"""

from __future__ import annotations

import argparse
import os

from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError
from runtime.paths import check_paths, check_writable_parent

_PROBES = "colour,rotation,noise,sobel"


def _parser():
    parser = command_line.ArgumentParser(prog="python -m paper.probes", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="any SimCLR network, as for run.py")
    parser.add_argument("--dataset", required=True, help="as for run.py")
    parser.add_argument("--probes", default=_PROBES, help="comma-separated")
    parser.add_argument("--train_split", default="train")
    parser.add_argument("--test_split", default="test")
    parser.add_argument("--flags", default="", help="further flags of run.py, such as '--data_dir=DIR'")
    parser.add_argument("--out", help="JSON file for the results")
    return parser


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    arguments = _parser().parse_args(argv)

    def work():
        probing = tensorflow_startup.load("paper.transformation_probes")
        from paper import common
        from runtime import storage

        check_paths(arguments, "checkpoint", "out")
        check_writable_parent("--out", arguments.out)
        if arguments.out and os.path.isdir(arguments.out):
            raise UserError(f"--out={arguments.out}: it is a directory. Name a file.")
        model, size = common.load(arguments.checkpoint)
        config = common.parse_flags(arguments.flags, dataset=arguments.dataset, image_size=size)
        probes = [name.strip() for name in arguments.probes.split(",") if name.strip()]
        results = probing.run_probes(model, config, probes, arguments.train_split, arguments.test_split)
        rows = [(probe, f"guess {found['guess']:.3f}   h {found['h']:.3f}   g(h) {found['z']:.3f}")
                for probe, found in results.items()]
        console.log(console.format_table(f"what can be told from {arguments.checkpoint}", rows))
        if arguments.out:
            storage.write_json(arguments.out, results)

    command_line.run_command("paper.probes", work)


if __name__ == "__main__":
    main()
