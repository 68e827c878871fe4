"""Plots the paper's figures and augmentation examples as PNG and SVG files, with their data as CSV files.

    python -m paper.figures FIGURE [--FLAG=VALUE ...]

operators: three random samples of each operator applied to the same image (extended version of
  Figure 4)
views: pairs of augmented views of images from a data set, as the network sees them, including blur
histograms: pixel-value histograms of crops with and without color distortion (Figure 6); --image
  may be repeated
eigenvalues: sorted squared real parts of the eigenvalues of a square linear projection head
  (Appendix B.4)
tsne: t-SNE of h and of z = g(h) for ten random classes of a data set (Appendix B.4)

The following figures show the rows of a CSV file, with one row per run and seed, such as one written
by `python -m paper.tables report`. The required columns are in brackets.

pairs: accuracy for pairs of augmentations (Figure 5) [first, second, accuracy]
batches: accuracy by number of epochs and batch size (Figures 9, B.1, B.2 and B.7) [epochs,
  batch_size, accuracy; optional: scaling]; --measure=top-5 plots another column, and
  --average=learning_rate averages over one
heads: accuracy by projection head, output dimension and representation (Figure 8) [head, dimension,
  representation, accuracy; optional: logistic regression on g(h)]
fine_tuning: accuracy after fine-tuning by linear-evaluation accuracy (Figures B.5 and B.6) [start,
  labels, accuracy before, accuracy]
temperatures: mean accuracy by batch size, temperature and training length (Figure B.8)
  [temperature, batch_size, training, accuracy]
parameters: accuracy by number of parameters (Figure 7) [network, million parameters, accuracy,
  group]
race: accuracies during training with several programs, as measured by `python -m benchmarks race`
  [program, run, minutes, accuracy, nearest neighbors]
methods: the paper's accuracies of SimCLR, supervised training and other methods by number of
  parameters (Figure 1), and our accuracies if --csv is set [the columns of `parameters`]

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
_CSV = dict(required=True, help="CSV file; see `python -m paper.figures --help`")

_FIGURES: dict[str, dict[str, dict[str, Any]]] = {  # name -> flags
    "operators": dict(image=_IMAGE),
    "views": dict(dataset=_DATASET, flags=_FLAGS),
    "histograms": dict(image=_IMAGE),
    "eigenvalues": dict(checkpoint=_CHECKPOINT),
    "tsne": dict(
        checkpoint=_CHECKPOINT,
        dataset=_DATASET,
        flags=_FLAGS,
        split=dict(default="test", help="split of the data set (default: %(default)s)"),
        seed=dict(
            type=command_line.number(int, 0, 999_999_999),
            default=1,
            help="seed for the classes and examples, and for t-SNE (default: %(default)s)",
        ),
    ),
    "batches": dict(
        csv=_CSV,
        measure=dict(
            choices=("accuracy", "top-5"),
            default="accuracy",
            help="column to plot (default: %(default)s)",
        ),
        average=dict(
            default="",
            help="comma-separated columns to average over, such as learning_rate; error bars show"
            " the standard deviation",
        ),
    ),
    **dict.fromkeys(
        ("pairs", "heads", "fine_tuning", "temperatures", "parameters", "race"), dict(csv=_CSV)
    ),
    "methods": dict(csv={**_CSV, "required": False}),
}


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m paper.figures", description=__doc__)
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="FIGURE")
    for name, flags in _FIGURES.items():
        command = subparsers.add_parser(name)
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
