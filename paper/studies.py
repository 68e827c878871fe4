"""The paper's studies as grids of runs: what is switched, the paper's numbers, and the commands.

    python -m paper.studies list
    python -m paper.studies show STUDY
    python -m paper.studies commands STUDY [--scale=small]
    python -m paper.studies run [STUDY...] [--dir=runs/studies] [--flags='--data_dir=DIR']
    python -m paper.studies report [STUDY...] [--dir=runs/studies]

`run` takes the small scale, which two CPU cores can do, cell after cell; what is finished is not run again, and what
was interrupted is resumed. `report` prints Markdown tables, and writes the results as CSV to --dir.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys

import config as config_lib
import progress
import stopping
from config import UserError

_RECIPES = "paper/recipes"
_STOPPED = {stopping.STATUS, *(status for number in (signal.SIGINT, signal.SIGTERM)
                               for status in (128 + number, -number))}
_OURS = {"mode", "model_dir", "eval_name", "flagfile"}  # flags that decide where results are
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LBFGS, TOP_1 = "eval/lbfgs_top_1_accuracy", "eval/label_top_1_accuracy"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str
    flags: dict  # what differs from the recipe
    paper: dict = dataclasses.field(default_factory=dict)  # measure -> number as printed, accuracies in %
    small: dict = dataclasses.field(default_factory=dict)  # what differs at the small scale besides
    recipe: str = "imagenet_paper.cfg"
    small_recipe: str = "study_small.cfg"
    probes: tuple = ()  # of `paper.probes`, to be asked of the result
    data: dict = dataclasses.field(default_factory=dict)  # for `paper.figures`: columns of the report's CSV file


@dataclasses.dataclass(frozen=True)
class Study:
    """Runs that are compared."""

    title: str
    source: str  # where it stands in the paper
    finding: str  # of the paper; or what the runs are for
    cells: tuple
    small_names: tuple | None = None  # those of the small scale, too; None: all
    small_only: tuple = ()  # cells of the small scale alone

    def small_cells(self):
        """The cells of the small scale."""
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
    rows = (("colour", {}, 99.3, 97.4), ("rotation", dict(augment_extra="rotate"), 67.6, 25.6),
            ("noise", dict(augment_extra="noise"), 99.5, 59.6), ("sobel", dict(augment_extra="sobel"), 96.6, 56.3))
    return tuple(Cell(name, {**head, **extra}, {"h": h, "g(h)": z}, small=dict(proj_out_dim=512), probes=(name,))
                 for name, extra, h, z in rows)


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
    "broader": Study("Broader augmentation", "B.2", "Sobel, equalize, solarize and motion blur add a little",
                     _broader(), ("simclr (1x)", "broader (1x)")),
    "losses": Study("Losses", "Table 4", "semi-hard negatives help, and NT-Xent is far better", _LOSSES),
    "tuning": Study("Tuning of the other losses", "B.10", "the grids that Table 4's best were taken from", _tuning(), (
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
        "Batch size, epochs and learning-rate scaling", "Figure 9, B.1", "large batches help short training; square "
        "root scaling helps small batches", _batches(),
        tuple(f"{scaling} {batch}, {epochs} epochs" for scaling, batch, epochs in (
            ("sqrt", 512, 100), ("sqrt", 2048, 100), ("sqrt", 512, 400), ("sqrt", 2048, 400), ("linear", 512, 100),
            ("linear", 2048, 100)))),
    "networks": Study("Depth and width", "Figure 7", "larger networks are better",
                      _networks((18, 34, 50, 101, 152), (1, 2, 4)), ("ResNet-18 (1x)",), _networks((10,), (1, 2))),
    "cifar_temperature": Study(
        "Temperature and batch size on CIFAR-10", "B.9", "0.5 is best whatever the batch; 0.1 gains with larger ones",
        _cifar_temperatures(), tuple(f"temperature {t}, batch {batch}" for t in (0.1, 0.5) for batch in (1024, 2048))),
    "seeds": Study("The same run again", "not in the paper", "other seeds of the small scale's default; smaller "
                   "differences than theirs show nothing", (), (), tuple(
                       Cell(f"seed {seed}", dict(seed=seed)) for seed in (1, 2, 3))),
}


def study_named(name):
    """The `Study` of that name. Raises `UserError`."""
    if name not in STUDIES:
        raise UserError(f"{name} is no study: name one of {', '.join(STUDIES)}")
    return STUDIES[name]


def _as_text(name, value):
    """A flag as one types it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value}"


