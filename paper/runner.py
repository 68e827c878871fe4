"""Executes and resumes the runs in `paper.studies`, each in its own process, and stores their results."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import config as config_lib
from checkpoints.lock import InUse, Lock
from paper import studies
from runtime import child_processes, console, signals
from runtime.errors import JobFailed, TrainingDiverged, UserError
from runtime.paths import ROOT, hashed_name

if TYPE_CHECKING:  # This import loads TensorFlow, which most commands do not need.
    from checkpoints.records import Record

_POLL_SECONDS = 5.0  # interval between checks of the runs that other processes execute
LBFGS, TOP_1 = "eval/lbfgs_top_1_accuracy", "eval/label_top_1_accuracy"


def config_of(arguments: list[str]) -> config_lib.Config:
    """Returns the `Config` for run.py arguments. Recipe paths are relative to the project directory."""
    return config_lib.from_arguments(config_lib.find_recipes(arguments))


class InProgress(UserError):
    """Raised if another process is executing a run. The message identifies the run and the process."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """An executor for runs at one scale. Skips finished runs.

    The directory of a run is named after its settings, so identical runs of several studies share
    their results. Any number of processes, including processes on other machines, can use the same
    directory: while a process executes a run, it holds a lock on the run's directory.

    Attributes:
      base: directory for all results.
      scale: `paper` or `small`.
      extra: additional run.py settings.
    """

    base: str
    scale: str
    extra: dict = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Returns the directory of all runs and reports at this scale."""
        return os.path.join(self.base, self.scale)

    # ------------------------------------------------------------------------------------- settings

    def flags(self, run: studies.Run) -> dict:
        """Returns the flags with which a run differs from its recipe at this scale."""
        return {**run.flags, **(run.small_flags if self.scale == "small" else {})}

    def arguments(self, run: studies.Run) -> list[str]:
        """Returns the arguments for a run's program, without additional settings, --checkpoint and the directory."""
        flags = config_lib.as_flags(self.flags(run))
        if run.transfer:
            return flags
        recipe = run.recipe if self.scale == "paper" else run.small_recipe
        return [f"--flagfile={config_lib.RECIPES}/{recipe}", *flags]

    def config(self, run: studies.Run) -> config_lib.Config:
        """Returns the `Config` of a run that is not a transfer run."""
        return config_of([*self.arguments(run), *config_lib.as_flags(self.extra)])

    def settings(self, run: studies.Run) -> dict:
        """Returns a JSON-serializable dict of all settings that affect a run.

        The settings of the run that it starts from are included. Settings of run.py with default
        values are omitted.

        Raises:
          UserError: the flags are invalid.
        """
        if run.transfer:
            values = {**self.flags(run), **self.extra, "transfer": run.transfer}
        else:
            values = {
                name: value
                for name, value in self.config(run).settings().items()
                if value != getattr(config_lib.Config, name)
            }
        for name in config_lib.settings_with("output", "no_effect"):
            values.pop(name, None)
        if run.start:
            values["start"] = self.settings(run.start)
        if run.best_of:
            values["best_of"] = [self.settings(choice) for _, choice in self.choices(run)]
        if run.probe:
            values["probe"] = run.probe
        return values

    def directory_name(self, run: studies.Run) -> str:
        """Returns the name of a run's directory: the network and a hash of the settings."""
        network = self.config(run.start if run.transfer else run).network_name
        return hashed_name(network, self.settings(run))

    def directory(self, run: studies.Run) -> str:
        """Returns the directory for a run's results."""
        return os.path.join(self.folder, self.directory_name(run))

    def check(self, study: str, run: studies.Run) -> None:
        """Raises `UserError` if a run's settings are invalid or cannot be combined with `extra`."""
        for name in self.extra:
            if name in (*self.flags(run), *config_lib.settings_with("output")):
                raise UserError(
                    f"--flags: --{name} is set by paper.tables for the run {run.label!r} in the"
                    f" study {study}. Remove --{name} from --flags."
                )
        self.settings(run)
        if run.starts_from:
            self.check(run.starts_from[0], run.start)
        if run.transfer in ("finetune", "scratch"):
            from transfer import grid_search

            grid_search.check_settings(run.transfer, self._split_extra("seed")[1])

    # ------------------------------------------------------------------------------------- commands

    def choices(self, run: studies.Run) -> list[tuple[str, studies.Run]]:
        """Returns the (study name, run) pairs from which a run selects the best (see `Run.best_of`)."""
        if not run.best_of:
            return []
        study, pattern = run.best_of
        runs = studies.STUDIES[study].runs_at(self.scale)
        return [(study, choice) for choice in runs if re.fullmatch(pattern, choice.name)]

    def _resolve(self, run: studies.Run) -> studies.Run:
        """Returns a run with the name and the flags of the best of its choices, which must be finished."""
        if not run.best_of:
            return run
        from checkpoints import records

        def quality(choice):
            return accuracy(records.Record.read(self.directory(choice)).results) or 0

        best = max((choice for _, choice in self.choices(run)), key=quality)
        return dataclasses.replace(run, name=best.name, flags={**best.flags, **run.flags})

    def commands(self, run: studies.Run) -> list[list[str]]:
        """Returns the commands of a run as lists of arguments to Python: training or transfer, and the probe."""
        directory = self.directory(run)
        own, passed_on = self.extra, {}
        start, program, output = [], ["run.py"], "model_dir"
        if run.start:
            flag = "checkpoint" if run.transfer else self.config(run).weights_flag
            start = [f"--{flag}={self.directory(run.start)}"]
        if run.transfer:
            program, output = ["-m", "transfer", run.transfer], "out"
            own, passed_on = self._split_extra("seed")
            if run.transfer == "linear":  # It has no random numbers, and trains no network.
                own, passed_on = self._split_extra()[0], {}
        command = [
            *program,
            *self.arguments(self._resolve(run)),
            *config_lib.as_flags(own),
            *start,
            *quoted_flags(passed_on),
            f"--{output}={directory}",
        ]
        if not run.probe:
            return [command]
        config = self.config(run)
        probe_command = [
            *("-m", "paper.probes", f"--checkpoint={directory}", f"--probes={run.probe}"),
            f"--dataset={config.dataset}",
            f"--train_split={config.train_split}",
            f"--test_split={config.eval_split}",
            *quoted_flags(self._split_extra()[0]),
            f"--out={os.path.join(directory, 'probes.json')}",
        ]
        return [command, probe_command]

    def _split_extra(self, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits the additional settings into those with a name in `names` or about access to the data, and others."""
        own, others, names = {}, {}, (*names, *config_lib.settings_with("data_access"))
        for name, value in self.extra.items():
            (own if name in names else others)[name] = value
        return own, others

    # ---------------------------------------------------------------------------------------- runs

    def run_all(
        self, runs: list[tuple[str, studies.Run]]
    ) -> Iterator[tuple[str, studies.Run, Record]]:
        """Executes runs, given as (study name, run). Yields (study name, run, `Record`) for each run.

        Runs that are being executed by other processes are postponed until no other runs remain. If
        another process ends before its run is finished, this process executes that run.

        Raises:
          UserError, errors.Stopped: see `run`.
        """
        remaining, has_waited = runs, False
        while remaining:
            postponed = []
            for study, run in remaining:
                signals.safe_point()
                try:
                    record = self.run(study, run)
                except InProgress as error:
                    postponed.append((study, run))
                    if remaining is runs:  # Each run is logged only once.
                        console.log(f"postponed {study}, {run.label}: {error}")
                else:
                    yield study, run, record
            if len(postponed) == len(remaining):
                if not has_waited:
                    console.log(f"waiting for other processes; postponed runs: {len(postponed)}")
                    has_waited = True
                with signals.interruptible():
                    time.sleep(_POLL_SECONDS)
            remaining = postponed

    def run(self, study: str, run: studies.Run) -> Record:
        """Executes a run, preceded by the run that it starts from, if any. Output is written to run.log.

        Returns:
          The run's record. If training diverged, in this run or in the run that it starts from, the
          record has no results.

        Raises:
          InProgress: another process executes the run, an identical run, or the run that it starts
            from.
          UserError: the run failed without diverging.
          errors.Stopped: the run was stopped. The same call resumes it.
        """
        # Imported here, because it loads TensorFlow, which other commands do not need.
        from checkpoints import records

        directory = os.path.abspath(self.directory(run))
        os.makedirs(directory, exist_ok=True)
        if record := records.Record.read(directory):
            return record
        try:
            lock = Lock(directory, "--dir", "run.lock")
        except InUse as error:
            raise InProgress(f"{study}, {run.label} is in progress in {error.owner}") from error
        with lock:
            os.listdir(directory)  # NFS may hide files of other machines until the next listing.
            # Another process may have finished the run before this process locked it.
            if record := records.Record.read(directory):
                return record
            for choice in self.choices(run):
                self.run(*choice)
            if run.starts_from and self.run(run.starts_from[0], run.start).diverged:
                results = None
            else:
                console.log(f"running {study}, {run.label}; output: {directory}/run.log")
                with records.timing(directory):
                    results = self._execute(run, directory, lock)
                if run.best_of and results:
                    results["selected"] = self._resolve(run).name
            return records.finish(
                directory, self.settings(run), results or {}, diverged=results is None
            )

    def _execute(
        self, run: studies.Run, directory: str, lock: Lock
    ) -> dict[str, float | str] | None:
        """Executes the programs of a run, which inherit its lock. Returns the results, or None if training diverged."""
        try:
            for command in dataclasses.replace(self, base=os.path.abspath(self.base)).commands(run):
                _call(command, directory, lock.descriptors)
        except JobFailed as error:
            if error.job_status != TrainingDiverged.status:
                raise
            return None  # A retry would diverge, too.
        return _read_results(run, directory)


def quoted_flags(settings: dict[str, Any]) -> list[str]:
    """Returns the argument --flags with settings of run.py, or nothing if there are none."""
    return [f"--flags={shlex.join(config_lib.as_flags(settings))}"] if settings else []


def _read_results(run: studies.Run, directory: str) -> dict[str, float | str]:
    """Returns the metrics that the programs of a run wrote. Raises `UserError` if a file is corrupt."""
    from runtime import storage

    files = pathlib.Path(directory).glob("result.json" if run.transfer else "result_*.json")
    newest = max(files, key=lambda path: int(path.stem.partition("_")[2] or 0))
    results = storage.read_own_json(str(newest))
    if not run.transfer:
        weights = run.flags.get("checkpoint", directory)
        results["million_parameters"] = count_parameters(weights) / 1e6
    if run.probe:
        probes = storage.read_own_json(os.path.join(directory, "probes.json"))
        results |= {f"probe/{name}": value for name, value in probes[run.probe].items()}
    # The other values are settings of the evaluation.
    return {name: value for name, value in results.items() if isinstance(value, (float, str))}


def _call(arguments: list[str], directory: str, inherited: tuple[int, ...]) -> None:
    """Runs Python in the project directory with the given arguments. Output is written to run.log in `directory`.

    The program inherits the file descriptors `inherited`.
    """
    with child_processes.Launcher() as launcher:
        launcher.run(child_processes.Job((sys.executable, *arguments), directory, ROOT, inherited))


def count_parameters(path: str) -> int:
    """Returns the number of trainable encoder weights at `path` (see `weight_files.locate`).

    Raises:
      UserError: there are no weights.
    """
    from checkpoints import architecture, weight_files

    return sum(
        math.prod(shape)
        for key, shape in weight_files.open_weights(path, "--dir").shapes.items()
        if key.startswith(architecture.ENCODER) and "/moving_" not in key
    )


def accuracy(results: dict) -> float | None:
    """Returns the first available test accuracy (logistic regression on h, linear head, or transfer), or None."""
    return results.get(LBFGS, results.get(TOP_1, results.get("test")))
