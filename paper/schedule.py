"""Schedule of distinct runs in stages. After stage 1, each run starts from a run of the previous stage."""

from __future__ import annotations

import dataclasses
import shlex

from paper import studies
from paper.runner import Runner, quoted_flags
from runtime.paths import slug


@dataclasses.dataclass(frozen=True)
class ScheduledRun:
    """A run to execute.

    Attributes:
      run: the run.
      names: names of the run and of the identical requested runs (see `name_of`).
      stage: 1 if the run requires no other run, 2 if it requires the weights or the results of runs
        in stage 1, and so on.
    """

    run: studies.Run
    names: tuple[str, ...]
    stage: int


def runs_of(names: list[str], scale: str, num_seeds: int = 1) -> list[tuple[str, studies.Run]]:
    """Returns (study name, run) pairs for the runs of studies with seeds 1 to `num_seeds`, sorted by seed."""
    return [
        (name, run.with_seed(seed))
        for seed in range(1, num_seeds + 1)
        for name in names
        for run in studies.STUDIES[name].runs_at(scale)
    ]


def schedule(runs: list[tuple[str, studies.Run]], runner: Runner) -> list[ScheduledRun]:
    """Returns distinct runs and the runs that they start from, sorted by stage."""
    groups = {}
    for pair in runs:
        groups.setdefault(runner.directory_name(pair[1]), []).append(pair)
    for _, run in runs:
        # scheduled unless an identical run is requested
        for needed in (*_starts(run), *runner.choices(run)):
            groups.setdefault(runner.directory_name(needed[1]), [needed])
    scheduled = []
    for group in groups.values():
        run = group[0][1]
        stage = 1 + len(_starts(run)) + bool(run.best_of)
        scheduled.append(ScheduledRun(run, tuple(name_of(*pair) for pair in group), stage))
    return sorted(scheduled, key=lambda item: item.stage)


def _starts(run: studies.Run) -> list[tuple[str, studies.Run]]:
    """Returns (study name, run) pairs for the runs whose weights a run depends on, directly or indirectly."""
    if not run.start:
        return []
    return [(run.starts_from[0], run.start), *_starts(run.start)]


def name_of(study: str, run: studies.Run) -> str:
    """Returns a run's name for `--only`, such as color/1_2 for seed 1 and color/1_2_seed_2 for seed 2."""
    name = f"{study}/{slug(run.name)}"
    return name if run.seed == 1 else f"{name}_seed_{run.seed}"


def direct_command(scheduled: ScheduledRun, runner: Runner) -> str:
    """Returns a shell command that executes the programs of a run, with all their flags.

    The flags of a run that selects the best of other runs are not known in advance.
    """
    if scheduled.run.best_of:
        return runner_command(scheduled, runner)
    return " && ".join(
        shlex.join(["python", *command]) for command in runner.commands(scheduled.run)
    )


def runner_command(scheduled: ScheduledRun, runner: Runner) -> str:
    """Returns a shell command that executes a run with `python -m paper.tables run` and stores all of its results."""
    return shlex.join(
        [
            *("python", "-m", "paper.tables", "run", f"--only={scheduled.names[0]}"),
            *(f"--scale={runner.scale}", f"--dir={runner.base}"),
            f"--seeds={scheduled.run.seed}",
            *quoted_flags(runner.extra),
        ]
    )
