"""Fine-tuning and training from random weights with a grid of learning rates and weight decays (paper, B.8.2)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import shutil
import sys

import numpy as np
import tensorflow as tf

import config as config_lib
from checkpoints import weight_files
from runtime import child_processes, console, progress, storage
from runtime.errors import TrainingDiverged, UserError
from sources import datasets
from sources.source import Source
from transfer import measures, output, tasks
from transfer.tasks import Task

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TRIAL = "trial.json"  # marks the directory of a training


# --------------------------------------------------------------------------- fine-tuning and random initialisation


def training_flags(kind: str, task: Task, examples: int, learning_rate: float, weight_decay: float, steps: int,
                   batch_size: int = 256) -> dict:
    """Settings of a training of the paper's protocol (B.8.1), as a dict: all but splits, weights and directory.

    Args:
      kind: of `GRIDS`.
      task: `Task`.
      examples: of the split that is learnt from.
      learning_rate: for 256 images; the highest, from which a cosine leads to zero.
      weight_decay: as in the grid.
      steps, batch_size: how long, and how many images at once.
    """
    start = dict(finetune=dict(train_mode="finetune", zero_init_logits_layer=True),
                 scratch=dict(train_mode="supervised"))[kind]
    return dict(
        start, mode="train_then_eval", dataset=task.dataset, train_batch_size=batch_size, train_steps=steps,
        optimizer="momentum", momentum=0.9, learning_rate=f"{learning_rate:.6g}", warmup_epochs=0,
        weight_decay=f"{weight_decay / learning_rate:.6g}",
        batch_norm_decay=f"{max(1 - 10 * batch_size / examples, 0.9):.6g}", color_jitter_strength=0, use_blur=False,
        checkpoint_steps=max(1, steps // 10), keep_checkpoint_max=1, eval_protocol="linear_head", save_predictions=True)


def check_settings(kind: str, more: dict) -> None:
    """Raises `UserError` if further settings of a grid's trainings are wrong, or set by the grid itself."""
    ours = training_flags(kind, tasks.Task("digits", "digits"), 256, 0.1, 0.0, 1)
    others = ("train_split", "eval_split", "checkpoint", "seed",
              *config_lib.settings_with("network", "length", "output", "data_access"))
    for name in sorted({*ours, *others} & set(more)):
        raise UserError(f"--flags: --{name} is set by the grid search. Remove it.")
    start = dict(checkpoint="-") if kind == "finetune" else {}
    config_lib.from_arguments(config_lib.as_flags({**ours, **start, **more}))


