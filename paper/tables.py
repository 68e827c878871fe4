"""Shows the paper's tables, prints the commands for their runs, executes the runs, and reports the results.

    python -m paper.tables list
    python -m paper.tables show 4          # the paper's results, by table number or study name
    python -m paper.tables commands 4      # the command for each run
    python -m paper.tables commands 4 --runner --stage=1    # commands for a cluster (see below)
    python -m paper.tables run 4 [--seeds=3] [--dir=runs/tables] [--flags=FLAGS]
    python -m paper.tables report [1 4 5] [--dir=runs/tables] [--flags=FLAGS]

By default, the runs are those at the small scale, which take minutes on one CPU core. For the
paper's runs on accelerators, pass --scale=paper. `run` skips finished runs and resumes
interrupted ones. If a run starts from another run's weights, `run` executes that run first. Several
processes, even on different machines, can `run` the same tables in the same --dir. Each process
postpones the runs that other processes are executing.

The results of a run are in DIR/SCALE/NETWORK_HASH, where the hash is computed from all settings that
affect the results. Identical runs of several tables share one directory. FLAGS are additional
run.py flags, such as '--data_dir=DIR'. If they affect the results, `report` needs them, too.

With --seeds=N, `run` and `commands` include each run with N seeds: seed 1, followed by 2 to N. Seed
1 denotes the run without an additional --seed flag: the recipes of the small scale set --seed=1,
those of the paper's scale set no seed, so it is random, and transfer runs use their default seed.
If a run starts from another run's weights, the other run has the same seed. All runs with one seed
are executed before those with the next seed.

`commands` prints one line per run, in stages: the runs of stage 1 depend on no other run, and those
of stage 2 use the weights or the results of runs in stage 1. If runs use runs of other tables,
these are included. Identical runs are printed once. By default, the lines are the underlying commands
(run.py, for example) with all flags. These commands do not store results for `report`. With
--runner, each line is a `run` command that locks and executes one run, and stores its results for
`report`. With --stage, only the lines of one stage are printed, for job arrays. docs/clusters.md
explains how to execute the printed commands with Slurm and GNU parallel.

Birdsnap and FGVC Aircraft are not in TFDS, so they are read from data/birdsnap and data/aircraft.

`report` includes all finished seeds. It prints Markdown tables, and writes report.md, report.html
and two files per table to the folder DIR/SCALE: STUDY.csv has one row per run and seed, and
STUDY.svg is a plot. rows.jsonl has the results of the runs of all studies, with their machines and
versions. `report` reads it for runs without a directory, for example in docs/tables. `report` adds
results to this file and replaces those of repeated runs, but never removes any.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import pandas as pd

from config import parse_settings
from paper import runner as runner_lib
from paper import schedule, studies
from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError
from runtime.paths import check_paths

_RECORDED = pathlib.Path(__file__).parents[1] / "docs/tables/small"
_LEGEND = """
small, paper: number of runs at each scale
min/run: median duration at the small scale, if recorded (usually on one core)
data: CIFAR-10 at the small scale; ImageNet and, for transfer and the studies
with cifar in their names, other data sets at the paper's scale"""


def _list() -> None:
    """Prints the studies, with the number of runs, and the median time of the recorded runs."""
    lines = []
    for name, study in studies.STUDIES.items():
        file = _RECORDED / f"{name}.csv"
        minutes = f"{pd.read_csv(file)['minutes'].median():.0f}" if file.exists() else ""
        counts = f"{len(study.runs_at('small')):5}{minutes:>10}{len(study.runs_at('paper')):8}"
        lines.append(f"{name:20}{counts}  {study.source}")
    title = f"{'study':20}{'small':>5}{'min/run':>10}{'paper':>8}  source"
    console.log("\n".join([title, "-" * 78, *lines, _LEGEND]))


def _show(names: Sequence[str]) -> None:
    for key in names:
        study = studies.STUDIES[key]
        rows = [(run.name, _as_text(run.paper)) for run in study.runs]
        rows += [(run.name, "only at the small scale") for run in study.small_only]
        title = f"{study.title} ({study.source}): {study.finding}"
        if rows and study.cited:
            title += " (accuracies in %, cited results below the line)"
            rows.append(None)
        elif study.runs:
            title += " (accuracies in %)"
        rows += [(name, _as_text(numbers)) for name, numbers in study.cited.items()]
        console.log(console.format_table(title, rows))


def _as_text(numbers: Mapping[str, object]) -> str:
    return "   ".join(f"{measure} {number}" for measure, number in numbers.items())


def _checked_runs(
    names: list[str], runner: runner_lib.Runner, num_seeds: int, only: Sequence[str] = ()
) -> list[tuple[str, studies.Run]]:
    """Returns the runs of studies or, if `only` is not empty, those of them that it names.

    Raises `UserError` if there are no runs, if a name is unknown, or if the flags are invalid.
    """
    runs = schedule.runs_of(names, runner.scale, num_seeds)
    if not runs:
        raise UserError(
            f"table={','.join(names)}: no runs at the {runner.scale} scale. Use another scale or"
            " table; `list` shows which tables have runs."
        )
    unknown = set(only)
    selected = []
    for study, run in runs:
        name = schedule.name_of(study, run)
        # Without a seed, a name selects the run with all seeds.
        names_of_run = {name, name.removesuffix(f"_seed_{run.seed}")}
        unknown -= names_of_run
        if not only or names_of_run & set(only):
            runner.check(study, run)
            selected.append((study, run))
    for name in unknown:
        raise UserError(
            f"--only={name}: the tables have no such run at the {runner.scale} scale. Use a name"
            f" such as {schedule.name_of(*runs[0])}; `commands --runner` prints all names."
        )
    return selected


