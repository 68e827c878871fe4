"""The tables of the paper: its numbers, the commands that make them, and runs of them.

    python -m paper.tables list
    python -m paper.tables show 4                   # the paper's numbers; by number or by name
    python -m paper.tables commands 4               # the command of every run, at the paper's scale
    python -m paper.tables run 4 --scale=small [--dir=runs/tables] [--flags='--data_dir=DIR']
    python -m paper.tables report [1 4 5] [--dir=runs/tables]

The small scale is for two CPU cores, minutes a run. What is finished is not run again, and what was interrupted is
resumed. `run` makes the weights first that a run starts from; `commands` names their directory, and the table in it,
whose commands must be run before. Birdsnap and FGVC Aircraft, which TFDS does not have, are taken from data/birdsnap
and data/aircraft. `report` prints Markdown tables, and writes report.md, report.html and a CSV file for each table to
the scale's folder in --dir.
"""

from __future__ import annotations

import argparse
import html
import os
import shlex

import config as config_lib
from paper import catalogue, cells
from runtime import command_line, console, signals, tensorflow_startup
from runtime.errors import UserError, first_line
from runtime.paths import check_paths


def _chosen(names):
    """The studies that names or numbers mean, in order, each once; without any, all."""
    found = [key for name in names for key in catalogue.find(name)]
    return list(dict.fromkeys(found)) if names else list(catalogue.STUDIES)


def _list():
    rows = [(name, f"{study.source:24} {len(study.cells_of('paper')):2} runs, {len(study.cells_of('small')):2} at the "
             f"small scale   {study.title}") for name, study in catalogue.STUDIES.items()]
    console.log(console.table("tables", rows))


def _show(names):
    for key in names:
        study = catalogue.STUDIES[key]
        rows = [(cell.name, _as_text(cell.paper)) for cell in study.cells]
        rows += [(cell.name, "at the small scale alone") for cell in study.small_only]
        rows += [None] * bool(rows and study.cited) + [(row, _as_text(values)) for row, values in study.cited]
        cited = ", cited below the line" if study.cells and study.cited else ""
        console.log(console.table(f"{study.title} ({study.source}), accuracies in %{cited}: {study.finding}", rows))


def _as_text(values):
    return "   ".join(f"{measure} {number}" for measure, number in values.items())


def _with_runs(names, scale):
    """Those of the studies that have runs at a scale. Raises `UserError` if none has."""
    found = [name for name in names if catalogue.STUDIES[name].cells_of(scale)]
    if not found:
        other = "small" if scale == "paper" else "paper"
        there = any(catalogue.STUDIES[name].cells_of(other) for name in names)
        raise UserError(f"{', '.join(names)}: no runs{f' at the {scale} scale: use --scale={other}' if there else ''}")
    return found


def _commands(names, scale, base):
    for key in _with_runs(names, scale):
        for cell in catalogue.STUDIES[key].cells_of(scale):
            place = cells.directory_of(base, scale, key, cell)
            start = cell.start and cells.directory_of(base, scale, cell.start[0], catalogue.cell_at(cell.start))
            console.log(shlex.join(["python", *cells.command(cell, scale, place, start)]))
            if cell.probes:
                config = cells.config_of(cells.arguments(cell, scale))
                console.log(shlex.join(["python", *cells.probe_command(cell, config, place)]))


def _run(names, scale, base, more):
    """Runs cells one after the other, saying what they give."""
    chosen = [(name, cell) for name in _with_runs(names, scale) for cell in catalogue.STUDIES[name].cells_of(scale)]
    runner = cells.Runner(base, scale, more)
    for name, cell in chosen:
        runner.check(name, cell)  # Errors in the arguments end the program before anything is run.
    for number, (name, cell) in enumerate(chosen, 1):
        signals.safe_point()
        done = runner.run(name, cell)
        found = cells.accuracy(done)
        told = "diverged" if done["diverged"] else "no accuracy" if found is None else f"{found:.4f}"
        duration = console.format_duration(done["seconds"])
        console.log(f"{number}/{len(chosen)}  {name}: {cell.name}  {told}  ({duration})")


def _report(names, scale, base):
    report = tensorflow_startup.load("paper.report")
    from runtime import storage

    place = os.path.join(base, scale)
    os.makedirs(place, exist_ok=True)
    found = {name: report.rows_of(name, base, scale) for name in names}
    lines = [html.escape(report.summary(found), quote=False), ""]
    for name, rows in found.items():
        lines += report.markdown(name, rows, base, scale)
        if rows:
            report.write_csv(os.path.join(place, f"{name}.csv"), rows)
    text = "\n".join(lines)
    console.log(text)
    storage.write_bytes(os.path.join(place, "report.md"), f"# The paper's tables, {scale} scale\n\n{text}\n".encode())
    report.write_html(os.path.join(place, "report.html"), found, base, scale)
    console.log(f"written to {place}: report.md, report.html, and a CSV file for each table")


def _parser():
    parser = argparse.ArgumentParser(prog="paper.tables", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    kinds.add_parser("list", help="all tables, and figures and sentences with numbers")
    for name, text in (("show", "the paper's numbers"), ("commands", "the command of every run")):
        kinds.add_parser(name, help=text).add_argument("table", nargs="+", help="numbers or names")
    for name, text in (("run", "runs, resumable"), ("report", "what was run, beside the paper")):
        kinds.add_parser(name, help=text).add_argument("table", nargs="*", help="numbers or names; unset: all")
    for name, default in (("commands", "paper"), ("run", "small"), ("report", "small")):
        kind = kinds.choices[name]
        kind.add_argument("--scale", choices=("paper", "small"), default=default,
                          help="paper: ImageNet, for accelerators; small: minutes a run on CPUs (default: %(default)s)")
        kind.add_argument("--dir", default="runs/tables", help="of all results (default: %(default)s)")
    kinds.choices["run"].add_argument("--flags", default="",
                                      help="further flags for every run, such as '--data_dir=DIR'")
    return parser


def main(argv=None):
    """The command line."""
    asked = _parser().parse_args(argv)

    def work():
        if hasattr(asked, "dir"):
            check_paths(asked, "dir")
        if asked.command == "list":
            _list()
        elif asked.command == "show":
            _show(_chosen(asked.table))
        elif asked.command == "commands":
            _commands(_chosen(asked.table), asked.scale, asked.dir)
        else:
            tensorflow_startup.load("tensorflow")
            _in_place(asked)

    command_line.run_stoppable("paper.tables", work)


def _in_place(asked):
    """`run` and `report`, which use a directory. Raises `UserError` if it cannot be used."""
    try:
        if asked.command == "run":
            _run(_chosen(asked.table), asked.scale, asked.dir, config_lib.settings_within(asked.flags))
        else:
            _report(_chosen(asked.table), asked.scale, asked.dir)
    except OSError as error:
        raise UserError(f"--dir={asked.dir} cannot be used ({first_line(error)}). Fix that or name another "
                        "directory, and run the same command again.") from error


if __name__ == "__main__":
    main()
