"""The tables of the paper as data: what was run, by which flags, and what came out.

Its figures are here, too, and sentences that give numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a table, by run.py, or by transfer.py on what another run has made."""

    name: str
    flags: dict  # what differs from the recipe; for transfer.py, its arguments
    paper: dict = dataclasses.field(default_factory=dict)  # measure -> number as printed, accuracies in %
    small: dict = dataclasses.field(default_factory=dict)  # what differs at the small scale besides
    recipe: str = "imagenet_paper.cfg"
    small_recipe: str = "study_small.cfg"
    start: tuple | None = None  # (study, cell) whose weights --checkpoint names
    transfer: str | None = None  # command of transfer.py: linear, finetune or scratch; without, run.py is run
    probes: tuple = ()  # of `paper.probes`, to be asked of the result
    data: dict = dataclasses.field(default_factory=dict)  # for `paper.figures`: columns of the report's CSV file


@dataclasses.dataclass(frozen=True)
class Study:
    """Runs that are compared: a table of the paper, a row of one, or a figure or a sentence with numbers."""

    title: str
    source: str  # where it stands in the paper
    finding: str  # of the paper; or what the runs are for
    cells: tuple
    small_names: tuple | None = None  # those of the small scale, too; None: all
    small_only: tuple = ()  # cells of the small scale alone
    cited: tuple = ()  # (name, measure -> number or text): the paper's rows of other people's methods, not to be run

    def cells_of(self, scale):
        """The cells of a scale: paper or small."""
        return list(self.cells) if scale == "paper" else self._small_cells()

    def _small_cells(self):
        return [*self.small_only,
                *(cell for cell in self.cells if self.small_names is None or cell.name in self.small_names)]


def _top_1(number):
    """The paper's linear evaluation, in %."""
    return {"top-1": number}


_STRENGTHS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
_SUPERVISED = dict(recipe="imagenet_supervised.cfg", small_recipe="study_small_supervised.cfg")


def _colours(paper, **recipes):
    """Table 1's columns: colour distortion, blur, AutoAugment."""
    columns = [(name, dict(color_jitter_strength=strength, use_blur=False)) for name, strength in _STRENGTHS.items()]
    columns += [("1 + blur", dict(color_jitter_strength=1.0, use_blur=True)),
                ("AutoAugment", dict(augmentation="autoaugment", use_blur=False))]
    return tuple(Cell(name, settings, _top_1(number), **recipes)
                 for (name, settings), number in zip(columns, paper, strict=True))


_GRID = ("crop", "cutout", "color", "sobel", "noise", "blur", "rotate")
_CORNER = ("crop", "color", "sobel")


def _pairs():
    """Figure 5: the first and then the second transformation, on one branch only; the same one only once."""
    return tuple(Cell(f"{first} {second}", dict(
        augment_left=first if first == second else f"{first},{second}"), data=dict(first=first, second=second))
        for first, second in itertools.product(_GRID, _GRID))


def _broader():
    """B.2, and the same runs without it from Table 6, for three widths."""
    return tuple(
        Cell(f"{augmentation} ({width}x)", dict(train_epochs=1000, width_multiplier=width, augmentation=augmentation),
             _top_1(number), dict(train_epochs=4))
        for width, *numbers in ((1, 69.3, 70.0), (2, 74.2, 74.4), (4, 76.5, 76.8))
        for augmentation, number in zip(("simclr", "broader"), numbers, strict=True))


_LOSSES = (
    Cell("margin", dict(contrastive_loss="margin_triplet", negatives="one_view"), _top_1(50.9)),
    Cell("NT-Logistic", dict(contrastive_loss="nt_logistic", negatives="one_view", temperature=0.2),
         _top_1(51.6)),
    Cell("margin, semi-hard", dict(contrastive_loss="margin_triplet", negatives="one_view", semi_hard=True),
         _top_1(57.5)),
    Cell("NT-Logistic, semi-hard", dict(contrastive_loss="nt_logistic", negatives="one_view", semi_hard=True,
                                        temperature=0.2), _top_1(57.9)),
    Cell("NT-Xent", dict(negatives="one_view"), _top_1(63.9)),
)


