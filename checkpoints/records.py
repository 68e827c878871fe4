"""record.json, which marks a run of a study or a trial of a grid search as finished."""

from __future__ import annotations

import dataclasses
import os

from runtime import storage
from runtime.errors import UserError

_FILE = "record.json"


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
        path = os.path.join(directory, _FILE)
        if not storage.is_file(path) or not os.path.getsize(path):
            return None
        content = storage.read_json(path, default={})
        if content.keys() != {field.name for field in dataclasses.fields(cls)}:
            raise UserError(f"{path}: the file is corrupt. Delete it to repeat the run.")
        return cls(**content)

    def write(self, directory: str) -> None:
        """Writes record.json atomically. Call this after all other files of the run are complete."""
        storage.write_json(os.path.join(directory, _FILE), dataclasses.asdict(self))