def arguments(cell, small):
    """The arguments of run.py for a cell, without --model_dir."""
    settings = {**cell.flags, **(cell.small if small else {})}
    recipe = cell.small_recipe if small else cell.recipe
    return [f"--flagfile={_RECIPES}/{recipe}", *(_as_text(name, value) for name, value in settings.items())]


def slug(name):
    """A name as that of a directory."""
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


# ------------------------------------------------------------------------------------------------------------- runs


def directory_of(base, study, cell):
    """Where a cell's run lies."""
    return os.path.join(base, study, slug(cell.name))


def read_done(directory):
    """What `run_cell` noted of a finished run; None before that."""
    import metrics  # Here, and below: TensorFlow takes a while, and the other commands do without.

    return metrics.read_json(os.path.join(directory, "done.json"))


def _finished(base):
    """What was noted of all finished runs below a directory: (`Config`, probes) -> dict."""
    found = {}
    for place in (directory_of(base, name, cell) for name, study in STUDIES.items() for cell in study.small_cells()):
        if done := read_done(place):
            with contextlib.suppress(UserError):  # Flags of another version: no cell of this one is the same run.
                found[config_of(done["arguments"]), tuple(done["probes"])] = done
    return found


def run_cell(cell, directory, more=(), finished=None):
    """Runs a cell in a process of its own, unless it is done; what it prints goes to run.log.

    Args:
      cell, directory: what and where.
      more: further arguments of run.py.
      finished: `_finished`, in which a run of another study may be the same one, and is taken.

    Returns:
      dict: `arguments`, `seconds` (of the last start to its end), `results` of run.py and `probes`.

    Raises:
      UserError: the run has failed, or was done with other arguments.
      stopping.Stopped: the run was stopped; the same call goes on from there.
    """
    import metrics

    wanted, done = [*arguments(cell, small=True), *more], read_done(directory)
    if done is not None:
        if config_of(done["arguments"]) != config_of(wanted):
            raise UserError(f"{directory} was run with other flags ({' '.join(done['arguments'])}): remove it, or give "
                            "another --dir")
        return done
    os.makedirs(directory, exist_ok=True)
    same = (finished or {}).get((config_of(wanted), cell.probes))
    if same is not None:
        done = {**same, "arguments": wanted}
        metrics.write_json(os.path.join(directory, "done.json"), done)
        return done
    elapsed = progress.stopwatch()
    _call([sys.executable, os.path.join(_ROOT, "run.py"), *wanted, f"--model_dir={os.path.abspath(directory)}"],
          directory)
    with open(os.path.join(directory, "result.json"), encoding="utf-8") as file:
        results = json.load(file)
    done = dict(arguments=wanted, seconds=round(elapsed()), results=results, probes={},
                million_parameters=count_parameters(directory) / 1e6)
    if cell.probes:
        out = os.path.abspath(os.path.join(directory, "probes.json"))
        _call([sys.executable, *probe_arguments(cell, config_of(wanted), os.path.abspath(directory)), f"--out={out}"],
              directory)
        with open(out, encoding="utf-8") as file:
            done["probes"] = json.load(file)
    metrics.write_json(os.path.join(directory, "done.json"), done)
    return done


def config_of(wanted):
    """The `Config` of arguments of run.py."""
    return config_lib.from_arguments(
        [argument.replace(f"={_RECIPES}/", f"={_ROOT}/{_RECIPES}/") for argument in wanted])