def _commands(
    names: list[str], runner: runner_lib.Runner, num_seeds: int, stage: int | None, use_runner: bool
) -> None:
    """Prints the commands of all stages, with comments, or only the commands of one stage."""
    scheduled = schedule.schedule(_checked_runs(names, runner, num_seeds), runner)
    num_stages = scheduled[-1].stage
    if stage is not None and not 1 <= stage <= num_stages:
        raise UserError(
            f"--stage={stage}: the last stage is {num_stages}. Use a number from 1 to {num_stages}."
        )
    command = schedule.runner_command if use_runner else schedule.direct_command
    scheduled = [item for item in scheduled if stage in (None, item.stage)]
    for number, group in itertools.groupby(scheduled, lambda item: item.stage):
        items = list(group)
        if not stage:
            start = f"use the weights or the results of stage {number - 1}"
            needs = start if number > 1 else "no dependencies"
            console.log(f"# stage {number} (runs: {len(items)}): {needs}")
        for item in items:
            console.log(command(item, runner))
            if item.names[1:] and not stage and not use_runner:
                console.log(f"# identical to the run above: {' '.join(item.names[1:])}")


def _run(names: list[str], runner: runner_lib.Runner, num_seeds: int, only: Sequence[str]) -> None:
    """Executes the runs and logs their accuracies and directories."""
    from checkpoints import records  # This loads TensorFlow, which other commands do not need.

    # Invalid flags are reported before the first run starts.
    runs = _checked_runs(names, runner, num_seeds, only)
    durations = []
    files = {os.path.join(runner.directory(run), records.FILE) for _, run in runs}

    def count_left():
        return sum(not os.path.exists(file) for file in files)

    left = count_left()
    console.log(f"{len(runs)} runs, {left} to execute, in {runner.folder}")
    for index, (name, run, record) in enumerate(runner.run_all(runs), 1):
        accuracy = runner_lib.accuracy(record.results)
        result = "no accuracy" if accuracy is None else f"{accuracy:.4f}"
        console.log(
            f"{index}/{len(runs)}  {name}, {run.label}: {'diverged' if record.diverged else result}"
            f" ({console.format_duration(record.seconds)}, {runner.directory_name(run)})"
        )
        before, left = left, count_left()
        if 0 < left < before:
            durations.append(record.seconds)
            seconds = left * statistics.mean(durations)
            console.log(f"runs left: {left}; expected end: {console.format_end(seconds)}")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(prog="python -m paper.tables", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    subparsers.add_parser(
        "list", help="list all studies: tables, figures, and results from the text"
    )
    for name, text, tables in (
        ("show", "show the paper's results", "+"),
        ("commands", "print the command for each run", "+"),
        ("run", "execute the runs; the same command resumes them", "*"),
        ("report", "compare our results with the paper's (default: all studies)", "*"),
    ):
        command = subparsers.add_parser(name, help=text)
        command.add_argument("table", nargs=tables, help="table numbers or study names, or all")
        if name != "show":
            command.add_argument(
                "--scale",
                choices=("paper", "small"),
                default="small",
                help=(
                    "paper: ImageNet, for accelerators; small: minutes per run on CPUs (default:"
                    " %(default)s)"
                ),
            )
            command.add_argument(
                "--dir",
                default="runs/tables",
                help="directory for all results (default: %(default)s)",
            )
            command.add_argument(
                "--flags",
                default="",
                help="additional run.py flags for every run, such as '--data_dir=DIR'",
            )
        if name in ("commands", "run"):
            command.add_argument(
                "--seeds",
                type=command_line.number(int, 1),
                default=1,
                help="number of seeds for each run (default: %(default)s)",
            )
    subparsers.choices["commands"].add_argument(
        "--stage",
        type=int,
        help="print only the commands of this stage, without comments (default: all stages)",
    )
    subparsers.choices["commands"].add_argument(
        "--runner",
        action="store_true",
        help="print `run --only` commands, which store results for `report` and lock their runs",
    )
    subparsers.choices["run"].add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STUDY/RUN",
        help=(
            "execute only this run, such as color/1_2 (all of its seeds) or color/1_2_seed_2; "
            "can be repeated (default: all)"
        ),
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs the command-line program."""
    options = _parser().parse_args(argv)

    def work():
        if options.command == "list":
            return _list()
        if options.command == "run" and not options.table and not options.only:
            raise UserError("table: no table is selected. Use names from `list`, or all.")
        tables = studies.STUDIES if "all" in options.table else options.table
        keys = map(studies.find_studies, tables or studies.STUDIES)
        names = list(dict.fromkeys(itertools.chain(*keys)))  # without duplicates
        if options.command == "show":
            return _show(names)
        check_paths(options, "dir")
        runner = runner_lib.Runner(options.dir, options.scale, parse_settings(options.flags))
        if options.command == "commands":
            return _commands(names, runner, options.seeds, options.stage, options.runner)
        tensorflow_startup.load("tensorflow")
        if options.command == "run":
            return _run(names, runner, options.seeds, options.only)
        report = tensorflow_startup.load("paper.report")
        return console.log(report.write_report(names, runner))

    command_line.run_stoppable("paper.tables", work)


if __name__ == "__main__":
    main()
