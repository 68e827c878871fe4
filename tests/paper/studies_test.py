"""Checks that paper/numbers matches the paper's LaTeX source, and that studies have the right runs and settings."""

import csv
import itertools
import re

import pytest

from augmentation import policies
from paper import runner, studies
from paper.runner import Runner
from support import ROOT
from support.errors import rejects

PAPER = ROOT.parent / "shared/reference/paper.tex"
NUMBERS = ROOT / "paper/numbers"
# in the paper's order
TABLES = [f"table_{number}" for number in (*range(1, 9), "b1", "b2", "b3", "b4", "b5", "c1")]
SENTENCES = {
    "appendix_a": [r"evaluation drops from ([\d.]+)\\% to ([\d.]+)\\%"],
    "appendix_b2_linear": [
        r"broader data augmentations achieve " + r", ".join([r"([\d.]+) \(\+([\d.]+)\)"] * 3)
    ],
    "appendix_b2_all_labels": [
        r"It is ([\d.]+)\\% top-1 / ([\d.]+)\\% top-5 without broader",
        r"than that \(([\d.]+)\\% top-1 / ([\d.]+)\\% top-5\) of training from scratch",
        (
            r"\(2\$\\times\$\) is also better than training from scratch \(([\d.]+)\\% top-1 /"
            r" ([\d.]+)\\% top-5\)"
        ),
    ],
    "appendix_b8": [
        r"ResNet-50 baseline achieves ([\d.]+)\\% top-1 accuracy on ImageNet",
        r"baseline achieves ([\d.]+)\\%, vs.",
    ],
    "appendix_b9": [
        r"linear evaluation accuracy of ([\d.]+)\\%, compared to ([\d.]+)\\% from the supervised",
        r"is AMDIM~\\cite\{\w+\}, which achieves ([\d.]+)\\% with a model \$25\\times\$ larger",
    ],
}


@pytest.fixture(scope="module")
def paper():
    """Returns the LaTeX source of the paper, without comments."""
    if not PAPER.exists():
        pytest.skip(f"{PAPER} is missing")
    return re.sub(r"(?<!\\)%.*", "", PAPER.read_text(encoding="utf-8"))


def read_csv(name):
    """Returns all rows of a CSV file in paper/numbers, starting with the header row."""
    with open(NUMBERS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file, strict=True))


def without_spaces_and_braces(rows):
    return [[re.sub(r"[\s{}]", "", text) for text in row] for row in rows]