def _tuning():
    """B.10: learning rates, with margins or temperatures."""
    rates, margins, temperatures = (0.01, 0.1, 0.3, 0.5, 1.0), (0.0, 0.4, 0.8, 1.6), (0.1, 0.2, 0.5, 1.0)
    margin = [Cell(f"margin {m}, rate {rate}", dict(contrastive_loss="margin_triplet", negatives="one_view", margin=m,
                                                    learning_rate=rate)) for m in margins for rate in rates]
    logistic = [Cell(f"NT-Logistic, temperature {t}, rate {rate}", dict(
        contrastive_loss="nt_logistic", negatives="one_view", temperature=t, learning_rate=rate))
        for t in temperatures for rate in rates]
    return (*margin, *logistic)


def _temperatures():
    """Table 5."""
    rows = [(True, 0.05, 1.0, 90.5, 59.7), (True, 0.1, 4.5, 87.8, 64.4), (True, 0.5, 8.2, 68.2, 60.7),
            (True, 1.0, 8.3, 59.1, 58.0), (False, 10.0, 0.5, 91.7, 57.2), (False, 100.0, 0.5, 92.1, 57.0)]
    measured = dict(eval_protocol="linear_head,contrastive", eval_batch_size=4096)
    small = dict(eval_protocol="linear_head,lbfgs,contrastive", eval_batch_size=256)
    return tuple(Cell(f"{'l2 norm' if norm else 'no norm'}, {temperature:g}", dict(
        hidden_norm=norm, temperature=temperature, **measured),
        {"entropy": entropy, "contrastive accuracy": right, "top-1": top_1}, small)
        for norm, temperature, entropy, right, top_1 in rows)


def _heads():
    """Figure 8: the head's form and the size of its output."""
    sizes, both, small = (32, 64, 128, 256, 512, 1024, 2048), "linear_head,lbfgs", dict(eval_protocol="lbfgs")
    cells = [Cell("none", dict(proj_head_mode="none", eval_protocol=both), small=small)]
    cells += [Cell(f"{mode} {size}", dict(proj_head_mode=mode, proj_out_dim=size, eval_protocol=both,
                                          eval_projections=True), small=small)
              for mode in ("linear", "nonlinear") for size in sizes]
    return tuple(cells)


_BATCHES = {  # Table B.1: batch -> (linear, square root) of 100, 200, 400 and 800 epochs
    256: ((57.5, 62.8), (61.9, 64.3), (64.7, 65.7), (66.6, 66.5)),
    512: ((60.7, 63.8), (64.0, 65.6), (66.2, 66.7), (67.8, 67.4)),
    1024: ((62.8, 64.3), (65.3, 66.1), (67.2, 67.2), (68.5, 68.3)),
    2048: ((64.0, 64.7), (66.1, 66.8), (68.1, 67.9), (68.9, 68.8)),
    4096: ((64.6, 64.5), (66.5, 66.8), (68.2, 68.0), (68.9, 69.1)),
    8192: ((64.8, 64.8), (66.6, 67.0), (67.8, 68.3), (69.0, 69.1)),
}


