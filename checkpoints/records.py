"""record.json, which marks a run of a study or a trial of a grid search as finished."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import tensorflow as tf

from runtime import child_processes, progress, storage, version

FILE = "record.json"
_TIME = "time.json"


@dataclasses.dataclass(frozen=True)
class Record:
    """Results of a finished run, and how they were obtained.

    Attributes:
      settings: the settings that determine the results, keyed by name.
      results: metrics, keyed as in result.json. Empty if training diverged.
      diverged: whether training diverged.
      seconds: duration in seconds, summed over all attempts.
      machine: description of the processor or accelerator.
      version: version of the program, such as a Git commit.
    """

    settings: dict
    results: dict
    diverged: bool
    seconds: float
    machine: str
    version: str

    @classmethod
    def read(cls, directory: str) -> Record | None:
        """Returns the record in `directory`, or None if the run is not finished.

        Raises:
          UserError: the record is corrupt.
        """
        content = storage.read_own_json(os.path.join(directory, FILE))
        return content and cls(**content)

    def write(self, directory: str) -> None:
        """Writes record.json atomically. Call this after all other files of the run are complete."""
        storage.write_json(os.path.join(directory, FILE), dataclasses.asdict(self))


def finish(directory: str, settings: dict, results: dict, diverged: bool = False) -> Record:
    """Writes and returns the `Record` of a run on this machine, with the seconds from `timing`."""
    record = Record(
        settings, results, diverged, _read_seconds(directory), machine(), version.revision()
    )
    record.write(directory)
    return record


@contextlib.contextmanager
def timing(directory: str) -> Iterator[None]:
    """Adds the duration of the context, an attempt at a run, to the seconds in time.json."""
    before, elapsed = _read_seconds(directory), progress.stopwatch()
    try:
        yield
    finally:
        storage.write_json(
            os.path.join(directory, _TIME), dict(seconds=round(before + elapsed(), 1))
        )


def _read_seconds(directory: str) -> float:
    return storage.read_json(os.path.join(directory, _TIME), default={}).get("seconds", 0.0)


def machine() -> str:
    """Returns one line with the processor, its number of cores, and the accelerators."""
    counts = collections.Counter(device.device_type for device in tf.config.list_physical_devices())
    del counts["CPU"]
    processor, cores = child_processes.cpu_info()
    return ", ".join(
        [
            processor,
            f"{cores} core{'s' * (cores > 1)}",
            *(f"{count} x {name}" for name, count in sorted(counts.items())),
        ]
    )
