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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from runtime.errors import UserError
from transfer import tasks

# The paper's metrics that correspond to `runner.accuracy`.
MAIN_MEASURES = ("top-1", "mean per class", "mAP")
_NUMBERS = pathlib.Path(__file__).with_name("numbers")


def _dict_field() -> Any:
    """Returns the default of an attribute of a dataclass: a new, empty dict."""
    return dataclasses.field(default_factory=dict)


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
      best_of: (study, regular expression): the run takes the flags of that run of the study, with a
        matching name, that is the best with seed 1. All seeds of this run are then one higher.
      transfer: command of `python -m transfer` (`linear`, `finetune` or `scratch`), or None for
        training with run.py.
      probe: name of the probe in `paper.probes` that is run on the trained network, or None.
      plot_columns: additional columns in the report's CSV file.
      seed: 1 for the run without an additional seed flag. See `with_seed`.
    """

    name: str
    flags: dict
    paper: dict = _dict_field()
    small_flags: dict = _dict_field()
    recipe: str = "imagenet_paper.cfg"
    small_recipe: str = "study_small.cfg"
    starts_from: tuple | None = None
    best_of: tuple[str, str] | None = None
    transfer: str | None = None
    probe: str | None = None
    plot_columns: dict = _dict_field()
    seed: int = 1

    @property
    def label(self) -> str:
        """The run's name and, except for seed 1, its seed."""
        return self.name if self.seed == 1 else f"{self.name}, seed {self.seed}"

    @property
    def start(self) -> Run | None:
        """The run whose weights are passed as `--checkpoint`, or None."""
        return find_run(self.starts_from) if self.starts_from else None

    def with_seed(self, seed: int = 1) -> Run:
        """Returns this run with another seed.

        If the run starts from the weights of another run, the returned run starts from the weights
        of that run with the new seed. Linear evaluation in transfer uses no random numbers, so it
        has no seed flag. Seed 1 denotes the unchanged run: the recipes of the small scale set
        --seed=1, those of the paper's scale set no seed, so it is random, and transfer runs use
        their default seed.
        """
        if seed == 1 and not self.best_of:
            return self
        flags = dict(self.flags)
        if self.transfer != "linear":
            flags["seed"] = seed + 1 if self.best_of else seed
        start = self.starts_from and (*self.starts_from, seed)
        return dataclasses.replace(self, seed=seed, flags=flags, starts_from=start)


@dataclasses.dataclass(frozen=True)
class Study:
    """A set of runs to compare. Most studies correspond to a table, a row of a table, or a figure in the paper.

    Attributes:
      title: title of the study in the report.
      source: comma-separated list of tables, figures and appendices in the paper.
      finding: the paper's finding, or the purpose of the runs.
      runs: runs at the paper's scale.
      small_runs: regular expression for the names of the runs that also exist at the small scale.
      small_only: runs that exist only at the small scale.
      cited: rows in the paper's tables for which there are no runs, such as those of other methods:
        a dict mapping names to dicts that map metrics to numbers or text.
      plotted: names of columns for `paper.figures` in the report's CSV file, whose values are
        settings of the runs (see `paper.results`).
      averaged_over: names of the plotted columns to average over. The report shows means and
        standard deviations.
      shown: result columns that the report includes even though the paper does not report them.
      baseline: dict that gives the name of the run that a run is compared with. It maps regular
        expressions to replacements, and the first expression that occurs in the run's name is used.
    """

    title: str
    source: str
    finding: str
    runs: Sequence[Run]
    small_runs: str = ".*"
    small_only: Sequence[Run] = ()
    cited: Mapping[str, dict[str, Any]] = _dict_field()
    plotted: tuple = ()
    averaged_over: tuple = ()
    shown: tuple = ()
    baseline: Mapping[str, str] = _dict_field()

    def baseline_of(self, run: str) -> str:
        """Returns the name of the baseline run for `run`, or "" if `run` has no baseline or is the baseline.

        The baseline run may not exist at the small scale.
        """
        for pattern, replacement in self.baseline.items():
            name, count = re.subn(pattern, replacement, run)
            if count:
                return "" if name == run else name
        return ""

    def runs_at(self, scale: str) -> list[Run]:
        """Returns the runs for the given scale (`paper` or `small`)."""
        if scale == "paper":
            return list(self.runs)
        return [
            *self.small_only,
            *(run for run in self.runs if re.fullmatch(self.small_runs, run.name)),
        ]


def read_numbers(name: str) -> list[dict[str, Any]]:
    """Returns the rows of paper/numbers/<name>.csv as dicts that map column headers to numbers or text.

    Cells that contain "-" (a dash in the paper) are omitted.
    """
    rows = pd.read_csv(_NUMBERS / f"{name}.csv", na_values="-").to_dict("records")
    return [{header: value for header, value in row.items() if pd.notna(value)} for row in rows]


def _rows_by(header: str, table: str) -> dict[Any, dict[str, Any]]:
    """Returns a dict mapping the values in a table's column `header` to dicts of the other columns."""
    return {row.pop(header): row for row in read_numbers(table)}


def _top_1(number: float | None) -> dict[str, float]:
    return {} if number is None else {"top-1": number}


