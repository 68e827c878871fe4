"""The paper's figures, and examples of the augmentations, as PNG and SVG, with their data as CSV.

    python -m paper.figures operators [--image=FILE]
    python -m paper.figures views --dataset=NAME [--flags='--augmentation=broader']
    python -m paper.figures histograms [--image=FILE --image=FILE]
    python -m paper.figures eigenvalues --checkpoint=PATH
    python -m paper.figures tsne --checkpoint=PATH --dataset=NAME [--split=test]
    python -m paper.figures pairs --csv=FILE
    python -m paper.figures batches --csv=FILE
    python -m paper.figures parameters --csv=FILE

each write NAME.png, NAME.svg and NAME.csv to --out (figures). All can be read in black and white.
"""

from __future__ import annotations

import argparse

from runtime import command_line, console, tensorflow_startup
from runtime.paths import check_paths

_FIGURES = {
    "operators": "All operators on an image (Figure 4, and more), three draws of each that draws",
    "views": "Pairs of views of a data set, as the network is shown them, the blur included",
    "histograms": "Pixel intensities, over all channels, of crops without and with colour distortion (Figure 6)",
    "eigenvalues": "Squared real parts of the eigenvalues of a square linear projection head, in order (paper, B.4)",
    "tsne": "t-SNE of h and of z = g(h) for the first ten classes of a data set (paper, B.4: ten that were drawn)",
    "pairs": "accuracies of pairs of augmentations (Figure 5); columns first, second, accuracy",
    "batches": "accuracies by epochs and batch size (Figure 9); columns epochs, batch_size, accuracy, and scaling",
    "parameters": "accuracies by number of parameters (Figure 7); columns network, million parameters, accuracy, group",
}


def _parser():
    parser = command_line.ArgumentParser(prog="python -m paper.figures", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="name", required=True)
    for name, text in _FIGURES.items():
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("--out", default="figures", help="directory of the results")
        if name == "operators":
            kind.add_argument("--image", help="an image file; unset: a photograph of scikit-learn")
        if name == "histograms":
            kind.add_argument("--image", action="append", help="an image file, as often as wanted; unset: two "
                              "photographs of scikit-learn")
        if name in ("eigenvalues", "tsne"):
            kind.add_argument("--checkpoint", required=True, help="any SimCLR network, as for run.py")
        if name in ("views", "tsne"):
            kind.add_argument("--dataset", required=True, help="as for run.py")
            kind.add_argument("--flags", default="", help="further flags of run.py, such as '--image_size=32'")
        if name == "tsne":
            kind.add_argument("--split", default="test", help="of the data set")
        if name in ("pairs", "batches", "parameters"):
            kind.add_argument("--csv", required=True, help="the results of the runs")
    return parser


def make(arguments: argparse.Namespace) -> str:
    """Makes the figure that parsed arguments ask for; returns the path of the PNG file. Raises `UserError`."""
    drawing, common = tensorflow_startup.load("paper.drawing"), tensorflow_startup.load("paper.common")
    check_paths(arguments, *(flag for flag in ("checkpoint", "csv", "out") if hasattr(arguments, flag)))
    name, out = arguments.name, arguments.out
    if name == "operators":
        return drawing.operators(drawing.read_images(arguments.image and [arguments.image])[0], out)
    if name == "histograms":
        return drawing.histograms(drawing.read_images(arguments.image), out)
    if name == "eigenvalues":
        return drawing.eigenvalues(arguments.checkpoint, out)
    if name in ("pairs", "batches", "parameters"):
        return getattr(drawing, name)(arguments.csv, out)
    if name == "views":
        return drawing.views(common.parse_flags(arguments.flags, dataset=arguments.dataset), out)
    model, size = common.load(arguments.checkpoint)
    return drawing.tsne(model, common.parse_flags(arguments.flags, dataset=arguments.dataset, image_size=size),
                arguments.split, out)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    arguments = _parser().parse_args(argv)
    console.log(command_line.run_command("paper.figures", lambda: make(arguments)))


if __name__ == "__main__":
    main()
