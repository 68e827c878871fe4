"""Plots the paper's figures and augmentation examples as PNG and SVG files, with their data as CSV files.

    python -m paper.figures operators [--image=FILE]
    python -m paper.figures views --dataset=NAME [--flags='--augmentation=broader']
    python -m paper.figures histograms [--image=FILE --image=FILE]
    python -m paper.figures eigenvalues --checkpoint=PATH
    python -m paper.figures tsne --checkpoint=PATH --dataset=NAME [--split=test] [--seed=1]
    python -m paper.figures pairs --csv=FILE
    python -m paper.figures batches --csv=FILE [--measure=top-5] [--average=learning_rate]
    python -m paper.figures temperatures --csv=FILE
    python -m paper.figures heads --csv=FILE
    python -m paper.figures fine_tuning --csv=FILE
    python -m paper.figures parameters --csv=FILE
    python -m paper.figures race --csv=FILE
    python -m paper.figures methods [--csv=FILE]

Each command writes NAME.png, NAME.svg and NAME.csv to --out (default: figures). The figures are
legible in grayscale.
"""

from __future__ import annotations

import argparse
from typing import Any

from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_paths

_CHECKPOINT = dict(required=True, help="checkpoint or SavedModel, specified as for run.py")
_DATASET = dict(required=True, help="data set, specified as for run.py")
_FLAGS = dict(default="", help="additional flags for run.py, such as '--image_size=32'")
_IMAGE = dict(action="append", help="image file (default: sample photographs from scikit-learn)")
_CSV = dict(
    required=True,
    help=(
        "CSV file with one row per run and seed, such as one written by `python -m paper.tables"
        " report`"
    ),
)


_FIGURES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {  # name -> (description, flags)
    "operators": (
        "three random samples of each operator applied to the same image (extended version of"
        " Figure 4)",
        dict(image=_IMAGE),
    ),
    "views": (
        "pairs of augmented views of images from a data set, as the network sees them, including"
        " blur",
        dict(dataset=_DATASET, flags=_FLAGS),
    ),
    "histograms": (
        "pixel-value histograms of crops with and without color distortion (Figure 6); --image may"
        " be repeated",
        dict(image=_IMAGE),
    ),
    "eigenvalues": (
        "sorted squared real parts of the eigenvalues of a square linear projection head (Appendix"
        " B.4)",
        dict(checkpoint=_CHECKPOINT),
    ),
    "tsne": (
        "t-SNE of h and of z = g(h) for ten random classes of a data set (Appendix B.4)",
        dict(
            checkpoint=_CHECKPOINT,
            dataset=_DATASET,
            flags=_FLAGS,
            split=dict(default="test", help="split of the data set (default: %(default)s)"),
            seed=dict(
                type=command_line.number(int, 0, 999_999_999),
                default=1,
                help=(
                    "seed for the selection of classes and examples, and for t-SNE (default:"
                    " %(default)s)"
                ),
            ),
        ),
    ),
    "pairs": (
        "accuracy for pairs of augmentations (Figure 5); required columns: first, second, accuracy",
        dict(csv=_CSV),
    ),
    "batches": (
        "accuracy by number of epochs and batch size (Figures 9, B.1, B.2 and B.7); required"
        " columns: epochs, batch_size, accuracy; optional column: scaling",
        dict(
            csv=_CSV,
            measure=dict(
                choices=("accuracy", "top-5"),
                default="accuracy",
                help="column to plot (default: %(default)s)",
            ),
            average=dict(
                default="",
                help=(
                    "comma-separated columns to average over, such as learning_rate; error bars"
                    " show the standard deviation"
                ),
            ),
        ),
    ),
    "heads": (
        "accuracy by projection head, output dimension and representation (Figure 8); required"
        " columns: head, dimension, representation, accuracy; optional column: logistic regression"
        " on g(h)",
        dict(csv=_CSV),
    ),
    "fine_tuning": (
        "accuracy after fine-tuning by linear-evaluation accuracy (Figures B.5 and B.6); required"
        " columns: start, labels, accuracy before, accuracy",
        dict(csv=_CSV),
    ),
    "temperatures": (
        "mean accuracy by batch size, temperature and training length (Figure B.8); required"
        " columns: temperature, batch_size, training, accuracy",
        dict(csv=_CSV),
    ),
    "parameters": (
        "accuracy by number of parameters (Figure 7); required columns: network, million"
        " parameters, accuracy, group",
        dict(csv=_CSV),
    ),
    "race": (
        "accuracies during training with several programs, as measured by `python -m benchmarks"
        " race`; required columns: program, minutes, accuracy, nearest neighbors",
        dict(csv=_CSV),
    ),
    "methods": (
        "the paper's accuracies of SimCLR, supervised training and other methods by number of"
        " parameters (Figure 1), and our accuracies if --csv is set; required columns: network,"
        " million parameters, accuracy, group",
        dict(csv={**_CSV, "required": False}),
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m paper.figures", description=__doc__)
    subparsers = parser.add_subparsers(dest="name", required=True)
    for name, (text, flags) in _FIGURES.items():
        command = subparsers.add_parser(name, help=text)
        for flag, options in flags.items():
            command.add_argument(f"--{flag}", **options)
        command.add_argument(
            "--out", default="figures", help="output directory (default: %(default)s)"
        )
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs the command-line program."""
    arguments = _parser().parse_args(argv)

    def work():
        drawing = tensorflow_startup.load("paper.drawing")
        values = vars(arguments)
        check_paths(arguments, *sorted({"checkpoint", "csv", "out"}.intersection(values)))
        with drawing.plt.rc_context(drawing.STYLE):
            path = getattr(drawing, values.pop("name"))(**values)
        console.log(path)

    command_line.run_command("paper.figures", work)


if __name__ == "__main__":
    main()
