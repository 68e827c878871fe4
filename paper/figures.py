"""Plots the paper's figures and augmentation examples as PNG and SVG files, with their data as CSV files.

    python -m paper.figures operators [--image=FILE]
    python -m paper.figures views --dataset=NAME [--flags='--augmentation=broader']
    python -m paper.figures histograms [--image=FILE --image=FILE]
    python -m paper.figures eigenvalues --checkpoint=PATH
    python -m paper.figures tsne --checkpoint=PATH --dataset=NAME [--split=test] [--seed=1]
    python -m paper.figures pairs --csv=FILE
    python -m paper.figures batches --csv=FILE [--measure=top-5] [--average=learning_rate]
    python -m paper.figures temperatures --csv=FILE
    python -m paper.figures parameters --csv=FILE
    python -m paper.figures methods [--csv=FILE]

Each command writes NAME.png, NAME.svg and NAME.csv to --out (default: figures). The figures are
legible in grayscale.
"""

from __future__ import annotations

import argparse
import re

from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_paths

_FIGURES = {
    "operators": (
        "three random samples of each operator applied to the same image (extended version of"
        " Figure 4)"
    ),
    "views": (
        "pairs of augmented views of images from a data set, as the network sees them, including"
        " blur"
    ),
    "histograms": "pixel-value histograms of crops with and without color distortion (Figure 6)",
    "eigenvalues": (
        "sorted squared real parts of the eigenvalues of a square linear projection head (Appendix"
        " B.4)"
    ),
    "tsne": "t-SNE of h and of z = g(h) for ten random classes of a data set (Appendix B.4)",
    "pairs": (
        "accuracy for pairs of augmentations (Figure 5); required columns: first, second, accuracy"
    ),
    "batches": (
        "accuracy by number of epochs and batch size (Figures 9, B.1, B.2 and B.7); required"
        " columns: epochs, batch_size, accuracy; optional column: scaling"
    ),
    "temperatures": (
        "mean accuracy by batch size, temperature and training length (Figure B.8); required"
        " columns: temperature, batch_size, training, accuracy"
    ),
    "parameters": (
        "accuracy by number of parameters (Figure 7); required columns: network, million"
        " parameters, accuracy, group"
    ),
    "methods": (
        "the paper's accuracies of SimCLR, supervised training and other methods by number of"
        " parameters (Figure 1), and our accuracies if --csv is set; required columns: network,"
        " million parameters, accuracy, group"
    ),
}


def _parse_seed(text):
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 999999999; got {text}")
    return int(text)


def _parser():
    parser = command_line.ArgumentParser(
        prog="python -m paper.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="name", required=True)
    for name, text in _FIGURES.items():
        command = subparsers.add_parser(name, help=text)
        command.add_argument(
            "--out", default="figures", help="output directory (default: %(default)s)"
        )
        if name == "operators":
            command.add_argument(
                "--image", help="image file (default: a sample photograph from scikit-learn)"
            )
        if name == "histograms":
            command.add_argument(
                "--image",
                action="append",
                help=(
                    "image file; may be repeated (default: two sample "
                    "photographs from scikit-learn)"
                ),
            )
        if name in ("eigenvalues", "tsne"):
            command.add_argument(
                "--checkpoint",
                required=True,
                help="checkpoint or SavedModel, specified as for run.py",
            )
        if name in ("views", "tsne"):
            command.add_argument(
                "--dataset", required=True, help="data set, specified as for run.py"
            )
            command.add_argument(
                "--flags", default="", help="additional flags for run.py, such as '--image_size=32'"
            )
        if name == "tsne":
            command.add_argument(
                "--split", default="test", help="split of the data set (default: %(default)s)"
            )
            command.add_argument(
                "--seed",
                type=_parse_seed,
                default=1,
                help=(
                    "seed for the selection of classes "
                    "and examples, and for t-SNE (default: %(default)s)"
                ),
            )
        if name in ("pairs", "batches", "temperatures", "parameters", "methods"):
            command.add_argument(
                "--csv",
                required=name != "methods",
                help=(
                    "CSV file with one row per run and seed, "
                    "such as one written by `python -m paper.tables report`"
                ),
            )
        if name == "batches":
            command.add_argument(
                "--measure",
                choices=("accuracy", "top-5"),
                default="accuracy",
                help="column to plot (default: %(default)s)",
            )
            command.add_argument(
                "--average",
                default="",
                help=(
                    "comma-separated columns to average over, such as "
                    "learning_rate; error bars show the standard deviation"
                ),
            )
    return parser


def make(arguments: argparse.Namespace) -> str:
    """Plots the figure selected by the arguments and returns the path of the PNG file.

    Raises `UserError` if an argument is invalid, or if a file cannot be read or written.
    """
    drawing, common = (
        tensorflow_startup.load("paper.drawing"),
        tensorflow_startup.load("paper.common"),
    )
    check_paths(
        arguments, *(flag for flag in ("checkpoint", "csv", "out") if hasattr(arguments, flag))
    )
    name, out = arguments.name, arguments.out
    if name == "operators":
        return drawing.operators(drawing.read_images(arguments.image and [arguments.image])[0], out)
    if name == "histograms":
        return drawing.histograms(drawing.read_images(arguments.image), out)
    if name == "eigenvalues":
        return drawing.eigenvalues(arguments.checkpoint, out)
    if name == "batches":
        return drawing.batches(
            arguments.csv, out, arguments.measure, tuple(filter(None, arguments.average.split(",")))
        )
    if name in ("pairs", "temperatures", "parameters", "methods"):
        return getattr(drawing, name)(arguments.csv, out)
    if name == "views":
        return drawing.views(common.parse_flags(arguments.flags, dataset=arguments.dataset), out)
    model, size = common.load(arguments.checkpoint)
    return drawing.tsne(
        model,
        common.parse_flags(arguments.flags, dataset=arguments.dataset, image_size=size),
        arguments.split,
        out,
        arguments.seed,
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command-line program."""
    arguments = _parser().parse_args(argv)
    console.log(command_line.run_command("paper.figures", lambda: make(arguments)))


if __name__ == "__main__":
    main()
