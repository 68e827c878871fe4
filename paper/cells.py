"""Runs of `paper.catalogue`'s cells: their commands, each in a process of its own, resumable; and what they gave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys

import config as config_lib
import launch
import progress
from config import UserError
from paper import catalogue

_RECIPES = "paper/recipes"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = ("mode", "model_dir", "eval_name")  # flags that decide where results are
_SHARED = ("data_dir", "follow_links", "bad_images")  # flags that run.py and transfer.py have


# ---------------------------------------------------------------------------------------------------------- commands


def arguments(cell, scale):
    """The arguments of a cell's program that do not name its own files."""
    settings = {**cell.flags, **(cell.small if scale == "small" else {})}
    written = config_lib.as_flags(settings)
    if cell.transfer:
        return written
    return [f"--flagfile={_RECIPES}/{cell.recipe if scale == 'paper' else cell.small_recipe}", *written]


def command(cell, scale, directory, weights=None, more=None):
    """What runs a cell, as arguments of Python.

    Args:
      cell, scale: `catalogue.Cell`; paper or small.
      directory: of its results.
      weights: what --checkpoint is to name, if the cell starts from another.
      more: further settings of run.py.
    """
    more, start = more or {}, [f"--checkpoint={weights}"] if cell.start else []
    if not cell.transfer:
        return ["run.py", *arguments(cell, scale), *config_lib.as_flags(more), *start, f"--model_dir={directory}"]
    shared, others = _divided(cell, more)
    return ["transfer.py", cell.transfer, *arguments(cell, scale), *config_lib.as_flags(shared), *start,
            *([f"--flags={shlex.join(config_lib.as_flags(others))}"] if others else []), f"--out={directory}"]


def _divided(cell, more):
    """Of further settings of run.py, those that transfer.py has itself, and those that it passes on to trainings."""
    trains = cell.transfer != "linear"
    own = (*_SHARED, "seed") if trains else _SHARED
    shared = {name: value for name, value in more.items() if name in own and value is not False}  # False: unset.
    return shared, {name: value for name, value in more.items() if trains and name not in own}


def probe_command(cell, config, checkpoint):
    """What asks a cell's probes of its checkpoint, as arguments of Python."""
    places = [f"--data_dir={config.data_dir}"] if config.data_dir else []
    places += ["--follow_links"] if config.follow_links else []
    return ["-m", "paper.probes", f"--checkpoint={checkpoint}", f"--dataset={config.dataset}",
            f"--probes={','.join(cell.probes)}", f"--train_split={config.train_split}",
            f"--test_split={config.eval_split}", *([f"--flags={shlex.join(places)}"] if places else [])]


def config_of(wanted):
    """The `Config` of arguments of run.py."""
    return config_lib.from_arguments(
        [argument.replace(f"={_RECIPES}/", f"={_ROOT}/{_RECIPES}/") for argument in wanted])


# -------------------------------------------------------------------------------------------------------------- runs


def directory_of(base, scale, study, cell):
    """Where a cell's results lie."""
    return os.path.join(base, scale, study, config_lib.slug(cell.name))


def read_done(directory):
    """What was noted of a finished run; None before that."""
    import metrics  # Here, and below: TensorFlow takes a while, and other commands do without.

    return metrics.read_json(os.path.join(directory, "done.json"))


def write_done(directory, done):
    """Notes that a run is finished."""
    import metrics

    metrics.write_json(os.path.join(directory, "done.json"), done)


def settings_of(cell, scale, more=None):
    """All that decides a cell's results, and that of what it starts from, as JSON's types. Raises `UserError`."""
    more = {name: value for name, value in (more or {}).items() if name != "data_dir"}  # Data may move.
    wanted = [*arguments(cell, scale), *config_lib.as_flags(more)]
    if cell.transfer:
        settings = dict(program=["transfer.py", cell.transfer], arguments=wanted)
    else:
        settings = dict(program=["run.py"], **dataclasses.asdict(config_of(wanted)))
    start = settings_of(catalogue.cell_at(cell.start), scale, more) if cell.start else None
    return json.loads(json.dumps(dict(settings, start=start, probes=cell.probes)))


def _key(settings):
    return json.dumps(settings, sort_keys=True)


