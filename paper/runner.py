"""Executes and resumes the runs in `paper.studies`, each in its own process, and stores their results."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

import config as config_lib
from checkpoints.lock import InUse, Lock
from paper import studies
from runtime import child_processes, console, progress, signals
from runtime.errors import JobFailed, TrainingDiverged, UserError
from runtime.paths import slug

_RECIPES = "paper/recipes"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_POLL_SECONDS = 5.0  # interval between checks of the runs that other processes execute


# ---------------------------------------------------------------------------------------------------------- commands


def arguments(run: studies.Run, scale: str) -> list[str]:
    """Returns the arguments for a run's program, except the output directory and --checkpoint."""
    flags = config_lib.as_flags({**run.flags, **(run.small_flags if scale == "small" else {})})
    if run.transfer:
        return flags
    return [f"--flagfile={_RECIPES}/{run.recipe if scale == 'paper' else run.small_recipe}", *flags]


def command(
    run: studies.Run,
    scale: str,
    directory: str,
    weights: str | None = None,
    extra: dict | None = None,
) -> list[str]:
    """Returns the command for a run as a list of arguments to the Python interpreter.

    Args:
      run: the run.
      scale: `paper` or `small`.
      directory: directory for the results.
      weights: path for --checkpoint if the run starts from another run's weights.
      extra: additional run.py settings.
    """
    extra, start = extra or {}, [f"--checkpoint={weights}"] if run.starts_from else []
    if not run.transfer:
        return [
            "run.py",
            *arguments(run, scale),
            *config_lib.as_flags(extra),
            *start,
            f"--model_dir={directory}",
        ]
    shared, passed_on = _split_settings(run, extra)
    return [
        "-m",
        "transfer",
        run.transfer,
        *arguments(run, scale),
        *config_lib.as_flags(shared),
        *start,
        *([f"--flags={shlex.join(config_lib.as_flags(passed_on))}"] if passed_on else []),
        f"--out={directory}",
    ]


def _split_settings(run, extra):
    """Splits run.py settings into flags for `python -m transfer` itself and settings that it passes on to run.py."""
    trains = run.transfer != "linear"
    shared_names = (*config_lib.settings_with("data_access"), *(["seed"] if trains else []))
    shared = {
        name: value
        for name, value in extra.items()
        # Flags of `python -m transfer` have no negated form.
        if name in shared_names and value is not False
    }
    return shared, {
        name: value for name, value in extra.items() if trains and name not in shared_names
    }


def probe_command(run: studies.Run, config: config_lib.Config, checkpoint: str) -> list[str]:
    """Returns the command that evaluates a run's probes on `checkpoint`, as arguments for the Python interpreter."""
    data_flags = config_lib.as_flags(
        {
            name: getattr(config, name)
            for name in config_lib.settings_with("data_access")
            if getattr(config, name) != getattr(config_lib.Config, name)
        }
    )
    return [
        "-m",
        "paper.probes",
        f"--checkpoint={checkpoint}",
        f"--dataset={config.dataset}",
        f"--probes={','.join(run.probes)}",
        f"--train_split={config.train_split}",
        f"--test_split={config.eval_split}",
        *([f"--flags={shlex.join(data_flags)}"] if data_flags else []),
    ]


def commands(
    run: studies.Run,
    scale: str,
    directory: str,
    weights: str | None = None,
    extra: dict | None = None,
) -> list[list[str]]:
    """Returns all commands of a run: training or transfer, followed by the run's probes. See `command`."""
    run_commands = [command(run, scale, directory, weights, extra)]
    if run.probes:
        config = config_of([*arguments(run, scale), *config_lib.as_flags(extra or {})])
        run_commands.append(
            [
                *probe_command(run, config, directory),
                f"--out={os.path.join(directory, 'probes.json')}",
            ]
        )
    return run_commands


def config_of(run_arguments: list[str]) -> config_lib.Config:
    """Returns the `Config` for run.py arguments. Recipe paths are relative to the project directory."""
    return config_lib.from_arguments(
        [argument.replace(f"={_RECIPES}/", f"={_ROOT}/{_RECIPES}/") for argument in run_arguments]
    )