def probe_arguments(cell, config, checkpoint):
    """What asks a cell's probes of its checkpoint: arguments of Python."""
    places = [f"--data_dir={config.data_dir}"] if config.data_dir else []
    places += ["--follow_links"] if config.follow_links else []
    return ["-m", "paper.probes", f"--checkpoint={checkpoint}", f"--dataset={config.dataset}",
            f"--probes={','.join(cell.probes)}", f"--train_split={config.train_split}",
            f"--test_split={config.eval_split}", *([f"--flags={shlex.join(places)}"] if places else [])]


def count_parameters(directory):
    """Weights of the encoder in a run's newest checkpoint, the moving statistics of batch norm left out."""
    import tensorflow as tf

    variables = tf.train.list_variables(tf.train.latest_checkpoint(directory))
    return sum(math.prod(shape) for name, shape in variables if name.startswith("model/resnet_model/")
               and "/.OPTIMIZER_SLOT/" not in name and "/moving_" not in name)


def _call(command, directory):
    """Runs a command in the project's folder."""
    log = os.path.join(directory, "run.log")
    with open(log, "a", encoding="utf-8") as file, subprocess.Popen(
            command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT) as process, _passed_on(process) as signals:
        status = process.wait()
    if status in _STOPPED or signals:  # A run that was about to end ends as ever.
        raise stopping.Stopped(f"stopped in {directory}: the same command goes on from there")
    if status:
        with open(log, encoding="utf-8") as file:
            last = (file.read().strip() or "nothing was printed").splitlines()[-1]
        raise UserError(f"{directory}: the run ended with status {status} ({last}): see {log}")


@contextlib.contextmanager
def _passed_on(process):
    """Within it, SIGINT and SIGTERM go to the process, which saves and ends; this one waits. Yields those that came.

    From a terminal the process gets Ctrl-C by itself, too, at the same time, and takes both for one.
    """
    came = []

    def pass_on(number, _):
        came.append(number)
        process.send_signal(number)
        progress.say("stopping: waiting for the run to save")

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run_studies(names, base, more):
    """Runs the small cells of studies, one after the other, saying what they give. Raises as `run_cell`."""
    for name in sorted(_OURS & {flag.lstrip("-").partition("=")[0] for flag in more}):
        raise UserError(f"--flags: --{name} is the studies' own: leave it out")
    cells = [(name, cell) for name in names for cell in study_named(name).small_cells()]
    for _, cell in cells:
        config_of([*arguments(cell, small=True), *more])  # Mistakes are told before anything is run.
    finished = _finished(base)
    for number, (name, cell) in enumerate(cells, 1):
        done = run_cell(cell, directory_of(base, name, cell), more, finished)
        finished[config_of(done["arguments"]), cell.probes] = done
        found = accuracy(done)
        progress.say(f"{number}/{len(cells)}  {name}: {cell.name}  "
                     f"{'no accuracy' if found is None else f'{found:.4f}'}  ({progress.duration(done['seconds'])})")


# ----------------------------------------------------------------------------------------------------------- report


def accuracy(done):
    """The accuracy that a finished cell is judged by: logistic regression on h, or the linear head; None: neither."""
    return done["results"].get(LBFGS, done["results"].get(TOP_1))


_COLUMNS = {  # of the report: title -> where it stands in a finished cell
    "logistic regression": LBFGS, "of g(h)": f"{LBFGS}/projections", "linear head": TOP_1,
    "contrastive accuracy": "eval/contrast_acc", "entropy": "eval/contrast_entropy",
}


def report(name, base):
    """A study's finished cells: Markdown lines, and the same as dicts, with what `paper.figures` needs."""
    study, rows = study_named(name), []
    for cell in study.small_cells():
        done = read_done(directory_of(base, name, cell))
        if done is not None:
            found = {title: done["results"].get(key) for title, key in _COLUMNS.items()}
            for probe, values in done["probes"].items():
                found |= {"guess": values["guess"], f"{probe} from h": values["h"], f"{probe} from g(h)": values["z"]}
            paper = {f"paper, {measure}": number for measure, number in cell.paper.items()}
            here = ", ".join(f"{setting} {value}" for setting, value in cell.small.items()
                             if setting != "eval_protocol") or None
            rows.append({"cell": cell.name, "here": here, **paper, **found, "minutes": f"{done['seconds'] / 60:.1f}",
                         **cell.data, "accuracy": accuracy(done),
                         "million_parameters": round(done["million_parameters"], 3)})
    shown = ("cell", "here", *_titles(rows, "paper, "), *_COLUMNS, "guess", *_titles(rows, " from "), "minutes")
    titles = [title for title in shown if any(row.get(title) is not None for row in rows)]
    said = f"The paper: {study.finding}" if study.cells else study.finding.capitalize()
    lines = [f"### {study.title} ({study.source})", f"{said}. Accuracies in %.", ""]
    table = [titles, ["---"] * len(titles), *([_shown(title, row.get(title)) for title in titles] for row in rows)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in table if rows), *([] if rows else ["Not run."]), ""], rows