class Runner:
    """Runs cells below one directory, at one scale. What is done is not run again; equal runs are run once."""

    def __init__(self, base, scale, more=None):
        """Reads what is done.

        Args:
          base: directory of all results.
          scale: paper or small.
          more: further settings of run.py. Raises `UserError` if they decide where results are.
        """
        for name in _OURS:
            if name in (more or {}):
                raise UserError(f"--flags: --{name} is the tables' own: leave it out")
        self._base, self._scale, self._more, self._finished = base, scale, more or {}, {}
        for name, study in catalogue.STUDIES.items():
            for cell in study.cells_of(scale):
                done = read_done(directory_of(base, scale, name, cell))
                if done is not None and done["same_as"] is None:
                    self._finished[_key(done["settings"])] = directory_of(base, scale, name, cell)

    def check(self, cell):
        """Raises `UserError` if the arguments of a cell are wrong."""
        settings_of(cell, self._scale, self._more)
        if cell.transfer in ("finetune", "scratch"):
            import transfer

            transfer.check_settings(cell.transfer, _divided(cell, self._more)[1])

    def run(self, study, cell):
        """Runs a cell, and before it the one that it starts from; what it prints goes to run.log.

        Returns:
          dict: `arguments`, `settings`, `seconds` of all its starts, `results`, `probes`, `million_parameters`,
          `hardware`, `commits`; and `same_as`: None, or the directory (below `base`) of another cell's run that is the
          same one.

        Raises:
          UserError: the run has failed, or was done with other settings.
          stopping.Stopped: the run was stopped; the same call goes on from there.
        """
        directory, settings = directory_of(self._base, self._scale, study, cell), settings_of(
            cell, self._scale, self._more)
        done = read_done(directory)
        if done is not None:
            if done["settings"] != settings:
                name = next(name for name in {**settings, **done["settings"]}
                            if settings.get(name) != done["settings"].get(name))
                raise UserError(f"{directory} was run with {name} {done['settings'].get(name)} (now "
                                f"{settings.get(name)}): remove it, or give another --dir")
            return done
        os.makedirs(directory, exist_ok=True)
        there = self._finished.get(_key(settings))
        if there is None:
            done = dict(self._run_new(cell, directory), settings=settings, same_as=None)
            self._finished[_key(settings)] = directory
        else:
            done = {**read_done(there), "same_as": os.path.relpath(there, self._base)}
        done = dict(done, arguments=[*arguments(cell, self._scale), *config_lib.as_flags(self._more)])
        write_done(directory, done)
        return done

    def _run_new(self, cell, directory):
        weights = self._weights_of(cell.start) if cell.start else None
        directory = os.path.abspath(directory)
        with _noting_time(directory) as noted:
            _call(command(cell, self._scale, directory, weights, self._more), directory)
            done = dict(results=_read(directory, "result.json"), probes={}, hardware=hardware())
            if not cell.transfer:
                done["million_parameters"] = count_parameters(directory) / 1e6
            if cell.probes:
                config = config_of([*arguments(cell, self._scale), *config_lib.as_flags(self._more)])
                _call([*probe_command(cell, config, directory), f"--out={directory}/probes.json"], directory)
                done["probes"] = _read(directory, "probes.json")
        return {**done, **noted}

    def _weights_of(self, start):
        """Where the weights lie that a cell starts from; they are made if need be."""
        study, cell = start[0], catalogue.cell_at(start)
        at = self.run(study, cell)["same_as"]
        return os.path.abspath(directory_of(self._base, self._scale, study, cell) if at is None
                               else os.path.join(self._base, at))


@contextlib.contextmanager
def _noting_time(directory):
    """Adds up the `seconds` of all starts of a run, and their `commits`, in a dict; also if it fails."""
    import metrics

    path, elapsed = os.path.join(directory, "time.json"), progress.stopwatch()
    before = metrics.read_json(path) or dict(seconds=0.0, commits=[])
    noted = dict(before, commits=list(dict.fromkeys([*before["commits"], commit()])))
    try:
        yield noted
    finally:
        noted["seconds"] = round(before["seconds"] + elapsed(), 1)
        metrics.write_json(path, noted)


def _read(directory, name):
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        return json.load(file)


def _call(wanted, directory):
    """Runs Python with these arguments in the project's folder."""
    with launch.Launcher() as launcher:
        launcher.run(launch.Job((sys.executable, *wanted), directory, _ROOT))


def count_parameters(directory):
    """Weights of the encoder in a run's newest checkpoint, the moving statistics of batch norm left out."""
    import tensorflow as tf

    variables = tf.train.list_variables(tf.train.latest_checkpoint(directory))
    return sum(math.prod(shape) for name, shape in variables if name.startswith("model/resnet_model/")
               and "/.OPTIMIZER_SLOT/" not in name and "/moving_" not in name)


def hardware():
    """Processor, its cores, and accelerators, in a line."""
    import tensorflow as tf

    accelerators = [device.device_type for device in tf.config.list_physical_devices() if device.device_type != "CPU"]
    name, cores = launch.processor()
    return ", ".join([name, f"{cores} cores", *(f"{accelerators.count(kind)} x {kind}"
                                                for kind in sorted(set(accelerators)))])


def commit():
    """The version of the program by git, with + if files were changed; None outside of a repository."""
    asked = subprocess.run(["git", "describe", "--always", "--abbrev=10", "--dirty=+"], cwd=_ROOT, capture_output=True,
                           text=True, check=False)
    return asked.stdout.strip() or None


# ---------------------------------------------------------------------------------------------------------- measures


LBFGS, TOP_1 = "eval/lbfgs_top_1_accuracy", "eval/label_top_1_accuracy"


def accuracy(done):
    """What a finished cell is judged by: logistic regression on h, linear head, or metric of transfer.py; or None."""
    results = done["results"]
    return results.get(LBFGS, results.get(TOP_1, results.get("test")))