def _batches():
    """Figure 9 and B.1; at the small scale batches are an eighth, and both scalings meet at 512, not at 4096."""
    cells = []
    for batch, rows in _BATCHES.items():
        for epochs, numbers in zip((100, 200, 400, 800), rows, strict=True):
            for (scaling, rate), number in zip((("linear", 0.3), ("sqrt", 0.075)), numbers, strict=True):
                small = dict(train_batch_size=batch // 8, train_epochs=epochs // 50)
                small |= dict(learning_rate=round(0.0375 * math.sqrt(512), 4)) if scaling == "linear" else {}
                cells.append(Cell(
                    f"{scaling} {batch}, {epochs} epochs",
                    dict(train_batch_size=batch, train_epochs=epochs, learning_rate=rate,
                         learning_rate_scaling=scaling), _top_1(number), small,
                    data=dict(scaling=scaling, batch_size=batch // 8, epochs=epochs // 50)))
    return tuple(cells)


def _networks(depths, widths):
    """Figure 7."""
    return tuple(Cell(f"ResNet-{depth} ({width}x)", dict(resnet_depth=depth, width_multiplier=width),
                      data=dict(network=f"ResNet-{depth} ({width}x)", group="small scale"))
                 for depth in depths for width in widths)


def _cifar_temperatures():
    """B.9: temperatures and batch sizes on CIFAR-10."""
    return tuple(Cell(f"temperature {temperature}, batch {batch}", dict(temperature=temperature,
                                                                        train_batch_size=batch),
                      small=dict(train_batch_size=batch // 8), recipe="cifar10_paper.cfg")
                 for temperature in (0.1, 0.5, 1.0) for batch in (256, 512, 1024, 2048, 4096))


def _probes():
    """Table 3: the pretraining that each row needs; g keeps the size of h."""
    head = dict(num_proj_layers=2, proj_out_dim=2048)
    rows = (("colour", {}, 80, 99.3, 97.4), ("rotation", dict(augment_extra="rotate"), 25, 67.6, 25.6),
            ("noise", dict(augment_extra="noise"), 50, 99.5, 59.6),
            ("sobel", dict(augment_extra="sobel"), 50, 96.6, 56.3))
    return tuple(Cell(name, {**head, **extra}, {"guess": guess, "h": h, "g(h)": z}, small=dict(proj_out_dim=512),
                      probes=(name,)) for name, extra, guess, h, z in rows)


_WIDTHS = (1, 2, 4)


def _network(width, depth=50):
    return f"ResNet-{depth} ({width}x)"


def _linear():
    """Table 6: linear evaluation after 1000 epochs."""
    return tuple(Cell(_network(width), dict(train_epochs=1000, width_multiplier=width),
                      {"million parameters": parameters, "top-1": top_1, "top-5": top_5}, dict(train_epochs=4))
                 for width, parameters, top_1, top_5 in zip(
                     _WIDTHS, (24, 94, 375), (69.3, 74.2, 76.5), (89.0, 92.0, 93.2), strict=True))


_LINEAR_CITED = (
    ("Local Agg., ResNet-50", {"million parameters": 24, "top-1": 60.2}),
    ("MoCo, ResNet-50", {"million parameters": 24, "top-1": 60.6}),
    ("PIRL, ResNet-50", {"million parameters": 24, "top-1": 63.6}),
    ("CPC v2, ResNet-50", {"million parameters": 24, "top-1": 63.8, "top-5": 85.3}),
    ("Rotation, RevNet-50 (4x)", {"million parameters": 86, "top-1": 55.4}),
    ("BigBiGAN, RevNet-50 (4x)", {"million parameters": 86, "top-1": 61.3, "top-5": 81.9}),
    ("AMDIM, custom ResNet", {"million parameters": 626, "top-1": 68.1}),
    ("CMC, ResNet-50 (2x)", {"million parameters": 188, "top-1": 68.4, "top-5": 88.2}),
    ("MoCo, ResNet-50 (4x)", {"million parameters": 375, "top-1": 68.6}),
    ("CPC v2, ResNet-161", {"million parameters": 305, "top-1": 71.5, "top-5": 90.1}),
)


def _few_labels(starts, columns):
    """Fine-tuning on a part of the labels.

    Args:
      starts: (name, (study, cell) whose weights are taken, flags of the network).
      columns: (share of the labels, recipe, settings of the small scale, measure -> a number for each start).
    """
    return tuple(
        Cell(f"{name}, {labels}", flags, {measure: numbers[row] for measure, numbers in paper.items()}, small, recipe,
             "study_small_labels.cfg", start=start, data=dict(start=name, labels=labels))
        for labels, recipe, small, paper in columns for row, (name, start, flags) in enumerate(starts))


def _widths_after(study, name=lambda width: _network(width)):
    """ResNet-50 in three widths, for `_few_labels`, pretrained in a study."""
    return [(_network(width), (study, name(width)), dict(width_multiplier=width)) for width in _WIDTHS]


_LENGTHS = (50, 100, 200, 400, 800, 1600, 3200)


def _lengths():
    """Figure B.2: the default batch, for longer and longer."""
    return tuple(Cell(f"{epochs} epochs", dict(train_epochs=epochs, learning_rate=0.075, learning_rate_scaling="sqrt"),
                      small=dict(train_epochs=max(epochs // 50, 1), learning_rate=0.1)) for epochs in _LENGTHS)


def _depths_and_widths(depths, widths):
    """Networks for `_few_labels`, pretrained in `networks`."""
    return [(_network(width, depth), ("networks", _network(width, depth)),
             dict(resnet_depth=depth, width_multiplier=width)) for depth in depths for width in widths]


_ONE, _TEN = dict(label_fraction=0.01), dict(label_fraction=0.1, train_batch_size=128, train_epochs=30)
_ALL = dict(label_fraction=1.0, train_batch_size=128, train_epochs=6)
_FEW = (("1 %", "imagenet_1pct.cfg", _ONE, {"top-1": (48.3, 58.5, 63.0), "top-5": (75.5, 83.0, 85.8)}),
        ("10 %", "imagenet_10pct.cfg", _TEN, {"top-1": (65.6, 71.7, 74.4), "top-5": (87.8, 91.2, 92.6)}))
_FEW_BROADER = (("1 %", "imagenet_1pct.cfg", _ONE, {"top-1": (49.4, 59.4, 64.1), "top-5": (76.6, 83.7, 86.6)}),
                ("10 %", "imagenet_10pct.cfg", _TEN, {"top-1": (66.1, 71.8, 74.8), "top-5": (88.1, 91.2, 92.8)}),
                ("100 %", "imagenet_100pct.cfg", _ALL, {"top-1": (76.0, 79.1, 80.4), "top-5": (93.1, 94.8, 95.4)}))
_FEW_UNKNOWN = tuple((labels, recipe, small, {}) for labels, recipe, small, _ in _FEW)  # Figures tell no numbers.
# Rows of Table 7 (top-5) and Table B.4 (top-1).
_FEW_CITED = tuple((name, {f"{measure}, {labels}": number for (measure, labels), number in zip(
    itertools.product(("top-5", "top-1"), ("1 %", "10 %")), numbers, strict=True) if number is not None})
    for name, numbers in (
        ("supervised baseline, ResNet-50", (48.4, 80.4, 25.4, 56.4)),
        ("Pseudo-label, ResNet-50", (51.6, 82.4, None, None)),
        ("VAT + entropy min., ResNet-50", (47.0, 83.4, None, None)), ("UDA, ResNet-50", (None, 88.5, None, 68.8)),
        ("FixMatch, ResNet-50", (None, 89.1, None, 71.5)), ("S4L, ResNet-50 (4x)", (None, 91.2, None, 73.2)),
        ("InstDisc, ResNet-50", (39.2, 77.4, None, None)), ("BigBiGAN, RevNet-50 (4x)", (55.2, 78.8, None, None)),
        ("PIRL, ResNet-50", (57.2, 83.8, None, None)), ("CPC v2, ResNet-161", (77.9, 91.2, 52.7, 73.1))))


def _supervised_long():
    """Table B.3: supervised networks, trained longer, with the augmentations of contrastive training."""
    augmentations = {"crop": {}, "crop, colour": dict(color_jitter_strength=1.0),
                     "crop, colour, blur": dict(color_jitter_strength=1.0, use_blur=True)}
    rows = ((1, 90, 76.5, 75.6, 75.3), (1, 500, 76.2, 76.5, 76.7), (1, 1000, 75.8, 75.2, 76.4),
            (4, 90, 78.4, 78.9, 78.7), (4, 500, 78.3, 78.4, 78.5), (4, 1000, 77.9, 78.2, 78.3))
    return tuple(
        Cell(f"{_network(width)}, {epochs} epochs, {name}", dict(width_multiplier=width, train_epochs=epochs, **flags),
             _top_1(number), dict(train_epochs={90: 6, 500: 12, 1000: 24}[epochs]), **_SUPERVISED)
        for width, epochs, *numbers in rows
        for (name, flags), number in zip(augmentations.items(), numbers, strict=True))


_SUPERVISED_ENCODER = "{}, 1000 epochs, crop, colour, blur"
_TASKS = ("food101", "cifar10", "cifar100", "birdsnap", "sun397", "cars", "aircraft", "voc2007", "dtd", "pets",
          "caltech101", "flowers")


def _transfers(width, rows):
    """Tables 8 and B.5; rows: command of transfer.py, encoder, numbers."""
    starts = {"SimCLR": ("linear", _network(width)),
              "supervised": ("supervised_long", _SUPERVISED_ENCODER.format(_network(width))),
              "random": ("linear", _network(width))}  # Of which scratch takes the architecture alone.
    folders = {task: dict(dataset=f"folder:data/{task}") for task in ("birdsnap", "aircraft")}  # TFDS has them not.
    return tuple(
        Cell(f"{command}, {encoder}, {task}", {"task": task, **folders.get(task, {})},
             {_TRANSFER_METRICS.get(task, "top-1"): number}, start=starts[encoder], transfer=command,
             data=dict(task=task, encoder=encoder, protocol=command))
        for command, encoder, numbers in rows for task, number in zip(_TASKS, numbers, strict=True))


_TRANSFER_METRICS = {"voc2007": "mAP", **dict.fromkeys(("aircraft", "pets", "caltech101", "flowers"), "mean per class")}
_SMALL_SEARCH = dict(steps=150, learning_rates="0.01,0.1", weight_decays="0,0.0001", batch_size=64)


def _small_transfers():
    """From CIFAR-10 to handwritten digits, whose training examples are divided as elsewhere."""
    encoder = ("colour", "1/2")
    return tuple(Cell(f"{command}, {name}, digits", {}, small={"dataset": "digits", **more}, start=encoder,
                      transfer=command, data=dict(task="digits", encoder=name, protocol=command))
                 for command, name, more in (("linear", "SimCLR", {}), ("finetune", "SimCLR", _SMALL_SEARCH),
                                             ("scratch", "random", _SMALL_SEARCH)))


_TABLE_8 = (
    ("linear", "SimCLR", (76.9, 95.3, 80.2, 48.4, 65.9, 60.0, 61.2, 84.2, 78.9, 89.2, 93.9, 95.0)),
    ("linear", "supervised", (75.2, 95.7, 81.2, 56.4, 64.9, 68.8, 63.8, 83.8, 78.7, 92.3, 94.1, 94.2)),
    ("finetune", "SimCLR", (89.4, 98.6, 89.0, 78.2, 68.1, 92.1, 87.0, 86.6, 77.8, 92.1, 94.1, 97.6)),
    ("finetune", "supervised", (88.7, 98.3, 88.7, 77.8, 67.0, 91.4, 88.0, 86.5, 78.8, 93.2, 94.2, 98.0)),
    ("scratch", "random", (88.3, 96.0, 81.9, 77.0, 53.7, 91.3, 84.8, 69.4, 64.1, 82.7, 72.5, 92.5)),
)
_TABLE_B_5 = (
    ("linear", "SimCLR", (68.4, 90.6, 71.6, 37.4, 58.8, 50.3, 50.3, 80.5, 74.5, 83.6, 90.3, 91.2)),
    ("linear", "supervised", (72.3, 93.6, 78.3, 53.7, 61.9, 66.7, 61.0, 82.8, 74.9, 91.5, 94.5, 94.7)),
    ("finetune", "SimCLR", (88.2, 97.7, 85.9, 75.9, 63.5, 91.3, 88.1, 84.1, 73.2, 89.2, 92.1, 97.0)),
    ("finetune", "supervised", (88.3, 97.5, 86.4, 75.8, 64.3, 92.1, 86.0, 85.0, 74.6, 92.1, 93.3, 97.6)),
    ("scratch", "random", (86.9, 95.9, 80.2, 76.1, 53.6, 91.4, 85.9, 67.3, 64.8, 81.5, 72.6, 92.0)),
)

_FORMULAS = (
    ("NT-Xent", {"negative loss": "u'v+/t - log sum_{v in {v+, v-}} exp(u'v/t)",
                 "gradient by u": "(1 - exp(u'v+/t)/Z(u))/t v+ - sum_{v-} exp(u'v-/t)/Z(u)/t v-"}),
    ("NT-Logistic", {"negative loss": "log s(u'v+/t) + log s(-u'v-/t)",
                     "gradient by u": "s(-u'v+/t)/t v+ - s(u'v-/t)/t v-"}),
    ("Margin Triplet", {"negative loss": "-max(u'v- - u'v+ + m, 0)",
                        "gradient by u": "v+ - v- if u'v+ - u'v- < m else 0"}),
)
_DESIGNS = tuple((name, dict(zip(("augmentation", "encoder", "head", "loss", "batch", "epochs"), texts, strict=True)))
                 for name, *texts in (
    ("CPC v2", "custom", "ResNet-161 (modified)", "PixelCNN", "Xent", "512 (of patches)", "about 200"),
    ("AMDIM", "Fast AutoAugment", "custom ResNet", "non-linear MLP", "Xent with clipping, regularisation",
     "1008 (of patches)", "150"),
    ("CMC", "Fast AutoAugment", "ResNet-50 (2x, L+ab)", "linear", "Xent with l2 norm, temperature",
     "156 (memory bank)", "280"),
    ("MoCo", "crop, colour", "ResNet-50 (4x)", "linear", "Xent with l2 norm, temperature", "256 (memory bank)", "200"),
    ("PIRL", "crop, colour", "ResNet-50 (2x)", "linear", "Xent with l2 norm, temperature", "1024 (memory bank)", "800"),
    ("SimCLR", "crop, colour, blur", "ResNet-50 (4x)", "non-linear MLP", "Xent with l2 norm, temperature", "4096",
     "1000")))


STUDIES = {
    "pairs": Study(
        "Pairs of transformations", "Figure 5", "no single transformation suffices; crop with colour stands out",
        _pairs(), tuple(f"{first} {second}" for first in _CORNER for second in _CORNER)),
    "colour": Study(
        "Strength of colour distortion, contrastive", "Table 1", "stronger colour distortion helps, up to the default; "
        "AutoAugment does less", _colours((59.6, 61.0, 62.6, 63.2, 64.5, 61.1))),
    "colour_supervised": Study(
        "Strength of colour distortion, supervised", "Table 1", "stronger colour distortion does not help supervised "
        "training", _colours((77.0, 76.7, 76.5, 75.7, 75.4, 77.1), **_SUPERVISED),
        ("1/8", "1/2", "1 + blur", "AutoAugment")),
    "flip": Study("Random flips", "Appendix A", "helpful, not essential", (
        Cell("with", {}, _top_1(64.5)), Cell("without", dict(random_flip=False), _top_1(63.4)))),
    "broader": Study("Broader augmentation", "Appendix B.2", "Sobel, equalize, solarize and motion blur add a little",
                     _broader(), ("simclr (1x)", "broader (1x)")),
    "losses": Study("Losses", "Table 4", "semi-hard negatives help, and NT-Xent is far better", _LOSSES),
    "tuning": Study("Tuning of the other losses", "Appendix B.10", "the grids that Table 4's best were taken from",
                    _tuning(), (
        "margin 0.0, rate 0.1", "margin 1.6, rate 0.1", "NT-Logistic, temperature 0.2, rate 0.1",
        "NT-Logistic, temperature 1.0, rate 0.1")),
    "temperature": Study(
        "Temperature and l2 norm", "Table 5", "both matter; without the norm the task is solved better, and the "
        "representation is worse (entropy and contrastive accuracy are among 4096 images; at the small scale 256)",
        _temperatures()),
    "heads": Study(
        "Projection heads", "Figure 8", "nonlinear is better than linear (3 %), and much better than none (10 %); h is "
        "better than g(h) (10 %); the size does not matter", _heads(),
        ("none", "linear 128", "linear 512", "nonlinear 32", "nonlinear 128")),
    "probes": Study(
        "What h and g(h) know", "Table 3", "h tells transformations that g(h) has lost", _probes(),
        ("colour", "rotation", "sobel")),
    "batches": Study(
        "Batch size, epochs and learning-rate scaling", "Figure 9, Table B.1", "large batches help short training; "
        "square root scaling helps small batches", _batches(),
        tuple(f"{scaling} {batch}, {epochs} epochs" for scaling, batch, epochs in (
            ("sqrt", 512, 100), ("sqrt", 2048, 100), ("sqrt", 512, 400), ("sqrt", 2048, 400), ("linear", 512, 100),
            ("linear", 2048, 100)))),
    "networks": Study("Depth and width", "Figure 7", "larger networks are better",
                      _networks((18, 34, 50, 101, 152), (1, 2, 4)), ("ResNet-18 (1x)",), _networks((10,), (1, 2))),
    "cifar_temperature": Study(
        "Temperature and batch size on CIFAR-10", "Appendix B.9", "0.5 is best whatever the batch; 0.1 gains with "
        "larger ones",
        _cifar_temperatures(), tuple(f"temperature {t}, batch {batch}" for t in (0.1, 0.5) for batch in (1024, 2048))),
    "linear": Study("Linear evaluation", "Table 6, Figure 1", "SimCLR is better than all before it, and wider networks "
                    "more so", _linear(), (_network(1), _network(2)), cited=_LINEAR_CITED),
    "few_labels": Study("Few labels", "Table 7, Table B.4", "fine-tuning on few labels is far better than training on "
                        "them from scratch", _few_labels(_widths_after("linear"), _FEW),
                        tuple(f"{_network(width)}, {text}" for width in (1, 2) for text in ("1 %", "10 %")),
                        cited=_FEW_CITED),
    "few_labels_broader": Study(
        "Few labels after broader augmentation", "Table B.2", "a little better than without it; with all labels, wide "
        "networks gain from pretraining", _few_labels(
            _widths_after("broader", "broader ({}x)".format), _FEW_BROADER),
        tuple(f"{_network(1)}, {text}" for text in ("1 %", "10 %", "100 %")),
        cited=(("without broader augmentation, ResNet-50 (4x), 100 %", {"top-1": 80.1, "top-5": 95.2}),
               ("from scratch, ResNet-50 (4x), 100 %", {"top-1": 78.4, "top-5": 94.2}),
               ("from scratch, ResNet-50 (2x), 100 %", {"top-1": 77.8, "top-5": 93.9}))),
    "lengths": Study("Training for longer", "Figure B.2", "longer training is better, up to 3200 epochs", _lengths(),
                     tuple(f"{epochs} epochs" for epochs in (50, 100, 200, 400))),
    "few_labels_lengths": Study(
        "Few labels after training for longer", "Figure B.5", "almost linear in linear evaluation; few labels gain "
        "more from longer training", _few_labels([(f"{epochs} epochs", ("lengths", f"{epochs} epochs"), {})
                                             for epochs in _LENGTHS], _FEW_UNKNOWN),
        tuple(f"{epochs} epochs, {labels}" for labels in ("1 %", "10 %") for epochs in (50, 100, 200, 400))),
    "few_labels_networks": Study(
        "Few labels in other networks", "Figure B.6", "larger networks gain more from fine-tuning on few labels",
        _few_labels(_depths_and_widths((18, 34, 50, 101, 152), _WIDTHS), _FEW_UNKNOWN), (),
        _few_labels([*_depths_and_widths((10,), (1, 2)), *_depths_and_widths((18,), (1,))], _FEW_UNKNOWN)),
    "supervised_long": Study(
        "Supervised training for longer", "Table B.3", "neither longer training nor stronger augmentation helps "
        "supervised training much", _supervised_long(),
        tuple(f"{_network(1)}, {epochs} epochs, {name}" for epochs in (90, 500) for name in (
            "crop", "crop, colour", "crop, colour, blur"))),
    "transfer": Study("Transfer, ResNet-50 (4x)", "Table 8", "fine-tuned, SimCLR is better than supervised pretraining "
                      "on 5 data sets, equal on 5, worse on 2", _transfers(4, _TABLE_8), (), _small_transfers()),
    "transfer_1x": Study("Transfer, ResNet-50", "Table B.5", "supervised pretraining is better in this smaller network",
                         _transfers(1, _TABLE_B_5), ()),
    "cifar10": Study("CIFAR-10", "Appendix B.9", "SimCLR comes near supervised training", (
        Cell("SimCLR", {}, _top_1(94.0), recipe="cifar10_paper.cfg"),
        Cell("supervised", dict(train_mode="supervised", optimizer="momentum", learning_rate=0.1), _top_1(95.1),
             dict(train_epochs=12), "cifar10_paper.cfg", "study_small_supervised.cfg")),
        cited=(("AMDIM, 25 times as large", _top_1(91.2)),)),
    "formulas": Study("Losses and their gradients", "Table 2", "as text; `objective.py` has them, Table 4 compares "
                      "them", (), cited=_FORMULAS),
    "designs": Study("Design choices of other methods", "Table C.1", "as text", (), cited=_DESIGNS),
    "seeds": Study("The same run again", "not in the paper", "other seeds of the small scale's default; smaller "
                   "differences than theirs show nothing", (), (), tuple(
                       Cell(f"seed {seed}", dict(seed=seed)) for seed in (1, 2, 3))),
}


def find(name):
    """The names of the studies that a name, or the number of a table, a figure or an appendix, means.

    Raises `UserError`.
    """
    if name in STUDIES:
        return [name]
    for kind in ("", "Table ", "Figure ", "Appendix "):  # The first that there is: 1 is Table 1, not Figure 1.
        found = [key for key, study in STUDIES.items() if f"{kind}{name}" in study.source.split(", ")]
        if found:
            return found
    raise UserError(f"{name} is no table: name one of {', '.join(STUDIES)}, or its number in the paper, such as 1 or "
                    "B.1")


def cell_at(place):
    """The cell that (study, name of the cell) means."""
    study = STUDIES[place[0]]
    return next(cell for cell in (*study.cells, *study.small_only) if cell.name == place[1])