def _titles(rows, part):
    """The columns with this part in their titles, in order."""
    return dict.fromkeys(title for row in rows for title in row if part in title)


def _shown(title, value):
    """A value of a report as text: our accuracies in %, as the paper's are."""
    if isinstance(value, float) and "paper" not in title:
        return f"{value:.2f}" if title == "entropy" else f"{100 * value:.1f}"
    return "" if value is None else str(value)


def write_reports(names, base):
    """Prints all reports, and writes each as a CSV file."""
    for name in names:
        lines, rows = report(name, base)
        progress.say("\n".join(lines))
        if rows:
            with open(os.path.join(base, f"{name}.csv"), "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)),
                                        lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


# ----------------------------------------------------------------------------------------------------- command line


def _list():
    rows = [(name, f"{study.title} ({study.source}): {len(study.cells)} runs, {len(study.small_cells())} small")
            for name, study in STUDIES.items()]
    progress.say(progress.table("studies", rows))


def _show(name):
    study = study_named(name)
    rows = [(cell.name, "   ".join(f"{measure} {number}" for measure, number in cell.paper.items()))
            for cell in study.cells]
    rows += [(cell.name, "at the small scale alone") for cell in study.small_only]
    progress.say(progress.table(f"{study.title} ({study.source}), accuracies in %: {study.finding}", rows))


def _commands(name, scale):
    study = study_named(name)
    cells = study.small_cells() if scale == "small" else study.cells
    if not cells:
        raise UserError(f"{name} has no run at the paper's scale: use --scale=small")
    for cell in cells:
        wanted, place = arguments(cell, scale == "small"), f"runs/{name}/{slug(cell.name)}"
        progress.say(shlex.join(["python", "run.py", *wanted, f"--model_dir={place}"]))
        if cell.probes:
            progress.say(shlex.join(["python", *probe_arguments(cell, config_of(wanted), place)]))


def _parser():
    parser = argparse.ArgumentParser(prog="paper.studies", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="command", required=True)
    kinds.add_parser("list", help="all studies")
    for name, text in (("show", "the paper's numbers"), ("commands", "the command of every run")):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("study")
        if name == "commands":
            kind.add_argument("--scale", choices=("paper", "small"), default="paper")
    for name, text in (("run", "the small scale, resumable"), ("report", "tables of what was run")):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("study", nargs="*", help="unset: all")
        kind.add_argument("--dir", default="runs/studies")
        if name == "run":
            kind.add_argument("--flags", default="", help="further flags for every run, such as '--data_dir=DIR'")
    return parser


def main(argv=None):
    """The command line."""
    asked = _parser().parse_args(argv)

    def work():
        if asked.command in ("run", "report"):
            progress.load_quietly("metrics")
        if asked.command == "list":
            _list()
        elif asked.command == "show":
            _show(asked.study)
        elif asked.command == "commands":
            _commands(asked.study, asked.scale)
        elif asked.command == "run":
            run_studies(asked.study or list(STUDIES), asked.dir, config_lib.split_arguments(asked.flags))
        else:
            write_reports(asked.study or list(STUDIES), asked.dir)

    try:
        progress.run_command("paper.studies", work)
    except stopping.Stopped as stopped:
        progress.say(str(stopped))
        sys.exit(stopping.STATUS)
    except KeyboardInterrupt:  # Between two runs.
        sys.exit(130)


if __name__ == "__main__":
    main()
