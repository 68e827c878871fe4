"""What all benchmarks share: side-by-side timing, peak memory, and the JSON lines they print."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time

from runtime import child_processes


def side_by_side(functions, rounds=5):
    """Median seconds of a call of each function, taken in turn so that what disturbs one disturbs all.

    Args:
      functions: name -> function without arguments that returns when its work is done.
      rounds: calls of each, after a first one that compiles and is not counted.

    Returns:
      name -> seconds.
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
    """Most memory that this process has held so far (resident set)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_child(module, *arguments):
    """Runs `python -m module arguments...` in a new process and returns the JSON of its last line."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def report(benchmark, case, unit, ours, yardstick, **details):
    """Prints one JSON line; `ratio` is ours / yardstick, whatever the unit (s, MB, images/s)."""
    ratio = round(ours / yardstick, 3) if yardstick else None
    line = dict(benchmark=benchmark, case=case, unit=unit, ours=_short(ours), yardstick=_short(yardstick), ratio=ratio)
    print(json.dumps({**line, **details}), flush=True)


def _short(number):
    """Four digits are more than the noise leaves."""
    return None if number is None else float(f"{number:.4g}")


def report_machine():
    """Prints one JSON line with processor, cores and versions."""
    import tensorflow as tf

    name, cores = child_processes.cpu_info()
    line = dict(processor=name, cores=cores, python=platform.python_version(), tensorflow=tf.__version__)
    print(json.dumps(line), flush=True)