class GridSearch:
    """Trainings with all settings of a grid, each a process of run.py; what is finished is not run again.

    The directory of a training, OUT/rate_R_decay_W, is deleted after it. The grid creates it, and marks it by a file
    with the digest of its settings. A directory without the mark is neither used nor deleted.
    """

    def __init__(self, kind: str, task: Task, source: Source, fixed: dict, out: str, settings: dict,
                 batch_size: int = 256, more: dict | None = None):
        """Checks the settings.

        Args:
          kind: of `GRIDS`.
          task: `Task`.
          source: its `source.Source`.
          fixed: settings that all trainings share: dict.
          out: directory of the results.
          settings: all settings that the results depend on, but for learning rates and weight decays: dict.
          batch_size: images at once.
          more: further settings of run.py.

        Raises:
          UserError: see `check_settings`; or the batch is larger than the data.
        """
        more = more or {}
        check_settings(kind, more)
        self._kind, self._task, self._fixed, self._out = kind, task, {**fixed, **more}, out
        self._batch_size, self._settings = batch_size, settings
        self._examples = {split: datasets.check_split(source, flag, split) for flag, split in (
            ("train", task.train_split), ("validation", task.validation_split), ("train", task.trainval_split),
            ("test", task.test))}
        examples = self._examples[task.train_split]
        if batch_size > examples:
            raise UserError(f"--batch_size={batch_size}: the split {task.train_split} has only {examples} examples. "
                            f"Use at most {examples}.")

    def select(self, grid: tasks.Grid, at_once: int) -> tuple[tuple[float, float], dict]:
        """The (learning rate, weight decay) that is best on the validation split, and all: pair -> metric.

        The metric of a training that diverged is None.

        Raises:
          TrainingDiverged: all of them diverged.
          UserError: a training failed otherwise, or files in the directory are not those of this grid.
        """
        pairs = {name_of_trial(*pair): pair for pair in itertools.product(grid.learning_rates, grid.weight_decays)}
        noted = {pair: self._noted(name, pair) for name, pair in pairs.items()}
        jobs = {self._job(name, self._task.train_split, self._task.validation_split, *pair, grid.steps): pair
                for name, pair in pairs.items() if noted[pair] is None}
        for job, pair in jobs.items():
            _claim(job.directory, self._digest(pair))
        with child_processes.Launcher() as launcher, contextlib.closing(launcher.run_all(jobs, at_once)) as ended:
            for job, error in progress.terminal_bar(ended, len(jobs), "trainings"):
                noted[jobs[job]] = self._note(job, jobs[job], error)
        found = {pair: each["metric"] for pair, each in noted.items()}
        if set(found.values()) == {None}:
            raise TrainingDiverged(f"--learning_rates: training has diverged with all {len(found)} settings. Use lower "
                                   "learning rates.")
        return max(found, key=lambda pair: -math.inf if found[pair] is None else found[pair]), found

    def test(self, pair: tuple[float, float], steps: int, at_once: int) -> tuple[np.ndarray, np.ndarray]:
        """Trains on all training and validation images; returns the labels and logits of the test images.

        It gets the devices of one of `at_once`, as those before it had. Raises `UserError` if it fails, and
        `TrainingDiverged` if it diverges.
        """
        job = self._job(f"best_{name_of_trial(*pair)}", self._task.trainval_split, self._task.test, *pair, steps)
        path = os.path.join(job.directory, f"predictions_{steps}.npz")
        _claim(job.directory, self._digest(pair))
        if not tf.io.gfile.exists(path):
            with child_processes.Launcher() as launcher:
                [(_, error)] = launcher.run_all([job], at_once)
            if error is not None and error.job_status == TrainingDiverged.status:
                raise TrainingDiverged(f"--learning_rates={pair[0]:g}: training with the best settings on training and "
                                       "validation images diverged. Remove this learning rate.") from error
            if error is not None:
                raise error
        return output.read_predictions(path)

    def _job(self, name, train, test, learning_rate, weight_decay, steps):
        settings = dict(
            training_flags(self._kind, self._task, self._examples[train], learning_rate, weight_decay, steps,
                           self._batch_size),
            **self._fixed, train_split=train, eval_split=test, model_dir=os.path.join(self._out, name))
        command = (sys.executable, os.path.join(_ROOT, "run.py"), *config_lib.as_flags(settings))
        return child_processes.Job(command, settings["model_dir"])

    def _digest(self, pair):
        """Digest of all settings of a training, with the digits that it gets."""
        return output.digest_of_json([self._settings, *(f"{value:.6g}" for value in pair)])

    def _noted(self, name, pair):
        """What `_note` wrote about a training; None if it is not finished. Raises `UserError` if it is of another."""
        path = os.path.join(self._out, f"{name}.json")
        noted = storage.read_json(path)
        if noted is None:
            return None
        output.check_digest(path, noted.get("settings"), self._digest(pair))
        if not storage.is_fraction(noted.get("metric")) and noted.get("metric", math.nan) is not None:
            raise UserError(f"{path}: metric={noted.get('metric')} is not a number from 0 to 1. Remove it.")
        return noted

    def _note(self, job, pair, error):
        """Records the metric of a training and deletes its directory: checkpoints of a grid would fill a disk.

        Returns:
          dict: `metric`, None if the training diverged, `settings`, a digest, and `command`.

        Raises:
          UserError: it failed otherwise, or its metric is not a number.
        """
        if error is not None and error.job_status != TrainingDiverged.status:
            raise error
        path, metric = os.path.join(job.directory, "result.json"), None
        if error is None:
            key = measures.RESULT_KEYS[self._task.metric]
            metric = (storage.read_json(path) or {}).get(key)
            if not storage.is_fraction(metric):
                raise UserError(f"{path}: {key} is {metric}, not a number from 0 to 1. See run.log next to it.")
        noted = dict(metric=metric, settings=self._digest(pair), command=shlex.join(job.command))
        name = os.path.basename(job.directory)
        storage.write_json(os.path.join(self._out, f"{name}.json"), noted)
        _claim(job.directory, self._digest(pair))  # Again: a directory that replaced it must not be deleted.
        shutil.rmtree(job.directory)
        console.log(f"{name}  {'diverged' if metric is None else f'{metric:.4f}'}")
        return noted