def plain(latex):
    """Converts LaTeX to plain text without spaces or braces."""
    # footnotes of Table C.1
    text = latex.replace(r"$^\#$", "(of patches)").replace("$^*$", "(memory bank)")
    commands = r"toprule|midrule|bottomrule|bm|text(bf|it)?|rotatebox\[origin=c\]\{0\}"
    text = re.sub(rf"\\({commands})(?![a-z])", "", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    symbols = {"^T": "'", "~": " ", r"\textbackslash": "\\"}
    symbols |= {r"\times": "x", r"\sim": "~", r"\ell_2": "l2"}
    for symbol, name in symbols.items():
        text = text.replace(symbol, name)
    text = re.sub(r"\\(tau|sigma|log|exp|max|sum|in)(?![a-z])", r"\1", text)
    return re.sub(r"[\s{}$^]|\\(?=[%{}])", "", text)


# number, format, and text with up to two levels of braces
ARGUMENTS = r"\{(\d+)\}\{[^{}]*\}\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"


def read_rows(latex):
    """Returns the rows of a LaTeX table as lists of plain text. Repeats cells that span multiple rows or columns."""
    rows, spanning = [], {}  # `spanning` maps columns to (remaining rows, text).
    for line in re.split(r"\\\\(?:\s*\[\d+pt\])?", latex):
        row = []
        for cell in line.split("&"):
            columns = 1
            if span := re.search(r"\\multicolumn" + ARGUMENTS, cell):
                columns, cell = span.groups()
            if span := re.search(r"\\multirow" + ARGUMENTS, cell):
                spanning[len(row)] = int(span[1]), plain(span[2])
            remaining, text = spanning.get(len(row), (0, ""))
            if remaining:
                spanning[len(row)] = remaining - 1, text
            row += [text if remaining else plain(cell)] * int(columns)
        rows += [row] if any(row) else []
    return rows


def read_tabular(latex):
    """Returns the rows of a LaTeX table in the format of the CSV files: one header row followed by the data rows."""
    header, body = map(read_rows, latex.split(r"\midrule", 1))
    titles = [
        ": ".join(dict.fromkeys(filter(None, column))) or "Method"
        for column in zip(*header, strict=True)
    ]
    rows, group = [], "-"
    for row in body:
        if len(set(row)) == 1:  # The row is a heading.
            group = row[0].removesuffix(":")
        else:
            rows.append([group, *row])
    if group == "-":
        return [titles, *(row[1:] for row in rows)]
    return [["Group", *titles], *rows]


def split_slashes(table):
    """Splits each cell of Table B.1 at the slash. The results are columns for linear and for square-root scaling."""
    (first, *epochs), *rows = table
    titles = [f"{number}:{scaling}" for number in epochs for scaling in ("linear", "sqrt")]
    numbers = [[name, *"/".join(cells).split("/")] for name, *cells in rows]
    return [[first.split("\\")[0], *titles], *numbers]


@pytest.mark.parametrize("number, name", list(enumerate(TABLES)), ids=TABLES)
def test_tables_match_the_papers_latex_source(number, name, paper):
    tabulars = re.findall(r"\\begin\{tabular\}.*?\\toprule(.*?)\\end\{tabular\}", paper, re.DOTALL)
    assert len(tabulars) == len(TABLES)
    table = read_tabular(tabulars[number])
    expected = split_slashes(table) if name == "table_b1" else table
    assert without_spaces_and_braces(read_csv(name)) == without_spaces_and_braces(expected)


@pytest.mark.parametrize("name", SENTENCES)
def test_numbers_from_the_papers_text_match_its_latex_source(name, paper):
    cells = itertools.chain(*read_csv(name))
    found = [re.search(pattern, paper).groups() for pattern in SENTENCES[name]]
    numbers = [cell for cell in cells if re.fullmatch(r"\d+\.\d+", cell)]
    assert numbers == [*itertools.chain(*found)]


def test_every_csv_file_is_compared_with_the_paper():
    # The other two files contain numbers from the README of the original.
    others = {"v1_published", "v2_published"}
    assert {path.stem for path in NUMBERS.glob("*.csv")} == {*TABLES, *SENTENCES} | others


# study: run: numbers
HAND_COPIED = """
color: AutoAugment: top-1 61.1
flip: without: top-1 63.4
broader: broader (2x): top-1 74.4
losses: margin, semi-hard: top-1 57.5
temperature: l2 norm, 0.5: entropy 8.2, contrastive accuracy 68.2, top-1 60.7
probes: rotation: majority baseline 25, h 67.6, g(h) 25.6
batches: sqrt 8192, 400 epochs: top-1 68.3
linear: ResNet-50 (2x): million parameters 94, top-1 74.2, top-5 92.0
few_labels: ResNet-50 (4x), 1 %: top-1 63.0, top-5 85.8
few_labels_broader: ResNet-50 (2x), 100 %: top-1 79.1, top-5 94.8
all_labels: without broader augmentation, ResNet-50 (4x): top-1 80.1, top-5 95.2
linear: supervised ResNet-50 (1x): top-1 76.5
networks: supervised ResNet-50 (2x): top-1 77.8
lengths: batch 8192, 800 epochs: top-1 69.1
supervised_long: ResNet-50 (4x), 500 epochs, crop, color: top-1 78.4
transfer: finetune, supervised, aircraft: mean per class 88.0
transfer_1x: scratch, random, voc2007: mAP 67.3
cifar10: supervised: top-1 95.1
published: simclrv1/pretrain/4x: top-1 76.6
published: simclrv2/finetuned_10pct/r152_3x_sk1: million parameters 795, top-1 80.1
published: simclrv2/supervised/r101_2x_sk0: million parameters 170, top-1 78.9
distillation: fine-tuned, 1 %: top-1 70.6
"""


def as_text(numbers):
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


@pytest.mark.parametrize("line", HAND_COPIED.strip().splitlines())
def test_results_from_the_paper_match_hand_copied_values(line):
    study, run, numbers = line.split(": ")
    assert as_text(studies.find_run((study, run)).paper) == numbers


def test_results_of_other_methods_are_cited():
    linear, few_labels = (studies.STUDIES[name].cited for name in ("linear", "few_labels"))
    assert len(linear) == len(few_labels) == 10
    expected = "million parameters 305, top-1 71.5, top-5 90.1"
    assert as_text(linear["CPC v2, ResNet-161"]) == expected
    # The paper prints a dash for top-5.
    assert as_text(linear["Local Agg., ResNet-50"]) == "million parameters 24, top-1 60.2"
    assert as_text(few_labels["UDA, ResNet-50"]) == "top-5, 10 % 88.5, top-1, 10 % 68.8"
    assert studies.STUDIES["cifar10"].cited == {"AMDIM, 25 times as large": {"top-1": 91.2}}


def test_every_table_of_the_paper_has_a_study():
    for name in TABLES:
        assert studies.find_studies(
            name.removeprefix("table_").replace("b", "B.").replace("c", "C.")
        )
    for source, names in {
        "1": "color color_supervised",
        "Figure 1": "linear",
        "9": "batches",
        "Figure B.1": "batches",
        "B.7": "cifar_batches",
        "B.9": "cifar_temperature cifar10",
    }.items():
        assert studies.find_studies(source) == names.split()
    with rejects("table=99: unknown table. Use one of pairs, "):
        studies.find_studies("99")


def configs_of(study):
    """Returns the configs of a study's runs at the paper's scale."""
    return [Runner("", "paper").config(run) for run in studies.STUDIES[study].runs]


def values(configs, *names):
    """Returns the set of all combinations of the given settings."""
    return {tuple(getattr(config, name) for name in names) for config in configs}


def test_pairs_study_is_a_7x7_grid_of_augmentations_on_one_branch():
    configs = configs_of("pairs")
    operators = ("crop", "cutout", "color", "sobel", "noise", "blur", "rotate")
    assert sorted(config.branch_operators for config in configs) == sorted(
        (tuple(dict.fromkeys(pair)), ()) for pair in itertools.product(operators, repeat=2)
    )
    assert not any(config.blurs_views for config in configs)


# Operators after the crop, as the paper describes them: studies, runs (regular expressions), operators.
# The first row that matches counts. The paper does not describe the supervised baseline on CIFAR-10.
AUGMENTATION = """
color|color_supervised: 1/8: flip, color 0.125
color|color_supervised: 1/4: flip, color 0.25
color|color_supervised: 1/2: flip, color 0.5
color|color_supervised: 1: flip, color 1
.*: .*AutoAugment: flip, autoaugment
linear: supervised.*1000 epochs: flip, color 1, blur
networks|linear|few_labels|all_labels|cifar10: (supervised|from scratch).*: flip
supervised_long: .*, crop: flip
supervised_long: .*, color: flip, color 1
cifar.*: .*: flip, color 0.5
few_labels.*|linear_ways|all_labels|distillation: (?!during|pretrained).*: flip
flip: without: color 1, blur
probes: rotation: flip, color 1, rotate, blur
probes: noise: flip, color 1, noise, blur
probes: sobel: flip, color 1, sobel, blur
broader: broader.*: flip, color 1, equalize, solarize, sobel, motion_blur, blur
.*: .*: flip, color 1, blur
"""


def test_runs_apply_the_operators_that_the_paper_describes():
    rows = [line.split(": ") for line in AUGMENTATION.split("\n")[1:-1]]
    for name, study in studies.STUDIES.items():
        for run in study.runs:
            if run.transfer or name == "pairs":
                continue
            config, operators = Runner("", "paper").config(run), []
            for operator in policies.view_policies(config)[0].operators:
                if operator.name == "color_jitter":
                    operators.append(f"color {operator.function.keywords['strength']:g}")
                elif operator.name != "grayscale":  # It follows each color jitter.
                    operators.append(operator.name)
            expected = next(
                text
                for study_names, runs, text in rows
                if re.fullmatch(study_names, name) and re.fullmatch(runs, run.name)
            )
            assert ", ".join(operators + ["blur"] * config.blurs_views) == expected, run.name


def test_losses_in_table_4_use_cross_view_negatives():
    assert values(configs_of("tuning"), "contrastive_loss", "semi_hard", "negatives") == {
        ("margin_triplet", False, "cross_view"),
        ("nt_logistic", False, "cross_view"),
        ("margin_triplet", True, "cross_view"),
        ("nt_logistic", True, "cross_view"),
        ("nt_xent", False, "cross_view"),
    }


def numbers_in(paper, pattern):
    """Searches the paper's text for a pattern. Returns one set of numbers for each group of the pattern."""
    return [
        set(map(float, re.findall(r"[\d.]+", text))) for text in re.search(pattern, paper).groups()
    ]


def test_linear_heads_evaluate_projections_at_the_papers_scale():
    configs = configs_of("heads")
    assert values(configs, "eval_protocol", "eval_projections") == {("linear_head", False)}
    sizes = [2**exponent for exponent in range(5, 12)]
    heads = set(itertools.product(("linear", "nonlinear"), sizes, (False, True)))
    assert heads | {("none", 128, False)} == values(
        configs, "proj_head_mode", "proj_out_dim", "linear_head_on_projections"
    )
    assert len(configs) == len(heads) + 1


def test_cifar_studies_have_the_settings_in_appendix_b9(paper):
    rates, temperatures, batches = numbers_in(
        paper,
        r"learning rate in \$\\\{(.+?)\\\}\$, temperature in \$\\\{(.+?)\\\}\$, "
        r"and batch size in \$\\\{(.+?)\\\}\$",
    )
    assert (len(rates), len(temperatures), len(batches)) == (3, 3, 5)
    (limit,) = numbers_in(paper, r"Training epochs \$\\le\$ (\d+)")[0]
    names = ("temperature", "train_batch_size", "learning_rate", "train_epochs")
    runs = values(configs_of("cifar_temperature"), *names)
    epochs = {run[3] for run in runs}
    assert min(epochs) <= limit < max(epochs)
    assert runs == set(itertools.product(temperatures, batches, rates, epochs))
    assert values(configs_of("cifar_batches"), *names) == {run for run in runs if run[0] == 0.5}


def test_lengths_study_has_the_same_limits_on_batch_size_and_epochs_as_the_paper(paper):
    (thousands,), (most,) = numbers_in(
        paper, r"larger batch size \(up to (\d+)K\) and longer \(up to (\d+) epochs\)"
    )
    (least,), (same,) = numbers_in(
        paper, r"using batch size of 4096\) are varied from (\d+) to (\d+)"
    )
    assert most == same
    configs = configs_of("lengths")
    batches, epochs = (values(configs, name) for name in ("train_batch_size", "train_epochs"))
    assert max(batches) == (1024 * thousands,)
    assert (min(epochs), max(epochs)) == ((least,), (most,))
    assert len(configs) == len(batches) * len(epochs)
    assert values(configs, "learning_rate_scaling", "learning_rate") == {("sqrt", 0.075)}


def test_other_losses_are_tuned_with_and_without_semi_hard_mining(paper):
    rates, margins, temperatures = numbers_in(
        paper,
        r"tune learning rate in \$\\\{(.+?)\\\}\$ for both loss functions. We further tune the"
        r" margin in "
        r"\$\\\{(.+?)\\\}\$ for margin loss, the temperature in \$\\\{(.+?)\\\}\$ for logistic"
        r" loss",
    )
    configs, mining = configs_of("tuning"), (False, True)
    margin, logistic, nt_xent = (
        [config for config in configs if config.contrastive_loss == loss]
        for loss in ("margin_triplet", "nt_logistic", "nt_xent")
    )
    # Semi-hard mining with a margin of 0 selects no negatives.
    runs = {run for run in itertools.product(mining, margins, rates) if run[:2] != (True, 0)}
    assert values(margin, "semi_hard", "margin", "learning_rate") == runs
    runs = {*itertools.product(mining, temperatures, rates)}
    assert values(logistic, "semi_hard", "temperature", "learning_rate") == runs
    assert len(nt_xent) == 20 and len(configs) == 2 * 5 * 8 - 5 + 20


def test_supervised_autoaugment_runs_include_the_numbers_of_epochs_in_the_footnote(paper):
    (first,), (second,) = numbers_in(
        paper, r"optimal test accuracy can be achieved between (\d+) and (\d+) epochs"
    )
    runs = values(configs_of("supervised_long"), "augmentation", "train_epochs")
    assert {("autoaugment", epochs) for epochs in (first, second, 90.0)} <= runs


def test_three_linear_evaluation_variants_have_the_settings_in_appendix_b6(paper):
    (rate,), (factor,), (epochs,) = numbers_in(
        paper,
        r"larger learning rate of ([\d.]+) \(following"
        r" \$\\mathrm\{LearningRate\}=([\d.]+).times.+?\) "
        r"and longer training of (\d+) epochs",
    )
    pretraining = runner.config_of(["--flagfile=paper/recipes/imagenet_paper.cfg"])
    momentum, *wider, lars, joint = configs_of("linear_ways")
    assert [config.replace(width_multiplier=1) for config in wider] == [momentum, momentum]
    assert (momentum.learning_rate, momentum.train_epochs) == (factor, epochs)
    assert momentum.learning_rate * momentum.train_batch_size / 256 == pytest.approx(rate)
    names = ("optimizer", "learning_rate", "learning_rate_scaling", "momentum", "weight_decay")
    assert len(values([lars, pretraining], *names, "warmup_epochs")) == 1
    names = ("train_mode", "fine_tune_after_block", "ft_proj_selector")
    assert values([momentum, lars], *names) == {("finetune", 4, 0)}
    assert joint == pretraining.replace(train_epochs=1000)


def test_figure_7_study_trains_each_network_with_and_without_labels():
    configs = configs_of("networks")
    networks = values(configs, "resnet_depth", "width_multiplier")
    assert len(networks) == 15
    runs = values(configs, "train_mode", "train_epochs", "resnet_depth", "width_multiplier")
    assert runs == {
        *(("supervised", 90, *network) for network in networks),
        *(("pretrain", 100, *network) for network in networks),
        *(("pretrain", 1000, 50, width) for width in (1, 2, 4)),
    }
    assert not any(config.color_jitter_strength for config in configs if not config.pretraining)


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_supervised_baselines_have_the_same_weight_decay(scale):
    runs = [run for study in studies.STUDIES.values() for run in study.runs_at(scale)]
    configs = [Runner("", scale).config(run) for run in runs if not run.transfer]
    baselines = [config for config in configs if config.train_mode == "supervised"]
    assert len(baselines) > 10 and values(baselines, "weight_decay") == {(1e-4,)}
