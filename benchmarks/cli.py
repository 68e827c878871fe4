"""Command-line program: measures our implementation and a baseline alternately, each in its own process."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import cases
from runtime import command_line, tensorflow_startup


def main(arguments: list[str] | None = None) -> None:
    """Runs the command-line program, which prints JSON lines."""
    tensorflow_startup.set_environment()  # The child processes inherit the variables.
    epilog = "benchmarks (and the default of --sizes):"
    for name, (function, sizes) in cases.BENCHMARKS.items():
        epilog += f"\n  {name} ({','.join(map(str, sizes))}): {function.__doc__}"
    parser = command_line.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=epilog
    )
    parser.add_argument("name", choices=cases.BENCHMARKS, metavar="NAME", help="see below")
    parser.add_argument(
        "--sizes",
        type=lambda text: [*map(int, text.split(","))],
        help="comma-separated values of SIZE",
    )
    parser.add_argument("--only", default="", help="select the cases whose names contain this text")
    parser.add_argument(
        "--rounds",
        type=command_line.number(int, 1),
        default=3,
        help="processes per implementation; default: 3",
    )
    parser.add_argument("--calls", type=int, help="timed calls per process; default: see cases.py")
    parser.add_argument("--flags", type=shlex.split, default=[], help="flags of run.py")
    parser.add_argument("--profile", metavar="DIR", help="step: write a TensorBoard profile")
    parser.add_argument(
        "--data_dir",
        help="precision, parity, race: TFDS directory with CIFAR-10; without it, only digits",
    )
    parser.add_argument(
        "--runs_dir",
        default="runs/benchmarks",
        help="precision, parity, race: directory of the runs",
    )
    parser.add_argument(
        "--original", metavar="DIR", help="parity, race: folder tf2 of the original's repository"
    )
    arguments = parser.parse_args(arguments)
    command_line.run_command(parser.prog, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    function, sizes = cases.BENCHMARKS[arguments.name]
    print(json.dumps(_measure(("programs.machine", {}))["machine"]), flush=True)
    for size in arguments.sizes or sizes:
        for case in function(size, arguments):
            if arguments.only in case.name:
                calls = (case.warm_up and arguments.calls) or case.calls
                for line in compare(case, calls, arguments.rounds):
                    print(json.dumps({"benchmark": arguments.name, **line}), flush=True)


def _measure(form: tuple[str, dict], **settings: Any) -> dict[str, Any]:
    """Measures an implementation in a child process. See `measure.measure`."""
    function, arguments = form
    python = cases.torch_python() if function.startswith("torch") else sys.executable
    settings.update(function=function, arguments=arguments, begin=time.time())
    command = [python, "-m", "benchmarks.measure", json.dumps(settings)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        return {"error": f"{function} exited with status {process.returncode}"}
    return json.loads(process.stdout.splitlines()[-1])


def compare(case: cases.Case, calls: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields one dict per unit of a case, with the medians of `rounds` alternate measurements.

    `ratio` is ours / baseline, and `results` are the results of the first round. If a process of an
    implementation fails, its value is None, and `error` states the status.
    """
    forms = [form for form in (case.ours, case.baseline) if form]
    settings = dict(calls=calls, warm_up=case.warm_up, images=case.images)
    measured = [[_measure(form, **settings) for form in forms] for _ in range(rounds)]
    details = {}
    for output in itertools.chain(*measured):
        if "error" in output:
            details["error"] = output["error"]
    if "result" in measured[0][0]:
        details["results"] = [output.get("result") for output in measured[0]]
    for unit in case.units:
        ours, baseline, *_ = *(_median(unit, column) for column in zip(*measured)), None
        ratio = ours / baseline if ours is not None and baseline else None
        numbers = dict(ours=ours, baseline=baseline, ratio=ratio)
        rounded = {name: value and float(f"{value:.4g}") for name, value in numbers.items()}
        yield {"case": case.name, "unit": unit, **rounded, **details}


def _median(unit: str, outputs: Iterable[Mapping[str, Any]]) -> float | None:
    values = [output.get(unit) for output in outputs]
    return None if None in values else statistics.median(values)
