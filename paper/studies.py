"""The paper's studies: the runs behind its tables and figures, with their flags and the paper's results.

The results are read from the CSV files in paper/numbers/. The studies also cover results that
appear only in the paper's text.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from runtime.errors import UserError

_NUMBERS = pathlib.Path(__file__).with_name("numbers")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in a study: training with run.py, or transfer from another run's weights with `python -m transfer`.

    Attributes:
      name: name of the run.
      flags: flags that differ from the recipe, or the arguments of a transfer run.
      paper: dict mapping metrics to values as printed in the paper. Accuracies are in %.
      small_flags: additional flags at the small scale.
      recipe: recipe in paper/recipes for the paper's scale.
      small_recipe: recipe in paper/recipes for the small scale.
      starts_from: key of the run whose weights are passed as `--checkpoint` (see `find_run`), or
        None.
      transfer: command of `python -m transfer` (`linear`, `finetune` or `scratch`), or None for
        training with run.py.
      probe: name of the probe in `paper.probes` that is run on the trained network, or None.
      plot_columns: additional columns in the report's CSV file.
      seed: 1 for the run without an additional seed flag. See `with_seed`.
    """

    name: str
    flags: dict
    paper: dict = dataclasses.field(default_factory=dict)
    small_flags: dict = dataclasses.field(default_factory=dict)
    recipe: str = "imagenet_paper.cfg"
    small_recipe: str = "study_small.cfg"
    starts_from: tuple | None = None
    transfer: str | None = None
    probe: str | None = None
    plot_columns: dict = dataclasses.field(default_factory=dict)
    seed: int = 1

    @property
    def label(self) -> str:
        """The run's name and, except for seed 1, its seed."""
        return self.name if self.seed == 1 else f"{self.name}, seed {self.seed}"

    def with_seed(self, seed: int) -> Run:
        """Returns this run with another seed.

        If the run starts from the weights of another run, the returned run starts from the weights
        of that run with the new seed. Linear evaluation in transfer uses no random numbers, so it
        has no seed flag. Seed 1 denotes the unchanged run: the recipes of the small scale set
        --seed=1, those of the paper's scale set no seed, so it is random, and transfer runs use
        their default seed.
        """
        if seed == 1:
            return self
        return dataclasses.replace(
            self,
            seed=seed,
            flags={**self.flags, **({} if self.transfer == "linear" else dict(seed=seed))},
            starts_from=self.starts_from and (*self.starts_from, seed),
        )


@dataclasses.dataclass(frozen=True)
class Study:
    """A set of runs to compare. Most studies correspond to a table, a row of a table, or a figure in the paper.

    Attributes:
      title: title of the study in the report.
      source: comma-separated list of tables, figures and appendices in the paper.
      finding: the paper's finding, or the purpose of the runs.
      runs: runs at the paper's scale.
      small_names: names of the runs that also exist at the small scale, or None if all runs exist
        there.
      small_only: runs that exist only at the small scale.
      cited: rows in the paper's tables for which there are no runs, such as those of other methods.
        Each row is a pair of a name and a dict mapping metrics to numbers or text.
      plotted: names of columns for `paper.figures` in the report's CSV file, whose values are
        settings of the runs (see `paper.results`).
      averaged_over: names of the plotted columns to average over. The report shows means and
        standard deviations.
      shown: result columns that the report includes even though the paper does not report them.
      baseline: name of the run that the other runs are compared with, or a function that maps the
        name of a run to the name of its baseline run.
    """

    title: str
    source: str
    finding: str
    runs: tuple
    small_names: tuple | None = None
    small_only: tuple = ()
    cited: tuple = ()
    plotted: tuple = ()
    averaged_over: tuple = ()
    shown: tuple = ()
    baseline: str | Callable[[str], str] = ""

    def baseline_of(self, run: str) -> str | None:
        """Returns the name of the baseline run for `run`, or None if `run` has no baseline or is the baseline.

        The baseline run may not exist at the small scale.
        """
        name = self.baseline(run) if callable(self.baseline) else self.baseline
        return None if name == run else name or None

    def runs_at(self, scale: str) -> list[Run]:
        """Returns the runs for the given scale (`paper` or `small`)."""
        if scale == "paper":
            return list(self.runs)
        return [
            *self.small_only,
            *(run for run in self.runs if self.small_names is None or run.name in self.small_names),
        ]


def read_numbers(name: str) -> list[dict[str, Any]]:
    """Returns the rows of paper/numbers/<name>.csv as dicts that map column headers to numbers or text.

    Cells that contain "-" (a dash in the paper) are omitted.
    """
    rows = pd.read_csv(_NUMBERS / f"{name}.csv", na_values="-").to_dict("records")
    return [{header: value for header, value in row.items() if pd.notna(value)} for row in rows]


def _top_1(number: float) -> dict[str, float]:
    return {"top-1": number}


_SUPERVISED: dict[str, Any] = dict(
    recipe="imagenet_supervised.cfg", small_recipe="study_small_supervised.cfg"
)


def _color_strengths(method: str, **recipes: Any) -> tuple[Run, ...]:
    """Returns the runs for one row of Table 1: color distortion strengths, blur and AutoAugment."""
    (row,) = (row for row in read_numbers("table_1") if row["Methods"] == method)
    columns: list[tuple[str, str, dict[str, Any]]] = [
        (
            name,
            f"Color distortion strength: {name}",
            dict(color_jitter_strength=strength, use_blur=False),
        )
        for name, strength in {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}.items()
    ]
    columns += [
        (
            "1 + blur",
            "Color distortion strength: 1 (+Blur)",
            dict(color_jitter_strength=1.0, use_blur=True),
        ),
        ("AutoAugment", "AutoAug", dict(augmentation="autoaugment", use_blur=False)),
    ]
    return tuple(
        Run(name, flags, _top_1(row[header]), **recipes) for name, header, flags in columns
    )


