"""Child process of `python -m benchmarks`, which measures one implementation.

    python -m benchmarks.measure JSON

Imports only the standard library, so that the implementation can also be one in PyTorch, in an
environment without TensorFlow.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SAMPLING_SECONDS = 0.005


class _PeakMemory:
    """Context manager that measures the increase in the peak memory of this process.

    The memory is the anonymous memory, which excludes memory-mapped files, because the system can
    write them back to disk. It is sampled from /proc, so Linux is required. On a GPU, it is the peak
    of the memory that the library has allocated, including the memory in use before.
    """

    def __enter__(self) -> _PeakMemory:
        self._samples, self._done = [_anonymous_megabytes()], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLING_SECONDS):
            self._samples.append(_anonymous_megabytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def megabytes(self) -> float:
        tensorflow, torch = (sys.modules.get(name) for name in ("tensorflow", "torch"))
        if tensorflow and tensorflow.config.list_physical_devices("GPU"):
            return tensorflow.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
        if torch and torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 2**20
        return max(self._samples) - self._samples[0]


def _anonymous_megabytes() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


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
    module, name = function.split(".")
    implementation = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**arguments)
    with _PeakMemory() as peak:
        if warm_up:
            implementation(1)
        warm, start = time.time(), time.perf_counter()
        result = implementation(calls)
        seconds = (time.perf_counter() - start) / calls
    measured = {
        "s": seconds,
        "images/s": images / seconds,
        "MB": peak.megabytes,
        "s to first result": warm - begin,
    }
    return {**measured, **(result if isinstance(result, dict) else {"result": result})}


def repeated(function: Callable) -> Callable[[int], Any]:
    """Returns an implementation that calls `function` the given number of times."""
    return lambda calls: [function() for _ in range(calls)][-1]


if __name__ == "__main__":
    line = json.dumps(measure(**json.loads(sys.argv[1])))
    os.write(1, f"{line}\n".encode())
