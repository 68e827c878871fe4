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
from paper import catalogue
from runtime import child_processes, progress
from runtime.errors import JobFailed, TrainingDiverged, UserError
from runtime.paths import slug

_RECIPES = "paper/recipes"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
    own = (*config_lib.settings_with("data_access"), *(["seed"] if trains else []))
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


def setting_of(recipe):
    """What a recipe trains, as text."""
    config = config_of([f"--flagfile={_RECIPES}/{recipe}"])
    return (f"{recipe}, {config.network_name} on {config.train_split} of {config.dataset}, {config.image_size} pixels, "
            f"batch {config.train_batch_size}, {config.train_epochs} epochs")


# -------------------------------------------------------------------------------------------------------------- runs


def directory_of(base, scale, study, cell):
    """Where a cell's results lie."""
    return os.path.join(base, scale, study, slug(cell.name))


_DONE = dict(arguments=list, settings=dict, results=dict, probes=dict, seconds=(int, float), commits=list, hardware=str,
             diverged=bool, same_as=(str, type(None)))  # types of the values in done.json


def read_done(directory):
    """The content of a finished run's done.json; None if there is none, or if it is corrupt."""
    from runtime import storage  # Here, and below: TensorFlow takes seconds to load, and other commands do without.

    done = storage.read_json(os.path.join(directory, "done.json"))
    if done is None or not all(isinstance(done.get(name, ...), kind) for name, kind in _DONE.items()):
        return None
    texts = [*done["arguments"], *(each for each in done["commits"] if each is not None)]
    numbers = [value for key, value in done["results"].items() if key in (LBFGS, TOP_1, "test")]
    return done if all(isinstance(text, str) for text in texts) and all(map(_is_share, numbers)) else None


def _is_share(value):
    """True for an accuracy: a number in [0, 1]."""
    return isinstance(value, (int, float)) and 0 <= value <= 1


def write_done(directory, done):
    """Notes that a run is finished."""
    from runtime import storage

    storage.write_json(os.path.join(directory, "done.json"), done)


def _all_arguments(cell, scale, more):
    """The arguments of a cell's program that decide its results, with further settings that do."""
    return [*arguments(cell, scale), *config_lib.as_flags(_with_effect(more or {}))]


def _with_effect(settings):
    """Returns those of the settings, a dict, that have an effect on results."""
    others = config_lib.settings_with("output", "no_effect")
    return {name: value for name, value in settings.items() if name not in others}


def settings_of(cell, scale, more=None):
    """All that decides a cell's results, and that of what it starts from, as JSON's types. Raises `UserError`."""
    wanted = _all_arguments(cell, scale, more)
    if cell.transfer:
        settings = dict(program=["transfer.py", cell.transfer], arguments=wanted)
    else:
        settings = dict(program=["run.py"], **_with_effect(dataclasses.asdict(config_of(wanted))))
    start = settings_of(catalogue.cell_at(cell.start), scale, more) if cell.start else None
    return json.loads(json.dumps(dict(settings, start=start, probes=cell.probes)))


def _key(settings):
    return json.dumps(settings, sort_keys=True)


def is_of(cell, scale, done):
    """Whether a finished run is what the cell says now, but for further settings."""
    wanted = arguments(cell, scale)
    if done["arguments"][:len(wanted)] != wanted:
        return False
    try:
        more = config_lib.settings_within(shlex.join(done["arguments"][len(wanted):]))
    except UserError:  # A flag of another version.
        return False
    return done["settings"] == settings_of(cell, scale, more)