def describe_recipe(recipe: str) -> str:
    """Describes a recipe's network, data and training length in one line."""
    config = config_of([f"--flagfile={_RECIPES}/{recipe}"])
    return (
        f"{recipe} ({config.network_name} on {config.train_split} of {config.dataset},"
        f" {config.image_size} pixels, batch size {config.train_batch_size}, {config.train_epochs}"
        " epochs)"
    )


# -------------------------------------------------------------------------------------------------------------- runs


def directory_of(base: str, scale: str, study: str, run: studies.Run) -> str:
    """Returns the directory for a run's results. Its name ends with the seed, except for seed 1."""
    return os.path.join(base, scale, study, directory_name(run))


def directory_name(run: studies.Run) -> str:
    """Returns the name of a run's directory, such as `1_2` for seed 1 and `1_2_seed_2` for seed 2."""
    return slug(run.name) if run.seed == 1 else f"{slug(run.name)}_seed_{run.seed}"


_DONE_TYPES = dict(
    arguments=list,
    settings=dict,
    results=dict,
    probes=dict,
    seconds=(int, float),
    commits=list,
    # types of the values in done.json
    hardware=str,
    diverged=bool,
    same_as=(str, type(None)),
)


def read_done(directory: str) -> dict | None:
    """Returns the contents of a finished run's done.json, or None if the file is missing or corrupt."""
    # Imported here, because it loads TensorFlow, which other commands do not need.
    from runtime import storage

    done = storage.read_json(os.path.join(directory, "done.json"))
    return done if done is not None and is_valid(done) else None


def is_valid(done: dict) -> bool:
    """Returns whether the values in a done.json file have the required types and ranges."""
    from runtime import storage

    if not all(isinstance(done.get(name, ...), types) for name, types in _DONE_TYPES.items()):
        return False
    texts = [*done["arguments"], *(version for version in done["commits"] if version is not None)]
    metrics = [value for key, value in done["results"].items() if key in (LBFGS, TOP_1, "test")]
    return all(isinstance(text, str) for text in texts) and all(map(storage.is_fraction, metrics))


def write_done(directory: str, done: dict) -> None:
    """Writes done.json, which marks a run as finished."""
    from runtime import storage

    storage.write_json(os.path.join(directory, "done.json"), done)


def _all_arguments(run, scale, extra):
    """Returns the run's arguments plus any additional flags that affect results."""
    return [*arguments(run, scale), *config_lib.as_flags(_with_effect(extra or {}))]


def _with_effect(settings):
    """Returns the entries of `settings` that affect results."""
    without_effect = config_lib.settings_with("output", "no_effect")
    return {name: value for name, value in settings.items() if name not in without_effect}


def settings_of(run: studies.Run, scale: str, extra: dict | None = None) -> dict:
    """Returns a JSON-serializable dict of all settings that affect a run, including those of the run it starts from.

    Raises:
      UserError: the flags are invalid.
    """
    run_arguments = _all_arguments(run, scale, extra)
    if run.transfer:
        # Results from earlier versions are stored under the program's old name, transfer.py.
        settings = dict(program=["transfer.py", run.transfer], arguments=run_arguments)
    else:
        settings = dict(
            program=["run.py"], **_with_effect(dataclasses.asdict(config_of(run_arguments)))
        )
    start = (
        settings_of(studies.find_run(run.starts_from), scale, extra) if run.starts_from else None
    )
    return json.loads(json.dumps(dict(settings, start=start, probes=run.probes)))


def settings_digest(settings: dict) -> str:
    """Returns a digest of a run's settings (see `settings_of`). Identical runs have the same digest."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def changed_setting(stored: dict, current: dict) -> tuple[str, object, object] | None:
    """Returns the name of a setting that differs, its stored value and its current value, or None if all are equal.

    Settings that are missing, since a later version added them, have the default value of `Config`.

    Args:
      stored: settings of a finished run (see `settings_of`).
      current: settings of the run in this version.
    """
    stored, current = _with_defaults(stored), _with_defaults(current)
    pairs = ((name, stored.get(name), current.get(name)) for name in {**current, **stored})
    return next(((name, *values) for name, *values in pairs if values[0] != values[1]), None)


def _with_defaults(settings):
    """Adds the default values of missing settings to a run's settings and to those of the run it starts from."""
    defaults = json.loads(json.dumps(dataclasses.asdict(config_lib.Config())))
    start = settings.get("start")
    return {
        **defaults,
        **settings,
        "start": _with_defaults(start) if isinstance(start, dict) else start,
    }


