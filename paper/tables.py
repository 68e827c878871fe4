"""Shows the paper's tables, prints the commands for their runs, executes the runs, and reports the results.

    python -m paper.tables list
    python -m paper.tables show 4                   # the paper's results, by table number or study name
    python -m paper.tables commands 4               # the command for each run, at the paper's scale
    python -m paper.tables run 4 --scale=small [--dir=runs/tables] [--flags='--data_dir=DIR']
    python -m paper.tables report [1 4 5] [--dir=runs/tables]

At the small scale, a run takes minutes on two CPU cores. `run` skips finished runs and resumes interrupted ones. If a
run starts from another run's weights, `run` executes that run first. In the output of `commands`, --checkpoint shows
which table's commands must be executed first. Birdsnap and FGVC Aircraft are not in TFDS, so they are read from
data/birdsnap and data/aircraft. `report` prints Markdown tables and writes report.md, report.html and one CSV file per
table to the scale's sub-folder of --dir.
"""

from __future__ import annotations

import argparse
import html
import os
import shlex

import config as config_lib
from paper import runner, studies
from runtime import command_line, console, signals, tensorflow_startup
from runtime.errors import UserError, first_line
from runtime.paths import check_paths


def _find_all(names):
    """Returns the studies for names or numbers, in order and without duplicates, or all studies if `names` is empty."""
    keys = [key for name in names for key in studies.find_studies(name)]
    return list(dict.fromkeys(keys)) if names else list(studies.STUDIES)


def _list():
    rows = [(name, f"{study.source:31} {len(study.runs_at('paper')):3} runs, {len(study.runs_at('small')):2} at the "
             f"small scale   {study.title}") for name, study in studies.STUDIES.items()]
    console.log(console.format_table("studies", rows))


def _show(names):
    for key in names:
        study = studies.STUDIES[key]
        rows = [(run.name, _as_text(run.paper)) for run in study.runs]
        rows += [(run.name, "only at the small scale") for run in study.small_only]
        rows += [None] * bool(rows and study.cited) + [(name, _as_text(numbers)) for name, numbers in study.cited]
        cited = ", cited results below the line" if study.runs and study.cited else ""
        unit = f" (accuracies in %{cited})" if study.runs else ""
        title = f"{study.title} ({study.source}): {study.finding}{unit}"
        console.log(console.format_table(title, rows))


def _as_text(numbers):
    return "   ".join(f"{measure} {number}" for measure, number in numbers.items())


def _with_runs(names, scale):
    """Returns the studies that have runs at a scale. Raises `UserError` if there are none."""
    names_with_runs = [name for name in names if studies.STUDIES[name].runs_at(scale)]
    if not names_with_runs:
        other = "small" if scale == "paper" else "paper"
        other_has_runs = any(studies.STUDIES[name].runs_at(other) for name in names)
        raise UserError(f"table={','.join(names)}: no runs at the {scale} scale. Use --scale={other}." if other_has_runs
                        else f"table={','.join(names)}: no runs. Use another table; `list` shows which tables have "
                             "runs.")
    return names_with_runs


def _commands(names, scale, base):
    for key in _with_runs(names, scale):
        for run in studies.STUDIES[key].runs_at(scale):
            directory, start = runner.directory_of(base, scale, key, run), run.starts_from
            weights = start and runner.directory_of(base, scale, start[0], studies.find_run(start))
            console.log(shlex.join(["python", *runner.command(run, scale, directory, weights)]))
            if run.probes:
                config = runner.config_of(runner.arguments(run, scale))
                console.log(shlex.join(["python", *runner.probe_command(run, config, directory)]))


def _run(names, scale, base, extra):
    """Executes the runs in sequence and logs their accuracies."""
    runs = [(name, run) for name in _with_runs(names, scale) for run in studies.STUDIES[name].runs_at(scale)]
    executor = runner.Runner(base, scale, extra)
    for name, run in runs:
        executor.check(name, run)  # Reports invalid flags before the first run starts.
    for index, (name, run) in enumerate(runs, 1):
        signals.safe_point()
        done = executor.run(name, run)
        accuracy = runner.accuracy(done)
        result = "diverged" if done["diverged"] else "no accuracy" if accuracy is None else f"{accuracy:.4f}"
        duration = console.format_duration(done["seconds"])
        console.log(f"{index}/{len(runs)}  {name}, {run.name}: {result} ({duration})")


def _report(names, scale, base):
    report = tensorflow_startup.load("paper.report")
    from runtime import storage

    directory = os.path.join(base, scale)
    os.makedirs(directory, exist_ok=True)
    rows_by_study = {name: report.rows_of(name, base, scale) for name in names}
    lines = [html.escape(report.summary(rows_by_study), quote=False), ""]
    for name, rows in rows_by_study.items():
        lines += report.markdown(name, rows, base, scale)
        if rows:
            report.write_csv(os.path.join(directory, f"{name}.csv"), rows)
    text = "\n".join(lines)
    console.log(text)
    storage.write_bytes(os.path.join(directory, "report.md"),
                        f"# The paper's tables, {scale} scale\n\n{text}\n".encode())
    report.write_html(os.path.join(directory, "report.html"), rows_by_study, base, scale)
    console.log(f"wrote report.md, report.html and one CSV file per table to {directory}")


def _parser():
    parser = command_line.ArgumentParser(prog="python -m paper.tables", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True)
    subparsers.add_parser("list", help="list all studies: tables, figures, and results from the text")
    for name, text in (("show", "show the paper's results"), ("commands", "print the command for each run")):
        subparsers.add_parser(name, help=text).add_argument("table", nargs="+", help="table numbers or study names")
    for name, text in (("run", "execute the runs; the same command resumes them"),
                       ("report", "compare our results with the paper's")):
        subparsers.add_parser(name, help=text).add_argument("table", nargs="*",
                                                            help="table numbers or study names (default: all)")
    for name, default in (("commands", "paper"), ("run", "small"), ("report", "small")):
        command = subparsers.choices[name]
        command.add_argument("--scale", choices=("paper", "small"), default=default, help="paper: ImageNet, for "
                             "accelerators; small: minutes per run on CPUs (default: %(default)s)")
        command.add_argument("--dir", default="runs/tables", help="directory for all results (default: %(default)s)")
    subparsers.choices["run"].add_argument("--flags", default="",
                                           help="additional run.py flags for every run, such as '--data_dir=DIR'")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs the command-line program."""
    options = _parser().parse_args(argv)

    def work():
        if hasattr(options, "dir"):
            check_paths(options, "dir")
        if options.command == "list":
            _list()
        elif options.command == "show":
            _show(_find_all(options.table))
        elif options.command == "commands":
            _commands(_find_all(options.table), options.scale, options.dir)
        else:
            tensorflow_startup.load("tensorflow")
            _run_or_report(options)

    command_line.run_stoppable("paper.tables", work)


def _run_or_report(options):
    """Executes `run` or `report`. Raises `UserError` if --dir cannot be used."""
    try:
        if options.command == "run":
            _run(_find_all(options.table), options.scale, options.dir, config_lib.parse_settings(options.flags))
        else:
            _report(_find_all(options.table), options.scale, options.dir)
    except OSError as error:
        raise UserError(f"--dir={options.dir}: the directory cannot be used ({first_line(error)}). Fix the cause or "
                        "use another directory, and run the same command again.") from error


if __name__ == "__main__":
    main()
