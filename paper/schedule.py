"""Schedule of distinct runs in stages. After stage 1, each run starts from a run of the previous stage."""

from __future__ import annotations

import dataclasses
import shlex

import config as config_lib
from paper import runner, studies

Key = tuple[str, str, int]  # (study name, run name, seed)


@dataclasses.dataclass(frozen=True)
class ScheduledRun:
    """A run to execute.

    Attributes:
      key: key of the run.
      identical: keys of the other requested runs that share its results.
      stage: 1 if the run requires no other run, 2 if it requires the weights of a run in stage 1,
        and so on.
      weights: key of the scheduled run whose weights are required, or None.
    """

    key: Key
    identical: tuple[Key, ...]
    stage: int
    weights: Key | None


def runs_of(names: list[str], scale: str, num_seeds: int = 1) -> list[tuple[str, studies.Run]]:
    """Returns (study name, run) pairs for the runs of studies with seeds 1 to `num_seeds`, sorted by seed."""
    return [
        (name, run.with_seed(seed))
        for seed in range(1, num_seeds + 1)
        for name in names
        for run in studies.STUDIES[name].runs_at(scale)
    ]


def schedule(
    names: list[str], scale: str, extra: dict | None = None, num_seeds: int = 1
) -> list[ScheduledRun]:
    """Returns the runs of studies and the runs that they start from, sorted by stage.

    Args:
      names: names of the studies.
      scale: paper or small.
      extra: additional run.py settings.
      num_seeds: number of seeds for each run.
    """
    requested = [(name, run.name, run.seed) for name, run in runs_of(names, scale, num_seeds)]
    keys_by_digest = {}
    # The requested runs are first, so they have priority over identical runs of other studies.
    starts = [start for key in requested for start in _starts(key)]
    for key in dict.fromkeys([*requested, *starts]):
        keys_by_digest.setdefault(_digest(key, scale, extra), []).append(key)
    runs = []
    for first, *others in keys_by_digest.values():
        dependencies = _starts(first)
        weights = (
            keys_by_digest[_digest(dependencies[0], scale, extra)][0] if dependencies else None
        )
        identical = tuple(key for key in others if key in requested)
        runs.append(ScheduledRun(first, identical, len(dependencies) + 1, weights))
    return sorted(runs, key=lambda scheduled: scheduled.stage)


def _starts(key):
    """Returns the keys of the runs whose weights a run depends on, directly or indirectly.

    The first key is that of the run whose weights are loaded.
    """
    study, run, seed = key
    start = studies.find_run((study, run)).starts_from
    return [] if start is None else [(*start, seed), *_starts((*start, seed))]


def _digest(key, scale, extra):
    return runner.settings_digest(runner.settings_of(studies.find_run(key), scale, extra))


def name_of(key: Key) -> str:
    """Returns a run's name for `python -m paper.tables run --only`: the path STUDY/RUN of its directory."""
    return f"{key[0]}/{runner.directory_name(studies.find_run(key))}"


def direct_command(scheduled: ScheduledRun, scale: str, base: str, extra: dict) -> str:
    """Returns a shell command that executes the programs of a run, with all their flags."""
    directory, weights = (
        key and runner.directory_of(base, scale, key[0], studies.find_run(key))
        for key in (scheduled.key, scheduled.weights)
    )
    run_commands = runner.commands(
        studies.find_run(scheduled.key), scale, directory, weights, extra
    )
    return " && ".join(shlex.join(["python", *run_command]) for run_command in run_commands)


def runner_command(scheduled: ScheduledRun, scale: str, base: str, extra: dict) -> str:
    """Returns a shell command that executes a run with `python -m paper.tables run` and stores all of its results."""
    only = [f"--only={name_of(key)}" for key in (scheduled.key, *scheduled.identical)]
    seed = scheduled.key[2]  # Identical runs have the same seed.
    flags = [f"--seeds={seed}"] * (seed > 1)
    flags += [f"--flags={shlex.join(config_lib.as_flags(extra))}"] * bool(extra)
    return shlex.join(
        ["python", "-m", "paper.tables", "run", *only, f"--scale={scale}", f"--dir={base}", *flags]
    )