def is_current(run: studies.Run, scale: str, done: dict) -> bool:
    """Returns whether a finished run used its study's current settings, apart from additional flags.

    Args:
      run, scale: the run and its scale.
      done: content of done.json, or recorded results.
    """
    expected = arguments(run, scale)
    if done["arguments"][: len(expected)] != expected:
        return False
    try:
        extra = config_lib.parse_settings(shlex.join(done["arguments"][len(expected) :]))
    except UserError:  # Another version stored a flag that this version does not have.
        return False
    return changed_setting(done["settings"], settings_of(run, scale, extra)) is None


class InProgress(UserError):
    """Raised if another process is executing a run. The message identifies the run and the process."""


class Runner:
    """An executor for runs at one scale. Skips finished runs, and reuses the results of identical runs.

    Any number of processes, including processes on other machines, can use the same directory.
    While a process executes a run, it holds a lock whose name is the digest of the run's settings,
    so no other process executes that run or an identical run of another study.
    """

    def __init__(self, base: str, scale: str, extra: dict | None = None):
        """Creates an executor.

        Args:
          base: directory for all results.
          scale: `paper` or `small`.
          extra: additional run.py settings.

        Raises:
          UserError: `extra` contains a setting that determines where results are written.
        """
        for name in config_lib.settings_with("output"):
            if name in (extra or {}):
                raise UserError(
                    f"--flags: --{name} is set by paper.tables. Remove --{name} from --flags."
                )
        self._base, self._scale, self._extra = base, scale, extra or {}

    def check(self, study: str, run: studies.Run) -> None:
        """Raises `UserError` if a run's arguments are invalid, or if `extra` overrides flags of the run."""
        compared = {**run.flags, **(run.small_flags if self._scale == "small" else {})}
        for name in self._extra:
            if name in compared:
                raise UserError(
                    f"--flags: --{name} is set to {compared[name]} by the run {run.label!r} in the"
                    f" study {study}. Remove --{name} from --flags."
                )
        settings_of(run, self._scale, self._extra)
        if run.starts_from:
            self.check(run.starts_from[0], studies.find_run(run.starts_from))
        if run.transfer in ("finetune", "scratch"):
            from transfer import grid_search

            grid_search.check_settings(run.transfer, _split_settings(run, self._extra)[1])

    def run_all(
        self, runs: list[tuple[str, studies.Run]]
    ) -> Iterator[tuple[str, studies.Run, dict]]:
        """Executes runs, given as (study name, run). Yields (study name, run, content of done.json) for each run.

        Runs that are being executed by other processes are postponed until no other runs remain. If
        another process ends before its run is finished, this process executes that run.

        Raises:
          UserError, errors.Stopped: see `run`.
        """
        remaining, logged, is_waiting = runs, [], False
        while remaining:
            postponed = []
            for study, run in remaining:
                signals.safe_point()
                try:
                    done = self.run(study, run)
                except InProgress as error:
                    postponed.append((study, run))
                    if (study, run) not in logged:
                        console.log(f"postponed {study}, {run.label}: {error}")
                        logged.append((study, run))
                else:
                    yield study, run, done
            if len(postponed) < len(remaining):
                is_waiting = False
            else:
                if not is_waiting:
                    console.log(f"waiting for other processes; postponed runs: {len(postponed)}")
                is_waiting = True
                with signals.interruptible():
                    time.sleep(_POLL_SECONDS)
            remaining = postponed

    def run(self, study: str, run: studies.Run) -> dict:
        """Executes a run, preceded by the run that it starts from, if any. Output is written to run.log.

        Returns:
          The content of done.json: `arguments`, `settings`, `seconds` (summed over all attempts),
          `results`, `probes`, `million_parameters`, `hardware`, `commits`, `diverged` and
          `same_as`. If training diverged, in this run or in the run that it starts from, `diverged`
          is True and there are no results. If the results are those of an identical run, `same_as`
          is the directory of that run, relative to `base`; otherwise, it is None.

        Raises:
          InProgress: another process executes the run, an identical run, or the run that it starts
            from.
          UserError: the run failed without diverging, or its stored results have different
            settings.
          errors.Stopped: the run was stopped. The same call resumes it.
        """
        directory, settings = (
            directory_of(self._base, self._scale, study, run),
            settings_of(run, self._scale, self._extra),
        )
        done = _read_done_with(settings, directory)
        if done is not None:
            return done
        os.makedirs(directory, exist_ok=True)
        with self._lock(study, run, settings) as lock:
            _refresh_cache(directory)
            # Another process may have finished the run before this process locked it.
            done = _read_done_with(settings, directory)
            if done is None:
                identical = self._find_finished(settings)
                if identical is None:
                    done = dict(
                        self._run_new(run, directory, lock), settings=settings, same_as=None
                    )
                else:
                    done = {
                        **read_done(identical),
                        "same_as": os.path.relpath(identical, self._base),
                    }
                done = dict(done, arguments=_all_arguments(run, self._scale, self._extra))
                write_done(directory, done)
        return done

    def _lock(self, study, run, settings):
        """Locks all runs with the given settings. Raises `InProgress` if another process holds the lock."""
        locks = os.path.join(self._scale, "locks")
        os.makedirs(os.path.join(self._base, locks), exist_ok=True)
        try:
            return Lock(
                self._base, "--dir", os.path.join(locks, f"{settings_digest(settings)}.lock")
            )
        except InUse as error:
            raise InProgress(f"{study}, {run.label} is in progress in {error.owner}") from error

    def _find_finished(self, settings):
        """Returns the directory of a finished run with the given settings, from any study, or None."""
        import tensorflow as tf

        # TensorFlow lists all matching directories, which refreshes the NFS cache (see
        # `_refresh_cache`).
        for path in sorted(
            tf.io.gfile.glob(os.path.join(self._base, self._scale, "*", "*", "done.json"))
        ):
            directory = os.path.dirname(path)
            done = read_done(directory)
            if (
                done is not None
                and done["same_as"] is None
                and changed_setting(done["settings"], settings) is None
            ):
                return directory
        return None

    def _run_new(self, run, directory, lock):
        start = run.starts_from and self.run(run.starts_from[0], studies.find_run(run.starts_from))
        if start and start["diverged"]:
            return dict(
                results={},
                probes={},
                diverged=True,
                hardware=hardware(),
                seconds=0.0,
                commits=[commit()],
            )
        directory = os.path.abspath(directory)
        weights = start and self._directory_of_weights(run.starts_from, start["same_as"])
        with _recording_time(directory) as record:
            try:
                done = self._execute(run, directory, weights, lock)
            except JobFailed as error:
                if error.job_status != TrainingDiverged.status:
                    raise
                # A retry would diverge too, so store the result.
                done = dict(results={}, probes={}, diverged=True)
        return {"hardware": hardware(), **done, **record}

    def _execute(self, run, directory, weights, lock):
        """Executes the programs of a run and returns their results. The programs inherit the lock of the run."""
        for run_command in commands(run, self._scale, directory, weights, self._extra):
            _call(run_command, directory, lock.descriptors)
        done = dict(results=_read_results(directory, "result.json"), probes={}, diverged=False)
        if not run.transfer:
            done["million_parameters"] = count_parameters(directory) / 1e6
        if run.probes:
            done["probes"] = _read_results(directory, "probes.json")
        return done

    def _directory_of_weights(self, run_key, same_as):
        """Returns the directory with the weights of a finished run."""
        directory = directory_of(self._base, self._scale, run_key[0], studies.find_run(run_key))
        return os.path.abspath(directory if same_as is None else os.path.join(self._base, same_as))


