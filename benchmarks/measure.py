"""Child process of `python -m benchmarks`, which measures one implementation.

    python -m benchmarks.measure JSON

Imports only the standard library, so that the implementation can also be one in PyTorch, in an
environment without TensorFlow.
"""

from __future__ import annotations

import json
import pathlib
import pkgutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SAMPLING_SECONDS = 0.005


def _anonymous_megabytes() -> float:
    """Returns the memory of this process, without memory-mapped files, which the system can write back to disk."""
    status = pathlib.Path("/proc/self/status").read_text()  # requires Linux
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def _sample_memory(samples: list[float], done: threading.Event) -> None:
    while not done.wait(_SAMPLING_SECONDS):
        samples.append(_anonymous_megabytes())


def _peak_megabytes(samples: list[float]) -> float:
    """Returns the increase in the memory of this process, of which `samples` are values in order.

    On a GPU, it is the peak of the memory that the library has allocated, including the memory in
    use before.
    """
    tensorflow, torch = (sys.modules.get(name) for name in ("tensorflow", "torch"))
    if tensorflow and tensorflow.config.list_physical_devices("GPU"):
        return tensorflow.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    if torch and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return max(samples) - samples[0]


def measure(
    function: str,
    arguments: dict,
    calls: int = 1,
    warm_up: bool = False,
    images: int = 0,
    begin: float = 0.0,
) -> dict[str, Any]:
    """Builds an implementation and measures it.

    Args:
      function: module of this package and function. The function returns the implementation, which
        receives a number of calls, executes them, and returns the last result.
      arguments: arguments of the function.
      calls: number of timed calls.
      warm_up: whether one call precedes the timed calls.
      images: number of images per call.
      begin: time at which this process was started, in seconds since the epoch.

    Returns:
      A dict with `s` (seconds per timed call), `images/s`, `MB` (peak memory), `s to first result`
      (from `begin`, if `warm_up`), and `result` or, if the result is a dict, its items.
    """
    implementation = pkgutil.resolve_name(f"benchmarks.{function}")(**arguments)
    samples, done = [_anonymous_megabytes()], threading.Event()
    threading.Thread(target=_sample_memory, args=(samples, done), daemon=True).start()
    if warm_up:
        implementation(1)
    warm, start = time.time(), time.perf_counter()
    result = implementation(calls)
    seconds = (time.perf_counter() - start) / calls
    done.set()
    return {
        "s": seconds,
        "images/s": images / seconds,
        "MB": _peak_megabytes(samples),
        "s to first result": warm - begin,
        **(result if isinstance(result, dict) else {"result": result}),
    }


def repeated(function: Callable) -> Callable[[int], Any]:
    """Returns an implementation that calls `function` the given number of times."""
    return lambda calls: [function() for _ in range(calls)][-1]


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)