_OPERATORS = ("crop", "cutout", "color", "sobel", "noise", "blur", "rotate")
_SMALL_OPERATORS = ("crop", "color", "sobel")


def _pairs() -> tuple[Run, ...]:
    """Returns the runs for Figure 5: one or two transformations, applied to only one branch."""
    return tuple(
        Run(
            f"{first} {second}",
            dict(augment_left=first if first == second else f"{first},{second}"),
            plot_columns=dict(first=first, second=second),
        )
        for first, second in itertools.product(_OPERATORS, _OPERATORS)
    )


def _flips() -> tuple[Run, ...]:
    """Returns the runs for Appendix A, with and without random flips."""
    flags = {"with": {}, "without": dict(random_flip=False)}
    return tuple(
        Run(row["Random flip"], flags[row["Random flip"]], _top_1(row["Top 1"]))
        for row in read_numbers("appendix_a")
    )


_WIDTHS = (1, 2, 4)


def _network(width: int, depth: int = 50) -> str:
    return f"ResNet-{depth} ({width}x)"


def _by_width(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns a dict mapping widths to rows for the three networks. The paper writes ResNet-50 for ResNet-50 (1x)."""
    rows_by_name = {row["Architecture"]: row for row in rows}
    return {
        width: rows_by_name["ResNet-50" if width == 1 else _network(width)] for width in _WIDTHS
    }


def _simclr_rows(name: str) -> dict[int, dict[str, Any]]:
    """Returns a dict mapping widths to SimCLR's rows in a table that compares methods."""
    return _by_width([row for row in read_numbers(name) if row["Method"] == "SimCLR (ours)"])


def _cited_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns a table's rows for methods other than SimCLR, as (label, row) pairs."""
    return [
        (f"{row['Method'].split(' (')[0]}, {row['Architecture'].removesuffix(' (*)')}", row)
        for row in read_numbers(name)
        if row["Method"] != "SimCLR (ours)"
    ]


def _broader() -> tuple[Run, ...]:
    """Returns the runs for Appendix B.2 and, for comparison, those for Table 6 (without broader augmentation)."""
    tables = {
        "simclr": _simclr_rows("table_6"),
        "broader": _by_width(read_numbers("appendix_b2_linear")),
    }
    return tuple(
        Run(
            f"{augmentation} ({width}x)",
            dict(train_epochs=1000, width_multiplier=width, augmentation=augmentation),
            _top_1(rows[width]["Top 1"]),
            dict(train_epochs=4),
        )
        for width in _WIDTHS
        for augmentation, rows in tables.items()
    )


_MARGIN: dict[str, Any] = dict(contrastive_loss="margin_triplet", negatives="cross_view")
_NT_LOGISTIC: dict[str, Any] = dict(contrastive_loss="nt_logistic", negatives="cross_view")


def _losses() -> tuple[Run, ...]:
    """Returns the runs for Table 4."""
    (row,) = read_numbers("table_4")
    columns: dict[str, tuple[str, dict[str, Any]]] = {
        "margin": ("Margin", _MARGIN),
        "NT-Logistic": ("NT-Logi.", dict(_NT_LOGISTIC, temperature=0.2)),
        "margin, semi-hard": ("Margin (sh)", dict(_MARGIN, semi_hard=True)),
        "NT-Logistic, semi-hard": (
            "NT-Logi. (sh)",
            dict(_NT_LOGISTIC, semi_hard=True, temperature=0.2),
        ),
        "NT-Xent": ("NT-Xent", dict(negatives="cross_view")),
    }
    # The paper tunes all losses. The temperature of study_small.cfg is too high for NT-Xent in
    # short training (see the study `temperature`), so the small scale uses the same temperature as
    # the paper's scale.
    small = {"NT-Xent": dict(temperature=0.1)}
    return tuple(
        Run(name, flags, _top_1(row[header]), small.get(name, {}))
        for name, (header, flags) in columns.items()
    )


def _tuning() -> tuple[Run, ...]:
    """Returns the runs for the grids in Appendix B.10: learning rate x margin, and learning rate x temperature.

    Table 4 also has results with semi-hard negative mining, so each grid exists with and without
    it. Mining with a margin of 0 selects no negatives.
    """
    rates, margins, temperatures = (
        (0.01, 0.1, 0.3, 0.5, 1.0),
        (0.0, 0.4, 0.8, 1.6),
        (0.1, 0.2, 0.5, 1.0),
    )
    runs = []
    for ending, mining in (("", {}), (", semi-hard", dict(semi_hard=True))):
        runs += [
            Run(
                f"margin {margin}, rate {rate}{ending}",
                dict(_MARGIN, margin=margin, learning_rate=rate, **mining),
            )
            for margin in margins
            if margin or not mining
            for rate in rates
        ]
        runs += [
            Run(
                f"NT-Logistic, temperature {temperature}, rate {rate}{ending}",
                dict(_NT_LOGISTIC, temperature=temperature, learning_rate=rate, **mining),
            )
            for temperature in temperatures
            for rate in rates
        ]
    return tuple(runs)


def _temperatures() -> tuple[Run, ...]:
    """Returns the runs for Table 5."""
    evaluation = dict(eval_protocol="linear_head,contrastive", eval_batch_size=4096)
    small = dict(eval_protocol="linear_head,lbfgs,contrastive", eval_batch_size=256)
    names = {"Yes": "l2 norm", "No": "no norm"}
    return tuple(
        Run(
            f"{names[row['l2 norm?']]}, {row['tau']:g}",
            dict(hidden_norm=row["l2 norm?"] == "Yes", temperature=row["tau"], **evaluation),
            {
                "entropy": row["Entropy"],
                "contrastive accuracy": row["Contrastive acc."],
                "top-1": row["Top 1"],
            },
            small,
        )
        for row in read_numbers("table_5")
    )


def _heads() -> tuple[Run, ...]:
    """Returns the runs for Figure 8: different projection heads and output dimensions.

    At the paper's scale, a linear classifier is trained on h in one run and on g(h) in another. At
    the small scale, both are evaluated with logistic regression in the same run.
    """

    def columns(mode, size, representation):
        return dict(head=mode, dimension=size, representation=representation)

    runs = [
        Run(
            "none",
            dict(proj_head_mode="none", eval_protocol="linear_head"),
            small_flags=dict(eval_protocol="lbfgs"),
            plot_columns=columns("none", None, "h"),
        )
    ]
    for mode, size in itertools.product(
        ("linear", "nonlinear"), (32, 64, 128, 256, 512, 1024, 2048)
    ):
        flags = dict(proj_head_mode=mode, proj_out_dim=size, eval_protocol="linear_head")
        runs += [
            Run(
                f"{mode} {size}",
                flags,
                small_flags=dict(eval_protocol="lbfgs", eval_projections=True),
                plot_columns=columns(mode, size, "h"),
            ),
            Run(
                f"{mode} {size}, g(h)",
                dict(flags, ft_proj_selector=-1),
                plot_columns=columns(mode, size, "g(h)"),
            ),
        ]
    return tuple(runs)


def _batches() -> tuple[Run, ...]:
    """Returns the runs for Figure 9 (top-1), Figure B.1 (top-5) and Table B.1.

    At the small scale, batch sizes are divided by 8, so linear and square-root scaling result in
    the same learning rate at batch size 512 instead of 4096.
    """
    runs = []
    for row, epochs, (scaling, rate) in itertools.product(
        read_numbers("table_b1"), (100, 200, 400, 800), (("linear", 0.3), ("sqrt", 0.075))
    ):
        batch = row["Batch size"]
        small = dict(train_batch_size=batch // 8, train_epochs=epochs // 50)
        if scaling == "linear":
            small["learning_rate"] = round(0.0375 * math.sqrt(512), 4)
        runs.append(
            Run(
                f"{scaling} {batch}, {epochs} epochs",
                dict(
                    train_batch_size=batch,
                    train_epochs=epochs,
                    learning_rate=rate,
                    learning_rate_scaling=scaling,
                ),
                _top_1(row[f"{epochs}: {scaling}"]),
                small,
            )
        )
    return tuple(runs)


def _networks(depths: Sequence[int], widths: Sequence[int]) -> tuple[Run, ...]:
    """Returns the runs for Figure 7: 100 epochs of pretraining, and 90 epochs of supervised training.

    The paper does not list the networks with supervised training, so the study includes such a run
    for each network.
    """
    scratch, runs = _from_scratch_numbers(), []
    for depth, width in itertools.product(depths, widths):
        network, flags = _network(width, depth), dict(resnet_depth=depth, width_multiplier=width)
        paper = _top_1(scratch[width]["top-1"]) if depth == 50 else {}
        runs += [Run(network, flags), Run(f"supervised {network}", flags, paper, **_SUPERVISED)]
    return tuple(runs)


def _long_networks() -> tuple[Run, ...]:
    """Returns the runs for Figure 7 with 1000 epochs of pretraining. Their results are also in Table 6."""
    return tuple(
        Run(
            f"{_network(width)}, 1000 epochs",
            dict(width_multiplier=width, train_epochs=1000),
            _top_1(row["Top 1"]),
        )
        for width, row in _simclr_rows("table_6").items()
    )


def _from_scratch_numbers() -> dict[int, dict[str, float]]:
    """Returns a dict that maps widths of ResNet-50 to results of supervised training with crops and flips."""
    # 90 epochs
    short = next(row for row in read_numbers("table_b3") if row["Model"] == "ResNet-50")
    return {
        1: _top_1(short["Top 1: Crop"]),
        **{width: _all_labels_numbers("from scratch", width) for width in (2, 4)},
    }


def _all_labels_numbers(training: str, width: int) -> dict[str, float]:
    """Returns the results for ResNet-50 of the given width, trained with all labels (text of Appendix B.2)."""
    return next(
        (
            {"top-1": row["Top 1"], "top-5": row["Top 5"]}
            for row in read_numbers("appendix_b2_all_labels")
            if (row["Training"], row["Architecture"]) == (training, _network(width))
        ),
        {},
    )


_CIFAR_COLUMNS = ("temperature", "batch_size", "learning_rate", "epochs", "training")
_CIFAR_RATES = (0.5, 1.0, 1.5)
_CIFAR_BATCHES = (256, 512, 1024, 2048, 4096)
# Our choice, since the paper distinguishes only between runs of up to 300 epochs and longer runs.
_CIFAR_EPOCHS = (100, 200, 300, 500, 1000)
_CIFAR_DEFAULT = (1.0, 1000)  # learning rate and number of epochs that the recipe sets


def _cifar_run(name: str, temperature: float, batch: int, rate: float, epochs: int) -> Run:
    """Returns a run for Figure B.7 or B.8."""
    flags: dict[str, float] = dict(temperature=temperature, train_batch_size=batch)
    small: dict[str, float] = dict(train_batch_size=batch // 8)
    if (rate, epochs) != _CIFAR_DEFAULT:
        flags |= dict(learning_rate=rate, train_epochs=epochs)
        # The small-scale recipe corresponds to the defaults at the paper's scale.
        small |= dict(learning_rate=round(rate / 10, 3), train_epochs=max(epochs // 250, 1))
    return Run(name, flags, small_flags=small, recipe="cifar10_paper.cfg")


def _cifar_temperatures() -> tuple[Run, ...]:
    """Returns the runs for Figure B.8: a grid of temperatures, batch sizes, learning rates and numbers of epochs."""
    return tuple(
        _cifar_run(
            f"temperature {temperature}, batch {batch}"
            + ("" if (rate, epochs) == _CIFAR_DEFAULT else f", rate {rate}, {epochs} epochs"),
            temperature,
            batch,
            rate,
            epochs,
        )
        for temperature, batch, rate, epochs in itertools.product(
            (0.1, 0.5, 1.0), _CIFAR_BATCHES, _CIFAR_RATES, _CIFAR_EPOCHS
        )
    )


def _cifar_batches() -> tuple[Run, ...]:
    """Returns the runs for Figure B.7: a grid of batch sizes, numbers of epochs and learning rates."""
    return tuple(
        _cifar_run(f"batch {batch}, {epochs} epochs, rate {rate}", 0.5, batch, rate, epochs)
        for batch, epochs, rate in itertools.product(_CIFAR_BATCHES, _CIFAR_EPOCHS, _CIFAR_RATES)
    )


def _cifar() -> tuple[Run, ...]:
    """Returns the runs for Appendix B.9 that compare SimCLR with supervised training on CIFAR-10."""
    simclr, supervised = (_top_1(row["Top 1"]) for row in read_numbers("appendix_b9")[:2])
    return (
        Run("SimCLR", {}, simclr, recipe="cifar10_paper.cfg"),
        # The paper does not describe the supervised baseline. Use the weight decay of
        # imagenet_supervised.cfg.
        Run(
            "supervised",
            dict(
                train_mode="supervised", optimizer="momentum", learning_rate=0.1, weight_decay=1e-4
            ),
            supervised,
            dict(train_epochs=12),
            "cifar10_paper.cfg",
            "study_small_supervised.cfg",
        ),
    )


def _probes() -> tuple[Run, ...]:
    """Returns the runs for Table 3: pretraining and one probe per row. g(h) has the same number of dimensions as h."""
    head = dict(num_proj_layers=2, proj_out_dim=2048)
    rows = {
        "Color vs grayscale": ("color", {}),
        "Rotation": ("rotation", dict(augment_extra="rotate")),
        "Orig. vs corrupted": ("noise", dict(augment_extra="noise")),
        "Orig. vs Sobel filtered": ("sobel", dict(augment_extra="sobel")),
    }
    runs = []
    for row in read_numbers("table_3"):
        name, flags = rows[row["What to predict?"]]
        paper = {
            "majority baseline": row["Random guess"],
            "h": row["Representation: h"],
            "g(h)": row["Representation: g(h)"],
        }
        runs.append(Run(name, {**head, **flags}, paper, dict(proj_out_dim=512), probe=name))
    return tuple(runs)


def _linear() -> tuple[Run, ...]:
    """Returns the runs for Table 6 (linear evaluation after 1000 epochs), and the supervised run for Figure 1."""
    return (
        *(
            Run(
                _network(width),
                dict(train_epochs=1000, width_multiplier=width),
                _linear_numbers(row),
                dict(train_epochs=4),
                plot_columns=dict(group="SimCLR"),
            )
            for width, row in _simclr_rows("table_6").items()
        ),
        Run(
            f"supervised {_network(1)}",
            {},
            _from_scratch_numbers()[1],
            **_SUPERVISED,
            plot_columns=dict(group="supervised"),
        ),
    )


def _linear_ways() -> tuple[Run, ...]:
    """Returns the runs that compare the three methods of linear evaluation in Appendix B.6.

    The result of the first run is also in Table 6. At the small scale, all three runs evaluate a
    linear head.
    """
    recipes: dict[str, Any] = dict(
        recipe="imagenet_linear.cfg",
        small_recipe="study_small_labels.cfg",
        starts_from=("linear", _network(1)),
    )
    small = dict(
        fine_tune_after_block=4,
        label_fraction=1.0,
        train_batch_size=128,
        train_epochs=6,
        learning_rate=0.1,
    )
    return (
        Run("momentum", {}, _linear_numbers(_simclr_rows("table_6")[1]), small, **recipes),
        Run(
            "LARS",
            dict(optimizer="lars", learning_rate=0.3, warmup_epochs=10, weight_decay=1e-6),
            {},
            dict(small, learning_rate_scaling="sqrt", warmup_epochs=0.5),
            **recipes,
        ),
        Run(
            "during pretraining",
            dict(train_epochs=1000),
            {},
            dict(train_epochs=4, eval_protocol="linear_head"),
        ),
    )


def _linear_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    headers = {"million parameters": "Param (M)", "top-1": "Top 1", "top-5": "Top 5"}
    return {measure: row[header] for measure, header in headers.items() if header in row}


# maps label fractions to pairs of small-scale flags and a recipe
_LABEL_FRACTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "1 %": (dict(label_fraction=0.01), "imagenet_1pct.cfg"),
    "10 %": (dict(label_fraction=0.1, train_batch_size=128, train_epochs=30), "imagenet_10pct.cfg"),
    "100 %": (
        dict(label_fraction=1.0, train_batch_size=128, train_epochs=6),
        "imagenet_100pct.cfg",
    ),
}
_FEW = ("1 %", "10 %")


def _few_labels(
    starts: Sequence[tuple[str, tuple[str, str], dict[str, Any]]],
    fractions: Iterable[str] = _FEW,
    tables: Mapping[str, Mapping[int, dict[str, Any]]] | None = None,
) -> tuple[Run, ...]:
    """Returns the runs that fine-tune pretrained networks on fractions of the labels.

    Args:
      starts: list of (name, key of the run that provides the weights, network flags).
      fractions: keys of `_LABEL_FRACTIONS`.
      tables: dict mapping metrics (top-1, top-5) to dicts that map widths to the paper's rows. Use
        None for figures, since the paper does not print their values.
    """
    return tuple(
        Run(
            f"{name}, {fraction}",
            flags,
            {
                measure: _few_labels_number(rows[flags["width_multiplier"]], fraction, measure)
                for measure, rows in (tables or {}).items()
            },
            *_LABEL_FRACTIONS[fraction],
            "study_small_labels.cfg",
            starts_from=start,
            plot_columns=dict(start=name, labels=fraction),
        )
        for fraction in fractions
        for name, start, flags in starts
    )


def _few_labels_number(row: Mapping[str, Any], fraction: str, measure: str) -> float | None:
    """Returns a table row's value for a label fraction and a metric (top-1 or top-5), or None if it is missing."""
    return row.get(
        f"Label fraction: {fraction.replace(' ', '')}: {measure.replace('-', ' ').capitalize()}"
    )


def _widths_after(
    study: str, name: Callable[[int], str] = _network
) -> list[tuple[str, tuple[str, str], dict[str, Any]]]:
    """Returns the argument `starts` of `_few_labels` for the ResNet-50 runs of a study at three widths."""
    return [
        (_network(width), (study, name(width)), dict(width_multiplier=width)) for width in _WIDTHS
    ]


_LENGTHS = (50, 100, 200, 400, 800, 1600, 3200)
_LENGTH_BATCHES = tuple(2**exponent for exponent in range(8, 16))  # 256 to 32,768


def _lengths() -> tuple[Run, ...]:
    """Returns the runs for Figure B.2: batch sizes and numbers of epochs, with square-root learning-rate scaling.

    The paper does not specify all values, so the study is a grid in which each value is twice the
    previous one. At the small scale, batch sizes are divided by 32, so that the default of 4096
    becomes 128. The results for 100 to 800 epochs are also in Table B.1.
    """
    table = {row["Batch size"]: row for row in read_numbers("table_b1")}
    runs = []
    for batch, epochs in itertools.product(_LENGTH_BATCHES, _LENGTHS):
        name, number = f"{epochs} epochs", table.get(batch, {}).get(f"{epochs}: sqrt")
        flags = dict(train_epochs=epochs, learning_rate=0.075, learning_rate_scaling="sqrt")
        small = dict(train_epochs=max(epochs // 50, 1), learning_rate=0.1)
        if batch != 4096:
            name = f"batch {batch}, {name}"
            flags = dict(train_batch_size=batch, **flags)
            small = dict(train_batch_size=batch // 32, **small)
        runs.append(Run(name, flags, {} if number is None else _top_1(number), small))
    return tuple(runs)


def _depths_and_widths(
    depths: Sequence[int], widths: Sequence[int]
) -> list[tuple[str, tuple[str, str], dict[str, Any]]]:
    """Returns the argument `starts` of `_few_labels` for runs in the study `networks`."""
    return [
        (
            _network(width, depth),
            ("networks", _network(width, depth)),
            dict(resnet_depth=depth, width_multiplier=width),
        )
        for depth in depths
        for width in widths
    ]


def _few_labels_cited() -> tuple[tuple[str, dict[str, float]], ...]:
    """Returns the results of other methods in Table 7 (top-5) and Table B.4 (top-1), as (name, dict) pairs."""
    cited = {}
    for table, measure in (("table_7", "top-5"), ("table_b4", "top-1")):
        for (name, row), fraction in itertools.product(_cited_rows(table), _FEW):
            if (number := _few_labels_number(row, fraction, measure)) is not None:
                cited.setdefault(name, {})[f"{measure}, {fraction}"] = number
    return tuple(cited.items())


def _supervised_long() -> tuple[Run, ...]:
    """Returns the runs for Table B.3: longer supervised training with SimCLR's augmentations, and with AutoAugment.

    A footnote says that AutoAugment is best "between 900 and 500 epochs"; 900 may be a typo for 90.
    """
    columns = {
        "crop": ("Crop", {}),
        "crop, color": ("+Color", dict(color_jitter_strength=1.0)),
        "crop, color, blur": ("+Color+Blur", dict(color_jitter_strength=1.0, use_blur=True)),
    }
    small_epochs = {90: 6, 500: 12, 900: 22, 1000: 24}
    widths, runs = {"ResNet-50": 1, "ResNet-50 (4x)": 4}, []
    for row, (name, (header, flags)) in itertools.product(
        read_numbers("table_b3"), columns.items()
    ):
        width, epochs = widths[row["Model"]], row["Training epochs"]
        runs.append(
            Run(
                f"{_network(width)}, {epochs} epochs, {name}",
                dict(width_multiplier=width, train_epochs=epochs, **flags),
                _top_1(row[f"Top 1: {header}"]),
                dict(train_epochs=small_epochs[epochs]),
                **_SUPERVISED,
            )
        )
    runs += [
        Run(
            f"{_network(1)}, {epochs} epochs, AutoAugment",
            dict(train_epochs=epochs, augmentation="autoaugment"),
            {},
            dict(train_epochs=small),
            **_SUPERVISED,
        )
        for epochs, small in small_epochs.items()
    ]
    return tuple(runs)


def _all_labels() -> tuple[Run, ...]:
    """Returns the runs for the results with all labels in the text of Appendix B.2.

    The runs are fine-tuning after pretraining without broader augmentation, and training from
    scratch. The paper's result for training a ResNet-50 from scratch is in Table B.3.
    """
    return (
        *(
            Run(
                f"without broader augmentation, {_network(width)}",
                dict(width_multiplier=width),
                _all_labels_numbers("without broader augmentation", width),
                *_LABEL_FRACTIONS["100 %"],
                "study_small_labels.cfg",
                starts_from=("linear", _network(width)),
            )
            for width in _WIDTHS
        ),
        *(
            Run(
                f"from scratch, {_network(width)}",
                dict(width_multiplier=width),
                numbers,
                dict(train_epochs=6),
                **_SUPERVISED,
            )
            for width, numbers in _from_scratch_numbers().items()
        ),
    )


_TASKS = {  # maps transfer tasks to column titles in Tables 8 and B.5
    "food101": "Food",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "birdsnap": "Birdsnap",
    "sun397": "SUN397",
    "cars": "Cars",
    "aircraft": "Aircraft",
    "voc2007": "VOC2007",
    "dtd": "DTD",
    "pets": "Pets",
    "caltech101": "Caltech-101",
    "flowers": "Flowers",
}
_TRANSFER_METRICS = {
    "voc2007": "mAP",
    **dict.fromkeys(("aircraft", "pets", "caltech101", "flowers"), "mean per class"),
}


def _transfers(width: int, table: str) -> tuple[Run, ...]:
    """Returns the runs for Table 8 or B.5."""
    encoders = {
        "SimCLR (ours)": ("SimCLR", ("linear", _network(width))),
        "Supervised": (
            "supervised",
            ("supervised_long", f"{_network(width)}, 1000 epochs, crop, color, blur"),
        ),
        # Only the architecture is used.
        "Random init": ("random", ("linear", _network(width))),
    }

    # TFDS does not contain these data sets.
    folders = {task: dict(dataset=f"folder:data/{task}") for task in ("birdsnap", "aircraft")}
    runs = []
    for row, (task, header) in itertools.product(read_numbers(table), _TASKS.items()):
        encoder, start = encoders[row["Method"]]
        command = (
            "linear"
            if row["Group"] == "Linear evaluation"
            else "scratch"
            if encoder == "random"
            else "finetune"
        )
        runs.append(
            Run(
                f"{command}, {encoder}, {task}",
                {"task": task, **folders.get(task, {})},
                {_TRANSFER_METRICS.get(task, "top-1"): row[header]},
                starts_from=start,
                transfer=command,
                plot_columns=dict(task=task, encoder=encoder, protocol=command),
            )
        )
    return tuple(runs)


_SMALL_SEARCH = dict(steps=150, learning_rates="0.01,0.1", weight_decays="0,0.0001", batch_size=64)


def _small_transfers() -> tuple[Run, ...]:
    """Returns the runs that transfer from CIFAR-10 to handwritten digits, with the default splits."""
    encoder = ("color", "1/2")
    return tuple(
        Run(
            f"{command}, {name}, digits",
            {},
            small_flags={"dataset": "digits", **search},
            starts_from=encoder,
            transfer=command,
            plot_columns=dict(task="digits", encoder=name, protocol=command),
        )
        for command, name, search in (
            ("linear", "SimCLR", {}),
            ("finetune", "SimCLR", _SMALL_SEARCH),
            ("scratch", "random", _SMALL_SEARCH),
        )
    )


def _named_rows(table: str, header: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns a table's rows as pairs: the value in the column `header`, and a dict of the other columns."""
    return tuple((row.pop(header), row) for row in read_numbers(table))


def _replace(pattern: str, replacement: str) -> Callable[[str], str]:
    """Returns a function that applies a regular-expression substitution to a run's name to get its baseline's name."""
    return lambda name: re.sub(pattern, replacement, name)


def _baseline_of_batch(name: str) -> str:
    """Returns the name of the baseline for a run.

    For linear scaling, the baseline is the corresponding run with square-root scaling. For other
    runs, it is the run with batch size 512.
    """
    return (
        name.replace("linear", "sqrt")
        if "linear" in name
        else re.sub(r"sqrt \d+", "sqrt 512", name)
    )


def _baseline_of_network(name: str) -> str:
    """Returns the name of a run's baseline run.

    The baseline is the same network pretrained for 100 epochs or, if the run is itself such a run,
    the smallest network.
    """
    same_network = name.removeprefix("supervised ").removesuffix(", 1000 epochs")
    return _network(1, 18) if same_network == name else same_network


def _baseline_of_transfer(name: str) -> str:
    """Returns the name of a run's baseline run.

    The baseline uses the supervised encoder. For transfer to digits, it is training from scratch.
    """
    if "digits" in name:
        return name.replace("finetune, SimCLR", "scratch, random")
    return name.replace("SimCLR", "supervised")


STUDIES = {
    "pairs": Study(
        "Pairs of transformations",
        "Figure 5",
        "no single transformation suffices; crop combined with color stands out",
        _pairs(),
        tuple(f"{first} {second}" for first in _SMALL_OPERATORS for second in _SMALL_OPERATORS),
        baseline="crop color",
    ),
    "color": Study(
        "Strength of color distortion, contrastive",
        "Table 1",
        "stronger color distortion helps, up to the default strength; AutoAugment helps less",
        _color_strengths("SimCLR"),
        baseline="1",
    ),
    "color_supervised": Study(
        "Strength of color distortion, supervised",
        "Table 1",
        "stronger color distortion does not help supervised training",
        _color_strengths("Supervised", **_SUPERVISED),
        ("1/8", "1/2", "1 + blur", "AutoAugment"),
        baseline="1/8",
    ),
    "flip": Study(
        "Random flips", "Appendix A", "flips help but are not essential", _flips(), baseline="with"
    ),
    "broader": Study(
        "Broader augmentation",
        "Appendix B.2",
        "Sobel, equalize, solarize and motion blur help a little",
        _broader(),
        ("simclr (1x)", "broader (1x)"),
        baseline=_replace("broader", "simclr"),
    ),
    "losses": Study(
        "Losses",
        "Table 4",
        "semi-hard negatives help the other losses, but NT-Xent is far better than all of them",
        _losses(),
        baseline="NT-Xent",
    ),
    "tuning": Study(
        "Tuning of the other losses",
        "Appendix B.10",
        "the paper tunes these losses on hyper-parameter grids; Table 4 shows the best runs",
        _tuning(),
        (
            "margin 0.0, rate 0.1",
            "margin 1.6, rate 0.1",
            "NT-Logistic, temperature 0.2, rate 0.1",
            "NT-Logistic, temperature 1.0, rate 0.1",
            "margin 0.4, rate 0.1",
            "margin 0.4, rate 0.1, semi-hard",
            "margin 1.6, rate 0.1, semi-hard",
            "NT-Logistic, temperature 0.2, rate 0.1, semi-hard",
            "NT-Logistic, temperature 1.0, rate 0.1, semi-hard",
        ),
        baseline=_replace(", semi-hard", ""),
    ),
    "temperature": Study(
        "Temperature and l2 normalization",
        "Table 5",
        "both matter; without normalization, contrastive accuracy is higher but the representation"
        " is worse (entropy and contrastive accuracy are computed on batches of 4096 images, or 256"
        " at the small scale)",
        _temperatures(),
        baseline="l2 norm, 0.1",
    ),
    "heads": Study(
        "Projection heads",
        "Figure 8",
        "a nonlinear head is better than a linear one (by 3 %) and much better than "
        "none (by 10 %); h is better than g(h) (by 10 %); the output dimension does not matter",
        _heads(),
        ("none", "linear 128", "linear 512", "nonlinear 32", "nonlinear 128"),
        baseline="nonlinear 128",
    ),
    "probes": Study(
        "Information in h and g(h)",
        "Table 3",
        "h retains information about the applied transformation; g(h) discards this information",
        _probes(),
        ("color", "rotation", "sobel"),
    ),
    "batches": Study(
        "Batch size, epochs and learning-rate scaling",
        "Figure 9, Figure B.1, Table B.1",
        "large batches help when training is short; square-root scaling helps with small batches",
        _batches(),
        tuple(
            f"{scaling} {batch}, {epochs} epochs"
            for scaling, epochs in (("sqrt", 100), ("sqrt", 400), ("linear", 100))
            for batch in (512, 2048)
        ),
        plotted=("scaling", "batch_size", "epochs"),
        shown=("top-5",),
        baseline=_baseline_of_batch,
    ),
    "networks": Study(
        "Depth and width",
        "Figure 7",
        "larger networks are better; the gap to supervised training shrinks with size",
        (*_networks((18, 34, 50, 101, 152), _WIDTHS), *_long_networks()),
        ("ResNet-18 (1x)", "supervised ResNet-18 (1x)"),
        _networks((10,), (1, 2)),
        plotted=("network", "group"),
        baseline=_baseline_of_network,
    ),
    "cifar_batches": Study(
        "Batch size and epochs on CIFAR-10",
        "Figure B.7",
        "as on ImageNet, training longer helps; the largest batch "
        "is slightly worse (averages over three learning rates)",
        _cifar_batches(),
        tuple(
            f"batch {batch}, {epochs} epochs, rate {rate}"
            for batch in (1024, 2048)
            for epochs in (500, 1000)
            for rate in _CIFAR_RATES
        ),
        plotted=_CIFAR_COLUMNS,
        averaged_over=("learning_rate",),
        baseline=_replace(r"batch \d+", "batch 1024"),
    ),
    "cifar_temperature": Study(
        "Temperature and batch size on CIFAR-10",
        "Figure B.8, Appendix B.9",
        "temperature 0.5 is best at every batch size; temperature 0.1 improves with larger batches"
        " (averages over learning rates and epochs)",
        _cifar_temperatures(),
        tuple(
            f"temperature {temperature}, batch {batch}{ending}"
            for temperature in (0.1, 0.5)
            for batch in (1024, 2048)
            for ending in ("", ", rate 0.5, 1000 epochs", ", rate 1.5, 1000 epochs")
        ),
        plotted=_CIFAR_COLUMNS,
        averaged_over=("learning_rate", "epochs"),
        baseline=_replace(r"temperature [\d.]+", "temperature 0.5"),
    ),
    "linear": Study(
        "Linear evaluation",
        "Table 6, Figure 1",
        "SimCLR outperforms earlier methods; wider networks are better still",
        _linear(),
        (_network(1), _network(2)),
        plotted=("network",),
        baseline=_network(1),
        cited=tuple((name, _linear_numbers(row)) for name, row in _cited_rows("table_6")),
    ),
    "linear_ways": Study(
        "Ways of linear evaluation",
        "Appendix B.6",
        "training a linear head on the frozen encoder, "
        "with momentum or LARS, or during pretraining, gives similar results",
        _linear_ways(),
        baseline="momentum",
    ),
    "few_labels": Study(
        "Few labels",
        "Table 7, Table B.4",
        "with few labels, fine-tuning is far better than training from scratch",
        _few_labels(
            _widths_after("linear"),
            tables={"top-1": _simclr_rows("table_b4"), "top-5": _simclr_rows("table_7")},
        ),
        tuple(f"{_network(width)}, {fraction}" for width in (1, 2) for fraction in _FEW),
        cited=_few_labels_cited(),
        baseline=_replace(r"\(\dx\)", "(1x)"),
    ),
    "few_labels_broader": Study(
        "Few labels after broader augmentation",
        "Table B.2",
        "accuracy is slightly higher than after the default "
        "augmentation; with all labels, pretraining helps wide networks",
        _few_labels(
            _widths_after("broader", "broader ({}x)".format),
            _LABEL_FRACTIONS,
            dict.fromkeys(("top-1", "top-5"), _by_width(read_numbers("table_b2"))),
        ),
        tuple(f"{_network(1)}, {fraction}" for fraction in _LABEL_FRACTIONS),
        baseline=_replace(r"\(\dx\)", "(1x)"),
    ),
    "all_labels": Study(
        "All labels",
        "Appendix B.2",
        "with all labels, fine-tuning wide networks is better than training from "
        "scratch; broader augmentation in pretraining (few_labels_broader) helps a little",
        _all_labels(),
        (f"without broader augmentation, {_network(1)}", f"from scratch, {_network(1)}"),
        baseline=_replace("without broader augmentation", "from scratch"),
    ),
    "lengths": Study(
        "Longer training and larger batches",
        "Figure B.2",
        "longer training is better, up to 3200 epochs; batches above 8192 do not help",
        _lengths(),
        (
            *(f"{epochs} epochs" for epochs in (50, 100, 200, 400)),
            *(
                f"batch {batch}, {epochs} epochs"
                for batch in (16384, 32768)
                for epochs in (100, 400)
            ),
        ),
        plotted=("batch_size", "epochs"),
        baseline=lambda name: re.sub(r"batch \d+, ", "", name) if "batch" in name else "100 epochs",
    ),
    "few_labels_lengths": Study(
        "Few labels after longer training",
        "Figure B.5",
        "accuracy after fine-tuning is almost linear in "
        "linear-evaluation accuracy; longer training helps more with fewer labels",
        _few_labels(
            [(f"{epochs} epochs", ("lengths", f"{epochs} epochs"), {}) for epochs in _LENGTHS]
        ),
        tuple(
            f"{epochs} epochs, {fraction}" for fraction in _FEW for epochs in (50, 100, 200, 400)
        ),
        baseline=_replace(r"^\d+ epochs", "100 epochs"),
    ),
    "few_labels_networks": Study(
        "Few labels with other networks",
        "Figure B.6",
        "larger networks benefit more from fine-tuning on few labels",
        _few_labels(_depths_and_widths((18, 34, 50, 101, 152), _WIDTHS)),
        (),
        _few_labels([*_depths_and_widths((10,), (1, 2)), *_depths_and_widths((18,), (1,))]),
        baseline=_replace(r"^.*(?=, \d+ %)", _network(1, 18)),
    ),
    "supervised_long": Study(
        "Longer supervised training",
        "Table B.3",
        "neither longer training nor stronger augmentation helps supervised training much",
        _supervised_long(),
        tuple(
            f"{_network(1)}, {epochs} epochs, {name}"
            for epochs in (90, 500)
            for name in ("crop", "crop, color", "crop, color, blur", "AutoAugment")
        ),
        baseline=_replace(r", \d+ epochs, .*", ", 90 epochs, crop"),
    ),
    "transfer": Study(
        "Transfer, ResNet-50 (4x)",
        "Table 8",
        "with fine-tuning, SimCLR is better than supervised "
        "pretraining on 5 data sets, equal on 5 and worse on 2",
        _transfers(4, "table_8"),
        (),
        _small_transfers(),
        baseline=_baseline_of_transfer,
    ),
    "transfer_1x": Study(
        "Transfer, ResNet-50",
        "Table B.5",
        "for this smaller network, supervised pretraining is better",
        _transfers(1, "table_b5"),
        (),
        baseline=_baseline_of_transfer,
    ),
    "cifar10": Study(
        "CIFAR-10",
        "Appendix B.9",
        "SimCLR nearly matches supervised training",
        _cifar(),
        baseline="supervised",
        cited=tuple(
            (row["Method"], _top_1(row["Top 1"])) for row in read_numbers("appendix_b9")[2:]
        ),
    ),
    "formulas": Study(
        "Losses and their gradients",
        "Table 2",
        "formulas, where u' is u transposed; objective.py "
        "implements these losses, and Table 4 compares them",
        (),
        cited=_named_rows("table_2", "Name"),
    ),
    "designs": Study(
        "Design choices of other methods",
        "Table C.1",
        "descriptions without numbers to compare",
        (),
        cited=_named_rows("table_c1", "Model"),
    ),
}


def find_studies(name: str) -> list[str]:
    """Returns the names of the studies that match a study name or the number of a table, figure or appendix.

    Raises:
      UserError: no study matches.
    """
    if name in STUDIES:
        return [name]
    for prefix in ("", "Table ", "Figure ", "Appendix "):
        # Tables come first, so "1" means Table 1, not Figure 1.
        matches = [
            key for key, study in STUDIES.items() if f"{prefix}{name}" in study.source.split(", ")
        ]
        if matches:
            return matches
    raise UserError(
        f"table={name}: unknown table. Use one of {', '.join(STUDIES)}, or the number of a table,"
        " figure or appendix in the paper, such as 1 or B.1."
    )


def find_run(key: tuple[str, str] | tuple[str, str, int]) -> Run:
    """Returns the run with the key (study name, run name) or (study name, run name, seed)."""
    study_name, run_name, *seed = key
    study = STUDIES[study_name]
    run = next(run for run in (*study.runs, *study.small_only) if run.name == run_name)
    return run.with_seed(*seed) if seed else run