class Runner:
    """Runs cells below one directory, at one scale. What is done is not run again; equal runs are run once."""

    def __init__(self, base, scale, more=None):
        """Reads what is done.

        Args:
          base: directory of all results.
          scale: paper or small.
          more: further settings of run.py. Raises `UserError` if they decide where results are.
        """
        for name in config_lib.settings_with("output"):
            if name in (more or {}):
                raise UserError(f"--flags: --{name} is the tables' own: leave it out")
        self._base, self._scale, self._more, self._finished = base, scale, more or {}, {}
        for name, study in catalogue.STUDIES.items():
            for cell in study.cells_of(scale):
                done = read_done(directory_of(base, scale, name, cell))
                if done is not None and done["same_as"] is None:
                    self._finished[_key(done["settings"])] = directory_of(base, scale, name, cell)

    def check(self, study, cell):
        """Raises `UserError` if the arguments of a cell are wrong, or change what its study compares."""
        ours = {**cell.flags, **(cell.small if self._scale == "small" else {})}
        for name in self._more:
            if name in ours:
                raise UserError(f"--flags: --{name} is what {study} decides ({cell.name}: {ours[name]}): leave it out")
        settings_of(cell, self._scale, self._more)
        if cell.start:
            self.check(cell.start[0], catalogue.cell_at(cell.start))
        if cell.transfer in ("finetune", "scratch"):
            from transfer import grid_search

            grid_search.check_settings(cell.transfer, _divided(cell, self._more)[1])

    def run(self, study, cell):
        """Runs a cell, and before it the one that it starts from; what it prints goes to run.log.

        Returns:
          dict: `arguments`, `settings`, `seconds` of all its starts, `results`, `probes`, `million_parameters`,
          `hardware`, `commits`; `diverged`, whether it did, or what it starts from, so that there are no results; and
          `same_as`: None, or the directory (below `base`) of another cell's run that is the same one.

        Raises:
          UserError: the run has failed otherwise, or was done with other settings.
          errors.Stopped: the run was stopped; the same call goes on from there.
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
        done = dict(done, arguments=_all_arguments(cell, self._scale, self._more))
        write_done(directory, done)
        return done

    def _run_new(self, cell, directory):
        started = cell.start and self.run(cell.start[0], catalogue.cell_at(cell.start))
        if started and started["diverged"]:
            return dict(results={}, probes={}, diverged=True, hardware=hardware(), seconds=0.0, commits=[commit()])
        directory = os.path.abspath(directory)
        with _noting_time(directory) as noted:
            try:
                done = self._results_of(cell, directory, started and self._place_of(cell.start, started["same_as"]))
            except JobFailed as error:
                if error.job_status != TrainingDiverged.status:
                    raise
                done = dict(results={}, probes={}, diverged=True)  # A result, too: it would diverge again.
        return {"hardware": hardware(), **done, **noted}

    def _results_of(self, cell, directory, weights):
        """Runs a cell's programs, and reads what they leave."""
        _call(command(cell, self._scale, directory, weights, self._more), directory)
        done = dict(results=_read(directory, "result.json"), probes={}, diverged=False)
        if not cell.transfer:
            done["million_parameters"] = count_parameters(directory) / 1e6
        if cell.probes:
            config = config_of([*arguments(cell, self._scale), *config_lib.as_flags(self._more)])
            _call([*probe_command(cell, config, directory), f"--out={directory}/probes.json"], directory)
            done["probes"] = _read(directory, "probes.json")
        return done

    def _place_of(self, place, same_as):
        """Where the weights of a finished run lie."""
        directory = directory_of(self._base, self._scale, place[0], catalogue.cell_at(place))
        return os.path.abspath(directory if same_as is None else os.path.join(self._base, same_as))


@contextlib.contextmanager
def _noting_time(directory):
    """Adds up the `seconds` of all starts of a run, and their `commits`, in a dict; also if it fails."""
    from runtime import storage

    path, elapsed = os.path.join(directory, "time.json"), progress.stopwatch()
    before = storage.read_json(path) or {}
    if not isinstance(before.get("seconds"), (int, float)) or not isinstance(before.get("commits"), list):
        before = dict(seconds=0.0, commits=[])
    noted = dict(before, commits=list(dict.fromkeys([*before["commits"], commit()])))
    try:
        yield noted
    finally:
        noted["seconds"] = round(before["seconds"] + elapsed(), 1)
        storage.write_json(path, noted)


def _read(directory, name):
    """A file of results that a program has written. Raises `UserError` if it is corrupt, or an accuracy is NaN."""
    from runtime import storage

    path = os.path.join(directory, name)
    found = storage.read_json(path)
    if found is None:
        raise UserError(f"{path}: it is missing or corrupt. Remove it, and run the same command again.")
    for key in (LBFGS, TOP_1, "test"):
        if key in found and not _is_share(found[key]):
            raise UserError(f"{path}: {key} is {found[key]}, not a number from 0 to 1. See run.log next to it.")
    return found


def _call(wanted, directory):
    """Runs Python with these arguments in the project's folder."""
    with child_processes.Launcher() as launcher:
        launcher.run(child_processes.Job((sys.executable, *wanted), directory, _ROOT))


def count_parameters(directory):
    """Weights of the encoder in a run's newest checkpoint, the moving statistics of batch norm left out."""
    import tensorflow as tf

    from checkpoints import checkpoint_files

    prefix = checkpoint_files.latest(directory)
    if prefix is None:
        raise UserError(f"{directory}: it has no checkpoint. Remove it, and run the same command again.")
    variables = tf.train.list_variables(prefix)
    return sum(math.prod(shape) for name, shape in variables if name.startswith("model/resnet_model/")
               and "/.OPTIMIZER_SLOT/" not in name and "/moving_" not in name)


def hardware():
    """Processor, its cores, and accelerators, in a line."""
    import tensorflow as tf

    accelerators = [device.device_type for device in tf.config.list_physical_devices() if device.device_type != "CPU"]
    name, cores = child_processes.processor()
    return ", ".join([name, "1 core" if cores == 1 else f"{cores} cores", *(f"{accelerators.count(kind)} x {kind}"
                                                for kind in sorted(set(accelerators)))])


def commit():
    """The version of the program by git, with + if files were changed; None outside of a repository."""
    try:
        asked = subprocess.run(["git", "describe", "--always", "--abbrev=10", "--dirty=+"], cwd=_ROOT,
                               capture_output=True, text=True, check=False)
    except OSError:  # There is no git.
        return None
    return asked.stdout.strip() or None


# ---------------------------------------------------------------------------------------------------------- measures


LBFGS, TOP_1 = "eval/lbfgs_top_1_accuracy", "eval/label_top_1_accuracy"


def accuracy(done):
    """What a finished cell is judged by: logistic regression on h, linear head, or metric of transfer.py; or None."""
    results = done["results"]
    return results.get(LBFGS, results.get(TOP_1, results.get("test")))