def _read_done_with(settings, directory):
    """Returns the contents of a finished run's done.json, or None if the file is missing or corrupt.

    Raises `UserError` if the run was executed with other settings.
    """
    done = read_done(directory)
    changed = None if done is None else changed_setting(done["settings"], settings)
    if changed is not None:
        name, stored, current = changed
        raise UserError(
            f"{directory}: the stored run has {name}={stored}, not {current}. Remove the directory,"
            " or use another --dir."
        )
    return done


def _refresh_cache(directory):
    """Lists a directory to refresh the NFS cache, which may hide files of other machines for up to a minute."""
    with contextlib.suppress(OSError):  # Reading the file reports errors that matter.
        os.listdir(directory)


@contextlib.contextmanager
def _recording_time(directory):
    """Yields a dict with the `commits` of all attempts at a run. On exit, stores the dict with the total `seconds`."""
    from runtime import storage

    path, elapsed = os.path.join(directory, "time.json"), progress.stopwatch()
    before = storage.read_json(path) or {}
    if not isinstance(before.get("seconds"), (int, float)) or not isinstance(
        before.get("commits"), list
    ):
        before = dict(seconds=0.0, commits=[])
    record = dict(before, commits=list(dict.fromkeys([*before["commits"], commit()])))
    try:
        yield record
    finally:
        record["seconds"] = round(before["seconds"] + elapsed(), 1)
        storage.write_json(path, record)