def _numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns a table row's number of parameters, top-1 and top-5 accuracy, as far as the table has them.

    The headers of these columns start with `prefix`.
    """
    headers = {"million parameters": "Param (M)", "top-1": "Top 1", "top-5": "Top 5"}
    return {
        measure: row[prefix + header]
        for measure, header in headers.items()
        if prefix + header in row
    }


_SUPERVISED: dict[str, Any] = dict(
    recipe="imagenet_supervised.cfg", small_recipe="study_small_supervised.cfg"
)


def _color_strengths(method: str, **recipes: Any) -> list[Run]:
    """Returns the runs for one row of Table 1: color distortion strengths, blur and AutoAugment."""
    strengths = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
    flags: dict[str, dict[str, Any]] = {
        name: dict(color_jitter_strength=strength, use_blur=False)
        for name, strength in strengths.items()
    }
    flags["1 + blur"] = dict(color_jitter_strength=1.0, use_blur=True)
    flags["AutoAugment"] = dict(augmentation="autoaugment", use_blur=False)
    numbers = _rows_by("Methods", "table_1")[method].values()  # in the order of `flags`
    return [
        Run(name, flags[name], _top_1(number), **recipes)
        for name, number in zip(flags, numbers, strict=True)
    ]


_OPERATORS = ("crop", "cutout", "color", "sobel", "noise", "blur", "rotate")


def _pairs() -> list[Run]:
    """Returns the runs for Figure 5: one or two transformations, applied to only one branch."""
    return [
        Run(
            f"{first} {second}",
            dict(
                augment_left=first if first == second else f"{first},{second}",
                eval_protocol="linear_head,contrastive",
            ),
            small_flags=dict(eval_protocol="linear_head,lbfgs,contrastive"),
            plot_columns=dict(first=first, second=second),
        )
        for first, second in itertools.product(_OPERATORS, _OPERATORS)
    ]


def _flips() -> list[Run]:
    """Returns the runs for Appendix A, with and without random flips."""
    flags = {"with": {}, "without": dict(random_flip=False)}
    return [
        Run(name, flags[name], _numbers_of(row))
        for name, row in _rows_by("Random flip", "appendix_a").items()
    ]


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


def _cited_rows(name: str) -> dict[str, dict[str, Any]]:
    """Returns a table's rows for methods other than SimCLR, keyed by method and architecture."""
    return {
        f"{row['Method'].split(' (')[0]}, {row['Architecture'].removesuffix(' (*)')}": row
        for row in read_numbers(name)
        if row["Method"] != "SimCLR (ours)"
    }


def _broader() -> list[Run]:
    """Returns the runs for Appendix B.2 and, for comparison, those for Table 6 (without broader augmentation)."""
    tables = {
        "simclr": _simclr_rows("table_6"),
        "broader": _by_width(read_numbers("appendix_b2_linear")),
    }
    return [
        Run(
            f"{augmentation} ({width}x)",
            dict(train_epochs=1000, width_multiplier=width, augmentation=augmentation),
            _top_1(rows[width]["Top 1"]),
            dict(train_epochs=4),
        )
        for width in _WIDTHS
        for augmentation, rows in tables.items()
    ]


_CROSS_VIEW: dict[str, Any] = dict(negatives="cross_view")
_MARGIN: dict[str, Any] = dict(contrastive_loss="margin_triplet", **_CROSS_VIEW)
_NT_LOGISTIC: dict[str, Any] = dict(contrastive_loss="nt_logistic", **_CROSS_VIEW)
_HELD_OUT = dict(train_split="train[10000:]", eval_split="train[:10000]")
_SMALL_HELD_OUT = dict(train_split="train[:20%]", eval_split="train[20%:40%]")


def _losses() -> Iterator[Run]:
    """Returns the runs for Table 4: for each loss, the best run of the grid in `_tuning`, with other seeds."""
    names = ("margin", "NT-Logistic", "margin, semi-hard", "NT-Logistic, semi-hard", "NT-Xent")
    (row,) = read_numbers("table_4")  # in the order of `names`
    for name, number in zip(names, row.values(), strict=True):
        loss, *mining = name.split(", ")
        pattern = ", ".join([rf"{loss}.*, rate [\d.]+", *mining])
        yield Run(
            name,
            dict(train_split="train", eval_split="validation"),
            _top_1(number),
            dict(train_split="train[:20%]", eval_split="test"),
            best_of=("tuning", pattern),
        ).with_seed()


def _tuning() -> list[Run]:
    """Returns the runs for the grids in Appendix B.10: learning rate x margin, and learning rate x temperature.

    Table 4 also has results with semi-hard negative mining, so each grid exists with and without
    it. Mining with a margin of 0 selects no negatives. The grid for NT-Xent is our choice. The runs
    are evaluated on training images that they are not trained on.
    """
    margins, temperatures = (0.0, 0.4, 0.8, 1.6), (0.1, 0.2, 0.5, 1.0)
    losses: dict[str, dict[str, Any]] = {
        f"margin {margin}": dict(_MARGIN, margin=margin) for margin in margins
    }
    losses |= {
        f"{name}, temperature {temperature}": dict(flags, temperature=temperature)
        for name, flags in (("NT-Logistic", _NT_LOGISTIC), ("NT-Xent", _CROSS_VIEW))
        for temperature in temperatures
    }
    return [
        Run(
            f"{name}, rate {rate}{ending}",
            dict(flags, learning_rate=rate, **mining, **_HELD_OUT),
            small_flags=_SMALL_HELD_OUT,
        )
        for ending, mining in (("", {}), (", semi-hard", dict(semi_hard=True)))
        for name, flags in losses.items()
        if not mining or (flags.get("margin") != 0 and "NT-Xent" not in name)
        for rate in (0.01, 0.1, 0.3, 0.5, 1.0)
    ]


def _temperatures() -> list[Run]:
    """Returns the runs for Table 5."""
    evaluation = dict(eval_protocol="linear_head,contrastive", eval_batch_size=4096)
    small = dict(eval_protocol="linear_head,lbfgs,contrastive", eval_batch_size=256)
    names = {"Yes": "l2 norm", "No": "no norm"}
    return [
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
    ]


