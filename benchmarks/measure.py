"""Benchmark utilities: arguments, alternating timing, peak memory and JSON output."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback

from runtime import child_processes
from runtime.errors import first_line


def time_alternately(functions, rounds=5):
    """Times functions alternately, so that background load affects all of them equally.

    Args:
      functions: dict mapping names to functions without arguments that return when their work is
        done.
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


def first_calls(builders):
    """Builds functions without arguments, and calls each function once, which compiles it.

    Args:
      builders: dict mapping names to functions that return a function.

    Returns:
      functions: dict of the functions that succeeded.
      seconds: dict with the time of building and calling each of them, in seconds.
      errors: dict mapping the other names to error messages.
    """
    functions, seconds, errors = {}, {}, {}
    for name, build in builders.items():
        begin = time.perf_counter()
        try:
            function = build()
            function()
        except Exception as error:
            traceback.print_exc()
            errors[name] = describe(error)
        else:
            functions[name], seconds[name] = function, time.perf_counter() - begin
    return functions, seconds, errors


def describe(error):
    """Returns the class and the first line of an exception's message."""
    return f"{type(error).__name__}: {first_line(error)}"


def peak_megabytes():
    """Returns the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_of(function):
    """Calls a function, and returns its peak memory in MB.

    On a GPU, this is the peak of the memory that TensorFlow has allocated, including the memory in
    use before the call. On a CPU, it is the increase in the peak resident memory of this process.
    """
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")
        function()
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    before = peak_megabytes()
    function()
    return peak_megabytes() - before


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


def line(benchmark, case, unit, ours, baseline, **details):
    """Returns the content of a JSON line; `ratio` is ours / baseline for every unit (s, MB, images/s)."""
    ratio = round(float(ours / baseline), 3) if ours is not None and baseline else None
    return dict(
        benchmark=benchmark,
        case=case,
        unit=unit,
        ours=_round(ours),
        baseline=_round(baseline),
        ratio=ratio,
        **details,
    )


def report(benchmark, case, unit, ours, baseline, **details):
    """Prints a JSON line; see `line`."""
    print(json.dumps(line(benchmark, case, unit, ours, baseline, **details)), flush=True)


def _round(value):
    """Rounds to four significant digits. Further digits would be noise."""
    return None if value is None else float(f"{value:.4g}")


def report_machine():
    """Prints one JSON line with the processor, its cores and the software versions."""
    import tensorflow as tf

    name, cores = child_processes.cpu_info()
    line = dict(
        processor=name, cores=cores, python=platform.python_version(), tensorflow=tf.__version__
    )
    print(json.dumps(line), flush=True)