def _read_results(directory, name):
    """Reads a program's results. Raises `UserError` if the file is corrupt or an accuracy is not in [0, 1]."""
    from runtime import storage

    path = os.path.join(directory, name)
    results = storage.read_json(path)
    if results is None:
        raise UserError(
            f"{path}: the file is missing or corrupt. See run.log in the same directory, and run "
            "the same command again."
        )
    for key in (LBFGS, TOP_1, "test"):
        if key in results and not storage.is_fraction(results[key]):
            raise UserError(
                f"{path}: {key} is {results[key]}, not a number from 0 to 1. See run.log in the"
                " same directory."
            )
    return results


def _call(arguments, directory, inherited=()):
    """Runs Python in the project directory with the given arguments. Output is written to run.log in `directory`.

    The program inherits the file descriptors `inherited`.
    """
    with child_processes.Launcher() as launcher:
        launcher.run(child_processes.Job((sys.executable, *arguments), directory, _ROOT, inherited))


def count_parameters(directory: str) -> int:
    """Returns the number of trainable encoder weights in a run's newest checkpoint.

    Raises:
      UserError: the run has no checkpoint.
    """
    import tensorflow as tf

    from checkpoints import checkpoint_files

    prefix = checkpoint_files.latest_checkpoint(directory)
    if prefix is None:
        raise UserError(
            f"{directory}: no checkpoint found. Remove the directory, and run the same command"
            " again."
        )
    variables = tf.train.list_variables(prefix)
    return sum(
        math.prod(shape)
        for name, shape in variables
        if name.startswith("model/resnet_model/")
        and "/.OPTIMIZER_SLOT/" not in name
        and "/moving_" not in name
    )


def hardware() -> str:
    """Returns one line with the processor, its number of cores, and the accelerators."""
    import tensorflow as tf

    accelerators = [
        device.device_type
        for device in tf.config.list_physical_devices()
        if device.device_type != "CPU"
    ]
    processor, cores = child_processes.cpu_info()
    return ", ".join(
        [
            processor,
            "1 core" if cores == 1 else f"{cores} cores",
            *(f"{accelerators.count(name)} x {name}" for name in sorted(set(accelerators))),
        ]
    )


def commit() -> str | None:
    """Returns the program's git version, or None outside a repository. A trailing + indicates uncommitted changes."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--dirty=+"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # Git is not installed.
        return None
    return git.stdout.strip() or None


# ---------------------------------------------------------------------------------------------------------- measures


LBFGS, TOP_1 = "eval/lbfgs_top_1_accuracy", "eval/label_top_1_accuracy"


def accuracy(done: dict) -> float | None:
    """Returns the first available test accuracy (logistic regression on h, linear head, or transfer), or None."""
    results = done["results"]
    return results.get(LBFGS, results.get(TOP_1, results.get("test")))