def _claim(directory, digest):
    """Creates and marks the directory of a training, unless it is there, marked with the same digest.

    Raises `UserError` if it is a link, or has files but another mark or none.
    """
    path = os.path.join(directory, _TRIAL)
    trial = None if os.path.islink(directory) else storage.read_json(path)
    if trial == dict(settings=digest):
        return
    if os.path.lexists(directory) and (os.path.islink(directory) or not os.path.isdir(directory) or any(
            not name.startswith(f"{_TRIAL}.") for name in os.listdir(directory))):  # trial.json.N.tmp: a killed start.
        raise UserError(f"--out: {directory} was not created by this search, or with other settings. Move it, or name "
                        "another --out.")
    storage.write_json(path, dict(settings=digest))


def name_of_trial(learning_rate: float, weight_decay: float) -> str:
    """A cell of the grid as the name of files."""
    return f"rate_{learning_rate:.3g}_decay_{weight_decay:.3g}"


def run_grid(arguments: argparse.Namespace) -> None:
    """Runs the grid search of parsed arguments: finetune or scratch."""
    kind, grid = arguments.kind, _grid_of(arguments)
    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")  # Their memory is for the trainings.
    task, config, source, settings = output.resolve_inputs(kind, arguments)
    fixed = {name: getattr(config, name) for name in config_lib.settings_with("network", "data_access")}
    fixed |= dict(seed=arguments.seed, checkpoint=_start_of(arguments.checkpoint) if kind == "finetune" else None)
    fixed = {name: value for name, value in fixed.items()
             if value is not None and name != "lineareval_while_pretraining"}  # That is for pretraining.
    search = GridSearch(kind, task, source, fixed, config.model_dir, settings, arguments.batch_size,
                        config_lib.parse_settings(arguments.flags))
    with output.open_output_dir(config, source, settings) as out:
        best, found = search.select(grid, arguments.jobs)
        labels, scores = search.test(best, grid.steps, arguments.jobs)
        title = "fine-tuned" if kind == "finetune" else "trained from random weights"
        output.write_results(title, task, out, labels, scores, dict(
            learning_rate=best[0], weight_decay=best[1], validation=[
                dict(learning_rate=rate, weight_decay=decay, metric=metric)
                for (rate, decay), metric in found.items()]))


def _start_of(path):
    """Resolves --checkpoint once, so that all trials start from the same weights even if newer checkpoints appear."""
    prefix, is_saved_model = weight_files.locate(path)
    return os.path.dirname(os.path.dirname(prefix)) if is_saved_model else prefix


def _grid_of(arguments):
    """The `Grid` that was asked for, or the paper's. Raises `UserError`."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(tasks.Grid)}
    grid = dataclasses.replace(tasks.GRIDS[arguments.kind], **{name: value for name, value in given.items()
                                                         if value is not None})
    for flag, values, lowest in (
            ("jobs", [arguments.jobs], 1), ("steps", [grid.steps], 1), ("batch_size", [arguments.batch_size], 1),
            ("seed", [arguments.seed], 0), ("weight_decays", grid.weight_decays, 0)):
        if min(values) < lowest:
            raise UserError(f"--{flag}={min(values)} is below {lowest}: raise it")
    if min(grid.learning_rates) <= 0:
        raise UserError(f"--learning_rates={min(grid.learning_rates):g} is not above 0: raise it")
    if "://" in (arguments.out or ""):
        raise UserError(f"--out={arguments.out}: the trainings' logs need a local directory: name one")
    pairs = list(itertools.product(grid.learning_rates, grid.weight_decays))
    if len({name_of_trial(*pair) for pair in pairs}) < len(pairs):
        raise UserError("--learning_rates and --weight_decays must differ in their first three digits")
    return grid