def _heads() -> Iterator[Run]:
    """Returns the runs for Figure 8: different projection heads and output dimensions.

    At the paper's scale, a linear classifier is trained on h in one run and on g(h) in another. At
    the small scale, both are evaluated with logistic regression in the same run.
    """
    yield Run(
        "none",
        dict(proj_head_mode="none", eval_protocol="linear_head"),
        small_flags=dict(eval_protocol="lbfgs"),
        plot_columns=dict(head="none", dimension=None, representation="h"),
    )
    sizes = [2**exponent for exponent in range(5, 12)]  # 32 to 2048
    evaluations = (("h", "", {}), ("g(h)", ", g(h)", dict(ft_proj_selector=-1)))
    for mode, size, (representation, ending, selector) in itertools.product(
        ("linear", "nonlinear"), sizes, evaluations
    ):
        yield Run(
            f"{mode} {size}{ending}",
            dict(proj_head_mode=mode, proj_out_dim=size, eval_protocol="linear_head", **selector),
            small_flags=dict(eval_protocol="lbfgs", eval_projections=True),
            plot_columns=dict(head=mode, dimension=size, representation=representation),
        )


def _batches(lengths: Sequence[int] = (100, 200, 400, 800)) -> Iterator[Run]:
    """Returns the runs for Figure 9 (top-1), Figure B.1 (top-5) and Table B.1.

    By default, the numbers of epochs are those in Table B.1. At the small scale, batch sizes are
    divided by 8, so linear and square-root scaling result in the same learning rate at batch size
    512 instead of 4096.
    """
    for (batch, row), epochs, (scaling, rate) in itertools.product(
        _rows_by("Batch size", "table_b1").items(), lengths, (("linear", 0.3), ("sqrt", 0.075))
    ):
        small = dict(train_batch_size=batch // 8, train_epochs=epochs // 50)
        if scaling == "linear":
            small["learning_rate"] = round(0.0375 * math.sqrt(512), 4)
        yield Run(
            f"{scaling} {batch}, {epochs} epochs",
            dict(
                train_batch_size=batch,
                train_epochs=epochs,
                learning_rate=rate,
                learning_rate_scaling=scaling,
            ),
            _top_1(row.get(f"{epochs}: {scaling}")),
            small,
        )


def _grid(depths: Sequence[int], widths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns a dict mapping the names of networks to their flags."""
    return {
        _network(width, depth): dict(resnet_depth=depth, width_multiplier=width)
        for depth in depths
        for width in widths
    }


_LARGE_NETWORKS = _grid((18, 34, 50, 101, 152), _WIDTHS)
_SMALL_NETWORKS = _grid((10,), (1, 2))


def _networks(networks: Mapping[str, dict[str, Any]]) -> Iterator[Run]:
    """Returns the runs for Figure 7: 100 epochs of pretraining, and 90 epochs of supervised training.

    The paper does not list the networks with supervised training, so the study includes such a run
    for each network.
    """
    scratch = _from_scratch_numbers()
    for network, flags in networks.items():
        paper = {}
        if flags["resnet_depth"] == 50:
            paper = _top_1(scratch[flags["width_multiplier"]]["top-1"])
        yield Run(network, flags)
        yield Run(f"supervised {network}", flags, paper, **_SUPERVISED)


def _long_networks() -> list[Run]:
    """Returns the runs for Figure 7 with 1000 epochs of pretraining. Their results are also in Table 6."""
    return [
        Run(
            f"{_network(width)}, 1000 epochs",
            dict(width_multiplier=width, train_epochs=1000),
            _top_1(row["Top 1"]),
        )
        for width, row in _simclr_rows("table_6").items()
    ]


def _from_scratch_numbers() -> dict[int, dict[str, float]]:
    """Returns a dict that maps widths of ResNet-50 to results of supervised training with crops and flips."""
    return {
        1: _top_1(read_numbers("table_b3")[0]["Top 1: Crop"]),  # 90 epochs
        **{width: _all_labels_numbers("from scratch", width) for width in (2, 4)},
    }


def _all_labels_numbers(training: str, width: int) -> dict[str, float]:
    """Returns the results for ResNet-50 of the given width, trained with all labels (text of Appendix B.2)."""
    numbers = {
        (row["Training"], row["Architecture"]): _numbers_of(row)
        for row in read_numbers("appendix_b2_all_labels")
    }
    return numbers.get((training, _network(width)), {})


_HUNDREDS = range(100, 1001, 100)
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


def _cifar_temperatures() -> list[Run]:
    """Returns the runs for Figure B.8: a grid of temperatures, batch sizes, learning rates and numbers of epochs."""
    return [
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
    ]


def _cifar_batches(lengths: Sequence[int] = _CIFAR_EPOCHS) -> list[Run]:
    """Returns the runs for Figure B.7: a grid of batch sizes, numbers of epochs and learning rates."""
    return [
        _cifar_run(f"batch {batch}, {epochs} epochs, rate {rate}", 0.5, batch, rate, epochs)
        for batch, epochs, rate in itertools.product(_CIFAR_BATCHES, lengths, _CIFAR_RATES)
    ]


def _cifar() -> list[Run]:
    """Returns the runs for Appendix B.9 that compare SimCLR with supervised training on CIFAR-10."""
    simclr, supervised = map(_numbers_of, read_numbers("appendix_b9")[:2])
    return [
        Run("SimCLR", {}, simclr, recipe="cifar10_paper.cfg"),
        # The paper does not describe the supervised baseline. Use the weight decay and the crops and
        # flips of imagenet_supervised.cfg.
        Run(
            "supervised",
            dict(
                train_mode="supervised",
                optimizer="momentum",
                learning_rate=0.1,
                weight_decay=1e-4,
                color_jitter_strength=0,
            ),
            supervised,
            dict(train_epochs=12),
            "cifar10_paper.cfg",
            "study_small_supervised.cfg",
        ),
    ]


def _probes() -> list[Run]:
    """Returns the runs for Table 3: pretraining and one probe per row. g(h) has the same number of dimensions as h."""
    head = dict(num_proj_layers=2, proj_out_dim=2048)
    flags = {
        "color": {},
        "rotation": dict(augment_extra="rotate"),
        "noise": dict(augment_extra="noise"),
        "sobel": dict(augment_extra="sobel"),
    }
    # The rows are in the order of `flags`.
    rows = _rows_by("What to predict?", "table_3").values()
    return [
        Run(
            name,
            {**head, **flags[name]},
            dict(zip(("majority baseline", "h", "g(h)"), row.values(), strict=True)),
            dict(proj_out_dim=512),
            probe=name,
        )
        for name, row in zip(flags, rows, strict=True)
    ]


def _linear() -> list[Run]:
    """Returns the runs for Table 6 (linear evaluation), and the supervised runs for Figure 1 and Appendix B.8."""
    return [
        *(
            Run(
                _network(width),
                dict(train_epochs=1000, width_multiplier=width),
                _numbers_of(row),
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
        *(
            Run(
                f"supervised {_network(width)}, 1000 epochs",
                dict(
                    width_multiplier=width,
                    train_epochs=1000,
                    color_jitter_strength=1.0,
                    use_blur=True,
                ),
                _numbers_of(row),
                **_SUPERVISED,
            )
            for width, row in zip((1, 4), read_numbers("appendix_b8"), strict=True)
        ),
    ]


def _linear_ways() -> list[Run]:
    """Returns the runs that compare the three methods of linear evaluation in Appendix B.6.

    The results with momentum, for three widths, are also in Table 6. At the small scale, all runs
    evaluate a linear head.
    """
    recipes: dict[str, Any] = dict(
        recipe="imagenet_linear.cfg", small_recipe="study_small_labels.cfg"
    )
    small = dict(
        fine_tune_after_block=4,
        label_fraction=1.0,
        train_batch_size=128,
        train_epochs=6,
        learning_rate=0.1,
    )
    return [
        *(
            Run(
                "momentum" if width == 1 else f"momentum ({width}x)",
                dict(width_multiplier=width),
                _numbers_of(row),
                small,
                starts_from=("linear", _network(width)),
                **recipes,
            )
            for width, row in _simclr_rows("table_6").items()
        ),
        Run(
            "LARS",
            dict(optimizer="lars", learning_rate=0.3, warmup_epochs=10, weight_decay=1e-6),
            {},
            dict(small, learning_rate_scaling="sqrt", warmup_epochs=0.5),
            starts_from=("linear", _network(1)),
            **recipes,
        ),
        Run(
            "during pretraining",
            dict(train_epochs=1000),
            {},
            dict(train_epochs=4, eval_protocol="linear_head"),
        ),
    ]


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
# Random crops and flips, as in fine-tuning.
_FROM_SCRATCH: dict[str, Any] = dict(
    train_mode="supervised",
    zero_init_logits_layer=False,
    learning_rate=0.1,
    weight_decay=1e-4,
    color_jitter_strength=0,
    use_blur=False,
)


_WIDTH_FLAGS: dict[str, dict[str, Any]] = {
    _network(width): dict(width_multiplier=width) for width in _WIDTHS
}


def _few_labels(
    study: str,
    networks: Mapping[str, dict[str, Any]],
    fractions: Iterable[str] = _FEW,
    tables: Iterable[Mapping[int, dict[str, Any]]] = (),
    start: str = "ResNet-50",
) -> list[Run]:
    """Returns the runs that fine-tune pretrained networks on fractions of the labels.

    Args:
      study: study that provides the weights.
      networks: dict mapping names to network flags.
      fractions: keys of `_LABEL_FRACTIONS`.
      tables: dicts that map widths to the paper's rows. Empty for figures, since the paper does not
        print their values.
      start: text that replaces ResNet-50 in the names of the runs in `study`.
    """
    return [
        Run(
            f"{name}, {fraction}",
            flags,
            _numbers_for([rows[flags["width_multiplier"]] for rows in tables], fraction),
            *_LABEL_FRACTIONS[fraction],
            "study_small_labels.cfg",
            starts_from=(study, name.replace("ResNet-50", start)),
            plot_columns=dict(start=name, labels=fraction),
        )
        for fraction in fractions
        for name, flags in networks.items()
    ]


def _few_labels_from_scratch() -> Iterator[Run]:
    """Returns the runs of the supervised baseline in Tables 7 and B.4.

    Its results are from Zhai et al. 2019 (arXiv:1905.03670). As there, it is trained for 1000
    epochs on 1 % of the labels and for 200 epochs on 10 %; the other settings are our choice.
    """
    for fraction, epochs in zip(_FEW, (1000, 200), strict=True):
        small, recipe = _LABEL_FRACTIONS[fraction]
        yield Run(
            f"from scratch, {_network(1)}, {fraction}",
            dict(_FROM_SCRATCH, train_epochs=epochs),
            _numbers_for([read_numbers(table)[0] for table in ("table_b4", "table_7")], fraction),
            dict(train_epochs=60) | small,
            recipe,
            "study_small_labels.cfg",
        )


def _scratch_lengths() -> list[Run]:
    """Returns the runs that show how long networks must be trained from scratch on few labels at the small scale."""
    lengths = {"1 %": (60, 300, 1000, 3000), "10 %": (30, 100, 200, 600)}
    return [
        Run(
            f"ResNet-{depth}, {fraction}, {epochs} epochs",
            dict(_FROM_SCRATCH, resnet_depth=depth),
            small_flags=_LABEL_FRACTIONS[fraction][0] | dict(train_epochs=epochs),
            small_recipe="study_small_labels.cfg",
        )
        for depth in (10, 18)
        for fraction, numbers in lengths.items()
        for epochs in numbers
    ]


def _numbers_for(rows: Iterable[Mapping[str, Any]], fraction: str) -> dict[str, float]:
    """Returns the accuracies for a label fraction in rows of several tables, as far as the tables have them."""
    numbers = {}
    for row in rows:
        numbers |= _numbers_of(row, f"Label fraction: {fraction.replace(' ', '')}: ")
    return numbers


_LENGTHS = (50, 100, 200, 400, 800, 1600, 3200)


def _lengths() -> Iterator[Run]:
    """Returns the runs for Figure B.2: batch sizes and numbers of epochs, with square-root learning-rate scaling.

    The paper does not specify all values, so the study is a grid in which each value is twice the
    previous one. At the small scale, batch sizes are divided by 32, so that the default of 4096
    becomes 128. The results for 100 to 800 epochs are also in Table B.1.
    """
    table = _rows_by("Batch size", "table_b1")
    sizes = [2**exponent for exponent in range(8, 16)]  # 256 to 32,768
    for batch, epochs in itertools.product(sizes, _LENGTHS):
        name = f"{epochs} epochs"
        number = table.get(batch, {}).get(f"{epochs}: sqrt")
        flags = dict(train_epochs=epochs, learning_rate=0.075, learning_rate_scaling="sqrt")
        small = dict(train_epochs=max(epochs // 50, 1), learning_rate=0.1)
        if batch != 4096:
            name = f"batch {batch}, {name}"
            flags = dict(train_batch_size=batch, **flags)
            small = dict(train_batch_size=batch // 32, **small)
        yield Run(name, flags, _top_1(number), small)


def _few_labels_cited() -> dict[str, dict[str, float]]:
    """Returns the results of other methods in Table 7 (top-5) and Table B.4 (top-1), keyed by name."""
    cited = {}
    for table in ("table_7", "table_b4"):
        for (name, row), fraction in itertools.product(_cited_rows(table).items(), _FEW):
            for measure, number in _numbers_for([row], fraction).items():
                cited.setdefault(name, {})[f"{measure}, {fraction}"] = number
    return cited


def _supervised_long() -> Iterator[Run]:
    """Returns the runs for Table B.3: longer supervised training with SimCLR's augmentations, and with AutoAugment.

    A footnote says that AutoAugment is best "between 900 and 500 epochs"; 900 may be a typo for 90.
    """
    augmentations = {  # in the order of the columns
        "crop": {},
        "crop, color": dict(color_jitter_strength=1.0),
        "crop, color, blur": dict(color_jitter_strength=1.0, use_blur=True),
    }
    small_epochs = {90: 6, 500: 12, 900: 22, 1000: 24}
    for model, epochs, *numbers in map(dict.values, read_numbers("table_b3")):
        width = 1 if model == "ResNet-50" else 4
        for (name, flags), number in zip(augmentations.items(), numbers, strict=True):
            yield Run(
                f"{_network(width)}, {epochs} epochs, {name}",
                dict(width_multiplier=width, train_epochs=epochs, **flags),
                _top_1(number),
                dict(train_epochs=small_epochs[epochs]),
                **_SUPERVISED,
            )
    for epochs, small in small_epochs.items():
        yield Run(
            f"{_network(1)}, {epochs} epochs, AutoAugment",
            dict(train_epochs=epochs, augmentation="autoaugment"),
            {},
            dict(train_epochs=small),
            **_SUPERVISED,
        )


def _all_labels() -> list[Run]:
    """Returns the runs for the results with all labels in the text of Appendix B.2.

    The runs are fine-tuning after pretraining without broader augmentation, and training from
    scratch. The paper's result for training a ResNet-50 from scratch is in Table B.3.
    """
    return [
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
    ]


def _distillation() -> Iterator[Run]:
    """Returns the runs for the three steps of SimCLR v2.

    The network is a ResNet-50 (2x+SK) or, at the small scale, a ResNet-18. The smaller student is a
    ResNet-50 or a ResNet-10.
    """
    large: dict[str, Any] = dict(width_multiplier=2, sk_ratio=0.0625)
    small: dict[str, Any] = dict(width_multiplier=1, sk_ratio=0.0, resnet_depth=18)
    head: dict[str, Any] = dict(num_proj_layers=3)
    numbers = _rows_by("Network", "v2_published")["r50_2x_sk1"]
    yield Run("pretrained", large, _top_1(numbers["Linear"]), {**small, **head}, "imagenet_v2.cfg")
    for fraction in _FEW:
        fine_tuned, distilled = f"fine-tuned, {fraction}", f"self-distilled, {fraction}"
        yield Run(
            fine_tuned,
            dict(large, learning_rate=0.002),
            _top_1(numbers[fraction.replace(" ", "")]),
            {
                **_LABEL_FRACTIONS[fraction][0],
                **small,
                **head,
                "ft_proj_selector": 1,
                "learning_rate": 0.05,
            },
            f"imagenet_v2_{fraction.replace(' %', 'pct')}.cfg",
            "study_small_labels.cfg",
            starts_from=("distillation", "pretrained"),
        )
        for name, flags, small_flags, teacher in (
            (distilled, dict(large, distill_temperature=0.1), small, fine_tuned),
            (f"smaller student, {fraction}", {}, {}, distilled),
        ):
            yield Run(
                name,
                flags,
                {},
                small_flags,
                "imagenet_v2_distill.cfg",
                "study_small_distill.cfg",
                starts_from=("distillation", teacher),
            )


def _cifar10_long() -> Iterator[Run]:
    """Returns the runs with a ResNet-18 that is pretrained for 100 epochs, fine-tuned, and distilled.

    For comparison, the same network is trained from random weights on the same labels.
    """
    study = "cifar10_long"
    bfloat16: dict[str, Any] = dict(precision="mixed_bfloat16")
    flags = dict(bfloat16, train_epochs=100, eval_baselines=True)
    yield Run("pretrained", flags, small_recipe="cifar10_small.cfg")
    ten_percent: dict[str, Any] = dict(label_fraction=0.1, train_batch_size=256, train_epochs=30)
    subsets = {f"1 %, subset {seed}": dict(label_seed=seed) for seed in range(3)}
    for labels, flags in {**subsets, "10 %": ten_percent}.items():
        settings, recipe = flags | bfloat16, "cifar10_small_labels.cfg"
        yield Run(
            f"fine-tuned, {labels}",
            settings,
            small_recipe=recipe,
            starts_from=(study, "pretrained"),
        )
        yield Run(f"from scratch, {labels}", settings | _FROM_SCRATCH, small_recipe=recipe)
    student = dict(bfloat16, train_split="train", resnet_depth=18, distill_temperature=0.1)
    for labels in ("1 %, subset 0", "10 %"):
        yield Run(
            f"self-distilled, {labels}",
            student,
            small_recipe="study_small_distill.cfg",
            starts_from=(study, f"fine-tuned, {labels}"),
        )
    flags = settings | _FROM_SCRATCH | dict(label_fraction=1.0)
    yield Run("from scratch, all labels", flags, small_recipe=recipe)


# tables, columns with the accuracies, and folders of the networks
_PUBLISHED = (
    ("v2_published", "1%", "simclrv2/finetuned_1pct"),
    ("v2_published", "10%", "simclrv2/finetuned_10pct"),
    ("v2_published", "100%", "simclrv2/finetuned_100pct"),
    ("v2_published", "Linear", "simclrv2/pretrained"),
    ("v2_published", "Supervised", "simclrv2/supervised"),
    ("v1_published", "Linear", "simclrv1/pretrain"),
)


def _published() -> Iterator[Run]:
    """Returns the evaluations of the networks that the authors published, whose accuracies their README states."""
    for table, column, folder in _PUBLISHED:
        for row in read_numbers(table):
            path = f"{folder}/{row['Network']}"
            numbers = _numbers_of({**row, "Top 1": row[column]})
            yield Run(path, dict(checkpoint=path), numbers, {}, "published.cfg")


_TRANSFER_METRICS = dict(zip(tasks.METRICS, MAIN_MEASURES, strict=True))


def _transfers(width: int, table: str) -> Iterator[Run]:
    """Returns the runs for Table 8 or B.5, and those for the comparison with 90 epochs in the text of B.8."""
    encoders = {
        "SimCLR (ours)": ("SimCLR", ("linear", _network(width)), "finetune"),
        "Supervised": (
            "supervised",
            ("supervised_long", f"{_network(width)}, 1000 epochs, crop, color, blur"),
            "finetune",
        ),
        "90 epochs": (
            "supervised for 90 epochs",
            ("supervised_long", f"{_network(width)}, 90 epochs, crop"),
            "linear",
        ),
        # Only the architecture is used.
        "Random init": ("random", ("linear", _network(width)), "scratch"),
    }
    # The text states no numbers for the encoder that is trained for 90 epochs.
    without_numbers = dict(group="", method="90 epochs", **dict.fromkeys(tasks.TASKS))
    for group, method, *numbers in map(dict.values, [*read_numbers(table), without_numbers]):
        encoder, start, command = encoders[method]
        if group == "Linear evaluation":
            command = "linear"
        # The columns are in the order of `TASKS`.
        for (name, task), number in zip(tasks.TASKS.items(), numbers, strict=True):
            folder = {} if task.dataset else dict(dataset=f"folder:data/{name}")
            yield Run(
                f"{command}, {encoder}, {name}",
                {"task": name, **folder},
                {_TRANSFER_METRICS[task.metric]: number} if number else {},
                starts_from=start,
                transfer=command,
                plot_columns=dict(task=name, encoder=encoder, protocol=command),
            )


_SMALL_SEARCH = dict(steps=150, learning_rates="0.01,0.1", weight_decays="0,0.0001", batch_size=64)


def _small_transfers() -> list[Run]:
    """Returns the runs that transfer from CIFAR-10 to handwritten digits, with the default splits."""
    return [
        Run(
            f"{command}, {name}, digits",
            {},
            small_flags={"dataset": "digits", **search},
            starts_from=("color", "1/2"),
            transfer=command,
            plot_columns=dict(task="digits", encoder=name, protocol=command),
        )
        for command, name, search in (
            ("linear", "SimCLR", {}),
            ("finetune", "SimCLR", _SMALL_SEARCH),
            ("scratch", "random", _SMALL_SEARCH),
        )
    ]


_BATCH_COLUMNS: dict[str, Any] = dict(
    plotted=("scaling", "batch_size", "epochs"),
    shown=("top-5",),
    baseline={"linear": "sqrt", r"sqrt \d+": "sqrt 512"},
)

# Transfer with SimCLR is compared with the supervised encoder, and for digits with training from scratch.
_TRANSFER_BASELINE = {
    "finetune, SimCLR(?=, digits)": "scratch, random",
    "SimCLR(?!, digits)|supervised for 90 epochs": "supervised",
}

STUDIES = {
    "pairs": Study(
        "Pairs of transformations",
        "Figure 5",
        "no single transformation suffices; crop combined with color stands out",
        _pairs(),
        r"(crop|color|sobel) (crop|color|sobel)",
        baseline={".+": "crop color"},
    ),
    "color": Study(
        "Strength of color distortion, contrastive",
        "Table 1",
        "stronger color distortion helps, up to the default strength; AutoAugment helps less",
        _color_strengths("SimCLR"),
        baseline={".+": "1"},
    ),
    "color_supervised": Study(
        "Strength of color distortion, supervised",
        "Table 1",
        "stronger color distortion does not help supervised training",
        _color_strengths("Supervised", **_SUPERVISED),
        r"1/8|1/2|1 \+ blur|AutoAugment",
        baseline={".+": "1/8"},
    ),
    "flip": Study(
        "Random flips",
        "Appendix A",
        "flips help but are not essential",
        _flips(),
        baseline={".+": "with"},
    ),
    "broader": Study(
        "Broader augmentation",
        "Appendix B.2",
        "Sobel, equalize, solarize and motion blur help a little",
        _broader(),
        r".* \(1x\)",
        baseline={"broader": "simclr"},
    ),
    "losses": Study(
        "Losses",
        "Table 4",
        "semi-hard negatives help the other losses, but NT-Xent is far better than all of them",
        [*_losses()],
        baseline={".+": "NT-Xent"},
    ),
    "tuning": Study(
        "Tuning of the losses",
        "Appendix B.10",
        "the paper tunes the losses on hyper-parameter grids; Table 4 shows the best runs (here, the"
        " accuracies are those of training images that the runs are not trained on)",
        _tuning(),
        r"(margin (0.4|0.8|1.6)|NT-.*, temperature (0.1|0.2|0.5)), rate 0.[13](, semi-hard)?",
        baseline={", semi-hard": ""},
    ),
    "temperature": Study(
        "Temperature and l2 normalization",
        "Table 5",
        "both matter; without normalization, contrastive accuracy is higher but the representation"
        " is worse (entropy and contrastive accuracy are computed on batches of 4096 images, or 256"
        " at the small scale)",
        _temperatures(),
        baseline={".+": "l2 norm, 0.1"},
    ),
    "heads": Study(
        "Projection heads",
        "Figure 8",
        "a nonlinear head is better than a linear one (by 3 %) and much better than "
        "none (by 10 %); h is better than g(h) (by 10 %); the output dimension does not matter",
        [*_heads()],
        r"none|linear (128|512)|nonlinear (32|128)",
        baseline={".+": "nonlinear 128"},
    ),
    "probes": Study(
        "Information in h and g(h)",
        "Table 3",
        "h retains information about the applied transformation; g(h) discards this information",
        _probes(),
    ),
    "batches": Study(
        "Batch size, epochs and learning-rate scaling",
        "Figure 9, Figure B.1, Table B.1",
        "large batches help when training is short; square-root scaling helps with small batches",
        [*_batches()],
        r"(sqrt|linear) (512|2048), (100|400) epochs",
        **_BATCH_COLUMNS,
    ),
    "batches_hundreds": Study(
        "Batch size, every 100 epochs",
        "Figures 9 and B.1 (finer)",
        "the comparison in `batches`, with 100, 200, ..., 1000 epochs",
        [*_batches(_HUNDREDS)],
        "",
        **_BATCH_COLUMNS,
    ),
    "networks": Study(
        "Depth and width",
        "Figure 7",
        "larger networks are better; the gap to supervised training shrinks with size",
        [*_networks(_LARGE_NETWORKS), *_long_networks()],
        r"(supervised )?ResNet-18 \(1x\)",
        [*_networks(_SMALL_NETWORKS)],
        plotted=("network", "group"),
        # the same network pretrained for 100 epochs or, for these runs, the smallest network
        baseline={"supervised |, 1000 epochs": "", ".+": _network(1, 18)},
    ),
    "cifar_batches": Study(
        "Batch size and epochs on CIFAR-10",
        "Figure B.7",
        "as on ImageNet, training longer helps; the largest batch "
        "is slightly worse (averages over three learning rates)",
        _cifar_batches(),
        r"batch (1024|2048), (500|1000) epochs, .*",
        plotted=_CIFAR_COLUMNS,
        averaged_over=("learning_rate",),
        baseline={r"batch \d+": "batch 1024"},
    ),
    "cifar_hundreds": Study(
        "Batch size on CIFAR-10, every 100 epochs",
        "Figure B.7 (finer)",
        "the comparison in `cifar_batches`, with 100, 200, ..., 1000 epochs",
        _cifar_batches(_HUNDREDS),
        "",
        plotted=_CIFAR_COLUMNS,
        averaged_over=("learning_rate",),
        baseline={r"batch \d+": "batch 1024"},
    ),
    "cifar_temperature": Study(
        "Temperature and batch size on CIFAR-10",
        "Figure B.8, Appendix B.9",
        "after more than 300 epochs, temperature 0.5 is best at every batch size; temperature 0.1"
        " improves with larger batches (averages over learning rates and epochs)",
        _cifar_temperatures(),
        r"temperature 0.[15], batch (1024|2048)(, rate (0.5|1.5), 1000 epochs)?",
        plotted=_CIFAR_COLUMNS,
        averaged_over=("learning_rate", "epochs"),
        baseline={r"temperature [\d.]+": "temperature 0.5"},
    ),
    "linear": Study(
        "Linear evaluation",
        "Table 6, Figure 1",
        "SimCLR outperforms earlier methods; wider networks are better still",
        _linear(),
        r"ResNet-50 \([12]x\)",
        plotted=("network",),
        baseline={".+": _network(1)},
        cited={name: _numbers_of(row) for name, row in _cited_rows("table_6").items()},
    ),
    "linear_ways": Study(
        "Ways of linear evaluation",
        "Appendix B.6",
        "training a linear head on the frozen encoder, "
        "with momentum or LARS, or during pretraining, gives similar results",
        _linear_ways(),
        r"momentum( \(2x\))?|LARS|during pretraining",
        baseline={".+": "momentum"},
    ),
    "few_labels": Study(
        "Few labels",
        "Table 7, Table B.4",
        "with few labels, fine-tuning is far better than training from scratch",
        [
            *_few_labels(
                "linear", _WIDTH_FLAGS, tables=[_simclr_rows("table_b4"), _simclr_rows("table_7")]
            ),
            *_few_labels_from_scratch(),
        ],
        r".*ResNet-50 \([12]x\), .*",
        cited=_few_labels_cited(),
        baseline={"from scratch, ": "", r"\(\dx\)": "(1x)"},
    ),
    "scratch_lengths": Study(
        "Length of training from scratch on few labels",
        "baselines of Table 7",
        "small data sets need many epochs: the baselines that the paper cites have 1000 epochs with"
        " 1 % of the labels, and 200 with 10 %",
        (),
        small_only=_scratch_lengths(),
        plotted=("epochs",),
        baseline={r"1 %, \d+": "1 %, 1000", r"10 %, \d+": "10 %, 200"},
    ),
    "few_labels_broader": Study(
        "Few labels after broader augmentation",
        "Table B.2",
        "accuracy is slightly higher than after the default "
        "augmentation; with all labels, pretraining helps wide networks",
        _few_labels(
            "broader",
            _WIDTH_FLAGS,
            _LABEL_FRACTIONS,
            [_by_width(read_numbers("table_b2"))],
            start="broader",
        ),
        r"ResNet-50 \(1x\), .*",
        baseline={r"\(\dx\)": "(1x)"},
    ),
    "all_labels": Study(
        "All labels",
        "Appendix B.2",
        "with all labels, fine-tuning wide networks is better than training from "
        "scratch; broader augmentation in pretraining (few_labels_broader) helps a little",
        _all_labels(),
        r".*, ResNet-50 \(1x\)",
        baseline={"without broader augmentation": "from scratch"},
    ),
    "lengths": Study(
        "Longer training and larger batches",
        "Figure B.2",
        "longer training is better, up to 3200 epochs; batches above 8192 do not help",
        [*_lengths()],
        r"(50|100|200|400) epochs|batch (8192|16384|32768), 400 epochs",
        plotted=("batch_size", "epochs"),
        baseline={r"batch \d+, ": "", ".+": "100 epochs"},
    ),
    "few_labels_lengths": Study(
        "Few labels after longer training",
        "Figure B.5",
        "accuracy after fine-tuning is almost linear in "
        "linear-evaluation accuracy; longer training helps more with fewer labels",
        _few_labels("lengths", {f"{epochs} epochs": {} for epochs in _LENGTHS}),
        r"(50|100|200|400) epochs, .*",
        baseline={r"^\d+ epochs": "100 epochs"},
    ),
    "few_labels_networks": Study(
        "Few labels with other networks",
        "Figure B.6",
        "linear evaluation and fine-tuning for networks of different depths and widths",
        _few_labels("networks", _LARGE_NETWORKS),
        r"ResNet-18 \(1x\), .*",
        _few_labels("networks", _SMALL_NETWORKS),
        baseline={r"^.*(?=, \d+ %)": _network(1, 18)},
    ),
    "supervised_long": Study(
        "Longer supervised training",
        "Table B.3",
        "neither longer training nor stronger augmentation helps supervised training much",
        [*_supervised_long()],
        r"ResNet-50 \(1x\), (90|500) epochs, .*",
        baseline={r", \d+ epochs, .*": ", 90 epochs, crop"},
    ),
    "transfer": Study(
        "Transfer, ResNet-50 (4x)",
        "Table 8",
        "with fine-tuning, SimCLR is better than supervised "
        "pretraining on 5 data sets, equal on 5 and worse on 2",
        [*_transfers(4, "table_8")],
        "",
        _small_transfers(),
        baseline=_TRANSFER_BASELINE,
    ),
    "transfer_1x": Study(
        "Transfer, ResNet-50",
        "Table B.5",
        "for this smaller network, supervised pretraining is better",
        [*_transfers(1, "table_b5")],
        "",
        baseline=_TRANSFER_BASELINE,
    ),
    "cifar10": Study(
        "CIFAR-10",
        "Appendix B.9",
        "SimCLR nearly matches supervised training",
        _cifar(),
        baseline={".+": "supervised"},
        cited={row["Method"]: _numbers_of(row) for row in read_numbers("appendix_b9")[2:]},
    ),
    "distillation": Study(
        "Distillation",
        "SimCLR v2",
        "distillation on unlabeled images improves the fine-tuned network, and a smaller student is"
        " almost as accurate",
        [*_distillation()],
        small_only=[
            dataclasses.replace(
                run,
                name=run.name.replace(_network(1), "ResNet-18"),
                flags=dict(run.flags, resnet_depth=18),
            )
            for run in _few_labels_from_scratch()
        ],
        baseline={r"^[^,]*(?=, \d+ %)": "fine-tuned"},
    ),
    "cifar10_long": Study(
        "100 epochs on CIFAR-10 (ResNet-18)",
        "docs/results.md",
        "evaluations of an encoder that was pretrained for longer than those of the other studies",
        (),
        small_only=[*_cifar10_long()],
        baseline={"^[^,]*(?=,)": "from scratch"},
    ),
    "published": Study(
        "The authors' published networks",
        "README of the original",
        "accuracies that the README states",
        [*_published()],
        "",
        baseline={r"r\d+_\dx_sk\d": "r50_1x_sk0", r"\dx$": "1x"},
    ),
    "formulas": Study(
        "Losses and their gradients",
        "Table 2",
        "formulas, where u' is u transposed; objective.py "
        "implements these losses, and Table 4 compares them",
        (),
        cited=_rows_by("Name", "table_2"),
    ),
    "designs": Study(
        "Design choices of other methods",
        "Table C.1",
        "descriptions without numbers to compare",
        (),
        cited=_rows_by("Model", "table_c1"),
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
    return run.with_seed(*seed)
