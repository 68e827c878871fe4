"""Shows the paper's tables, prints the commands for their runs, executes the runs, and reports the results.

    python -m paper.tables list
    python -m paper.tables show 4          # the paper's results, by table number or study name
    python -m paper.tables commands 4      # the command for each run, at the paper's scale
    python -m paper.tables commands 4 --runner --stage=1    # commands for a cluster (see below)
    python -m paper.tables run 4 --scale=small [--seeds=3] [--dir=runs/tables] [--flags=FLAGS]
    python -m paper.tables report [1 4 5] [--dir=runs/tables] [--flags=FLAGS]

At the small scale, a run takes minutes on two CPU cores. `run` skips finished runs and resumes
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
of stage 2 start from the weights of runs in stage 1. If runs start from runs of other tables, these
are included. Identical runs are printed once. By default, the lines are the underlying commands
(run.py, for example) with all flags. These commands do not store results for `report`. With
--runner, each line is a `run` command that locks and executes one run, and stores its results for
`report`. With --stage, only the lines of one stage are printed, for job arrays. docs/clusters.md
explains how to execute the printed commands with Slurm and GNU parallel.

Birdsnap and FGVC Aircraft are not in TFDS, so they are read from data/birdsnap and data/aircraft.

`report` includes all finished seeds. It prints Markdown tables, and writes report.md, report.html
and three files per table to the folder DIR/SCALE. STUDY.csv has one row per run and seed. STUDY.svg
is a plot. STUDY.jsonl has the same results in a form that `report` reads for runs without a
directory, for example in docs/tables. `report` adds results to this file and replaces those of
repeated runs, but never removes any.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import config as config_lib
from paper import runner as runner_lib
from paper import schedule, studies
from runtime import command_line, console, tensorflow_startup
from runtime.errors import UserError, first_line
from runtime.paths import check_paths


def _find_all(names: Sequence[str]) -> list[str]:
    """Returns the names of the matching studies, without duplicates, or of all studies if `names` is empty."""
    keys = [key for name in names for key in studies.find_studies(name)]
    return list(dict.fromkeys(keys)) if names else list(studies.STUDIES)


def _list() -> None:
    rows = [
        (
            name,
            (
                f"{study.source:31} {len(study.runs_at('paper')):3} runs,"
                f" {len(study.runs_at('small')):2} at the small scale   {study.title}"
            ),
        )
        for name, study in studies.STUDIES.items()
    ]
    console.log(console.format_table("studies", rows))


def _show(names: Sequence[str]) -> None:
    for key in names:
        study = studies.STUDIES[key]
        rows = [(run.name, _as_text(run.paper)) for run in study.runs]
        rows += [(run.name, "only at the small scale") for run in study.small_only]
        rows += [None] * bool(rows and study.cited) + [
            (name, _as_text(numbers)) for name, numbers in study.cited
        ]
        cited = ", cited results below the line" if study.runs and study.cited else ""
        unit = f" (accuracies in %{cited})" if study.runs else ""
        title = f"{study.title} ({study.source}): {study.finding}{unit}"
        console.log(console.format_table(title, rows))


def _as_text(numbers: Mapping[str, object]) -> str:
    return "   ".join(f"{measure} {number}" for measure, number in numbers.items())


def _with_runs(names: Sequence[str], scale: str) -> list[str]:
    """Returns the studies that have runs at `scale`. Raises `UserError` if no study has any."""
    names_with_runs = [name for name in names if studies.STUDIES[name].runs_at(scale)]
    if not names_with_runs:
        raise UserError(
            f"table={','.join(names)}: no runs at the {scale} scale. Use another scale or table;"
            " `list` shows which tables have runs."
        )
    return names_with_runs


def _commands(
    names: Sequence[str],
    runner: runner_lib.Runner,
    num_seeds: int,
    stage: int | None,
    use_runner: bool,
) -> None:
    """Prints the commands of all stages, with comments, or only the commands of one stage."""
    runs = schedule.runs_of(_with_runs(names, runner.scale), runner.scale, num_seeds)
    for pair in runs:
        runner.check(*pair)
    scheduled = schedule.schedule(runs, runner)
    num_stages = scheduled[-1].stage
    if stage is not None and not 1 <= stage <= num_stages:
        raise UserError(
            f"--stage={stage}: the runs have {num_stages} stage{'s' * (num_stages > 1)}. Use a"
            f" number from 1 to {num_stages}."
        )
    command = schedule.runner_command if use_runner else schedule.direct_command
    for number in [stage] if stage else range(1, num_stages + 1):
        in_stage = [item for item in scheduled if item.stage == number]
        if not stage:
            start = f"start from the weights of stage {number - 1}"
            console.log(
                f"# stage {number} ({len(in_stage)} run{'s' * (len(in_stage) > 1)}):"
                f" {'no dependencies' if number == 1 else start}"
            )
        for item in in_stage:
            console.log(command(item, runner))
            if item.names[1:] and not stage and not use_runner:
                console.log(f"# identical to the run above: {' '.join(item.names[1:])}")


def _select(
    runs: list[tuple[str, studies.Run]], only: Sequence[str], scale: str
) -> list[tuple[str, studies.Run]]:
    """Returns those of the given runs whose names are in `only`, or all of them if `only` is empty."""
    # Without a seed, a name selects the run with all seeds.
    names = [
        {name, name.removesuffix(f"_seed_{run.seed}")}
        for name, run in [(schedule.name_of(*pair), pair[1]) for pair in runs]
    ]
    for name in only:
        if not any(name in names_of_run for names_of_run in names):
            raise UserError(
                f"--only={name}: the tables have no such run at the {scale} scale. Use a name such"
                f" as {min(names[0])}; `commands --runner` prints all names."
            )
    return [pair for names_of_run, pair in zip(names, runs) if not only or names_of_run & set(only)]


def _run(
    names: Sequence[str], runner: runner_lib.Runner, num_seeds: int, only: Sequence[str]
) -> None:
    """Executes the runs and logs their accuracies and directories."""
    runs = schedule.runs_of(_with_runs(names, runner.scale), runner.scale, num_seeds)
    runs = _select(runs, only, runner.scale)
    # Reports invalid flags before the first run starts.
    for pair in runs:
        runner.check(*pair)
    for index, (name, run, record) in enumerate(runner.run_all(runs), 1):
        accuracy = runner_lib.accuracy(record.results)
        result = "no accuracy" if accuracy is None else f"{accuracy:.4f}"
        console.log(
            f"{index}/{len(runs)}  {name}, {run.label}: {'diverged' if record.diverged else result}"
            f" ({console.format_duration(record.seconds)}, {runner.directory_name(run)})"
        )


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ArgumentParser(
        prog="python -m paper.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, text, tables, scale in (
        ("list", "list all studies: tables, figures, and results from the text", None, None),
        ("show", "show the paper's results", "+", None),
        ("commands", "print the command for each run", "+", "paper"),
        ("run", "execute the runs; the same command resumes them", "*", "small"),
        ("report", "compare our results with the paper's", "*", "small"),
    ):
        command = subparsers.add_parser(name, help=text)
        if tables:
            default = " (default: all)" if tables == "*" else ""
            command.add_argument(
                "table", nargs=tables, help=f"table numbers or study names{default}"
            )
        if scale:
            command.add_argument(
                "--scale",
                choices=("paper", "small"),
                default=scale,
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
    for name in ("commands", "run"):
        subparsers.choices[name].add_argument(
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
            "execute "
            "only this run, such as color/1_2 (all of its seeds) or color/1_2_seed_2; "
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
        names = _find_all(options.table)
        if options.command == "show":
            return _show(names)
        check_paths(options, "dir")
        extra = config_lib.parse_settings(options.flags)
        runner = runner_lib.Runner(options.dir, options.scale, extra)
        if options.command == "commands":
            return _commands(names, runner, options.seeds, options.stage, options.runner)
        tensorflow_startup.load("tensorflow")
        try:
            if options.command == "run":
                return _run(names, runner, options.seeds, options.only)
            console.log(tensorflow_startup.load("paper.report").write_report(names, runner))
        except OSError as error:
            raise UserError(
                f"--dir={options.dir}: the directory cannot be used ({first_line(error)}). Fix the"
                " cause or use another directory, and run the same command again."
            ) from error

    command_line.run_stoppable("paper.tables", work)


if __name__ == "__main__":
    main()
