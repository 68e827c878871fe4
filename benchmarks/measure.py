"""Benchmark utilities: arguments, alternating timing, peak memory and JSON output."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time

from runtime import child_processes


def time_alternately(functions, rounds=5):
    """Times functions alternately, so that background load affects all of them equally.

    Args:
      functions: dict mapping names to functions without arguments that return when their work is done.
      rounds: timed calls per function, after one untimed call for compilation.

    Returns:
      A dict mapping names to the median seconds per call.
    """
    seconds = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_megabytes():
    """Returns the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_child(module, *arguments):
    """Runs `python -m module arguments...` in a new process and parses the last line of its output as JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(process.stdout.decode().splitlines()[-1])


def parse_sizes(text):
    """Parses comma-separated positive integers, for use as `type` in argparse."""
    sizes = tuple(map(int, text.split(",")))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def report(benchmark, case, unit, ours, baseline, **details):
    """Prints one JSON line; `ratio` is ours / baseline for every unit (s, MB, images/s)."""
    ratio = round(ours / baseline, 3) if baseline else None
    line = dict(benchmark=benchmark, case=case, unit=unit, ours=_round(ours), baseline=_round(baseline), ratio=ratio)
    print(json.dumps({**line, **details}), flush=True)


def _round(value):
    """Rounds to four significant digits. Further digits would be noise."""
    return None if value is None else float(f"{value:.4g}")


def report_machine():
    """Prints one JSON line with the processor, its cores and the software versions."""
    import tensorflow as tf

    name, cores = child_processes.cpu_info()
    line = dict(processor=name, cores=cores, python=platform.python_version(), tensorflow=tf.__version__)
    print(json.dumps(line), flush=True)
