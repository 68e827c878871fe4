"""Grid search over learning rates and weight decays for fine-tuning or training from scratch (paper, B.8.1)."""

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
_MARKER = "trial.json"  # marks a directory as created by the search


def trial_settings(
    protocol: str,
    task: Task,
    num_examples: int,
    learning_rate: float,
    weight_decay: float,
    steps: int,
    batch_size: int = 256,
) -> dict:
    """Returns a dict of a trial's settings (paper, B.8.1), excluding splits, initial weights and model_dir.

    Args:
      protocol: key of `GRIDS`.
      task: `Task`.
      num_examples: size of the training split.
      learning_rate: initial learning rate of the cosine schedule, per 256 images.
      weight_decay: value from the grid.
      steps: training steps.
      batch_size: images per step.
    """
    train_mode = dict(
        finetune=dict(train_mode="finetune", zero_init_logits_layer=True),
        scratch=dict(train_mode="supervised"),
    )[protocol]
    return dict(
        train_mode,
        mode="train_then_eval",
        dataset=task.dataset,
        train_batch_size=batch_size,
        train_steps=steps,
        optimizer="momentum",
        momentum=0.9,
        learning_rate=f"{learning_rate:.6g}",
        warmup_epochs=0,
        weight_decay=f"{weight_decay / learning_rate:.6g}",
        batch_norm_decay=f"{max(1 - 10 * batch_size / num_examples, 0.9):.6g}",
        color_jitter_strength=0,
        use_blur=False,
        checkpoint_steps=max(1, steps // 10),
        keep_checkpoint_max=1,
        eval_protocol="linear_head",
        save_predictions=True,
    )


def check_settings(protocol: str, extra_settings: dict) -> None:
    """Raises `UserError` if extra settings for the trials are invalid or are set by the search itself."""
    settings = trial_settings(protocol, tasks.Task("digits", "digits"), 256, 0.1, 0.0, 1)
    reserved = {
        *settings,
        "train_split",
        "eval_split",
        "checkpoint",
        "seed",
        *config_lib.settings_with("network", "length", "output", "data_access"),
    }
    for name in sorted(reserved & set(extra_settings)):
        raise UserError(
            f"--flags: --{name} is set by the grid search. Remove --{name} from --flags."
        )
    checkpoint = dict(checkpoint="-") if protocol == "finetune" else {}
    config_lib.from_arguments(config_lib.as_flags({**settings, **checkpoint, **extra_settings}))


class GridSearch:
    """A grid search that runs each trial as a run.py process. Finished trials are not repeated.

    Each trial uses the directory OUT/rate_R_decay_W, which is deleted when the trial ends. The
    search creates this directory and marks it with a file that contains a digest of the trial's
    settings. The search never uses or deletes a directory without this file.
    """

    def __init__(
        self,
        protocol: str,
        task: Task,
        source: Source,
        shared_settings: dict,
        out: str,
        settings: dict,
        batch_size: int = 256,
        extra_settings: dict | None = None,
    ):
        """Checks the settings.

        Args:
          protocol: key of `GRIDS`.
          task: `Task`.
          source: `source.Source` of the task's data set.
          shared_settings: run.py settings that all trials share.
          out: output directory.
          settings: the settings in the digests: all that affect the results, except learning rates
            and weight decays.
          batch_size: images per step.
          extra_settings: additional run.py settings from the user.

        Raises:
          UserError: a setting is invalid (see `check_settings`), or the batch size exceeds the
            training split's size.
        """
        extra_settings = extra_settings or {}
        check_settings(protocol, extra_settings)
        self._protocol, self._task, self._out = protocol, task, out
        self._shared_settings, self._settings = {**shared_settings, **extra_settings}, settings
        self._batch_size = batch_size
        self._num_examples = {
            split: datasets.check_split(source, flag, split)
            for flag, split in (
                ("train", task.train_split),
                ("validation", task.validation_split),
                ("train", task.trainval_split),
                ("test", task.test),
            )
        }
        num_examples = self._num_examples[task.train_split]
        if batch_size > num_examples:
            raise UserError(
                f"--batch_size={batch_size}: the split {task.train_split} has only {num_examples} "
                f"examples. Use at most {num_examples}."
            )

    def select(self, grid: tasks.Grid, num_jobs: int) -> tuple[tuple[float, float], dict]:
        """Runs the trials, `num_jobs` at a time, and selects hyper-parameters on the validation split.

        Returns:
          The best (learning rate, weight decay) pair, and a dict mapping pairs to metrics (None for
          diverged trials).

        Raises:
          TrainingDiverged: all trials diverged.
          UserError: a trial failed for another reason, or the directory contains files written with
            different settings.
        """
        pairs = {
            trial_name(*pair): pair
            for pair in itertools.product(grid.learning_rates, grid.weight_decays)
        }
        trials = {pair: self._read_trial(name, pair) for name, pair in pairs.items()}
        jobs = {
            self._job(
                name, self._task.train_split, self._task.validation_split, *pair, grid.steps
            ): pair
            for name, pair in pairs.items()
            if trials[pair] is None
        }
        for job, pair in jobs.items():
            _claim(job.directory, self._digest(pair))
        with (
            child_processes.Launcher() as launcher,
            contextlib.closing(launcher.run_all(jobs, num_jobs)) as finished,
        ):
            for job, error in progress.terminal_bar(finished, len(jobs), "trials"):
                trials[jobs[job]] = self._finish_trial(job, jobs[job], error)
        metrics = {pair: trial["metric"] for pair, trial in trials.items()}
        if set(metrics.values()) == {None}:
            raise TrainingDiverged(
                f"--learning_rates: all {len(metrics)} trials diverged. Use lower learning rates."
            )
        return (
            max(metrics, key=lambda pair: -math.inf if metrics[pair] is None else metrics[pair]),
            metrics,
        )

    def test(
        self, pair: tuple[float, float], steps: int, num_jobs: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Trains on the trainval split with the selected hyper-parameters. Returns the test split's labels and logits.

        The run uses as many devices as each trial would use if `num_jobs` trials ran in parallel.
        Raises `TrainingDiverged` if the run diverges, and `UserError` if it fails for another
        reason.
        """
        job = self._job(
            f"best_{trial_name(*pair)}", self._task.trainval_split, self._task.test, *pair, steps
        )
        path = os.path.join(job.directory, f"predictions_{steps}.npz")
        _claim(job.directory, self._digest(pair))
        if not tf.io.gfile.exists(path):
            with child_processes.Launcher() as launcher:
                [(_, error)] = launcher.run_all([job], num_jobs)
            if error is not None and error.job_status == TrainingDiverged.status:
                raise TrainingDiverged(
                    f"--learning_rates={pair[0]:g}: the final training run, on the trainval split, "
                    "diverged. Remove this learning rate."
                ) from error
            if error is not None:
                raise error
        return output.read_predictions(path)

    def _job(self, name, train_split, eval_split, learning_rate, weight_decay, steps):
        settings = dict(
            trial_settings(
                self._protocol,
                self._task,
                self._num_examples[train_split],
                learning_rate,
                weight_decay,
                steps,
                self._batch_size,
            ),
            **self._shared_settings,
            train_split=train_split,
            eval_split=eval_split,
            model_dir=os.path.join(self._out, name),
        )
        command = (sys.executable, os.path.join(_ROOT, "run.py"), *config_lib.as_flags(settings))
        return child_processes.Job(command, settings["model_dir"])

    def _digest(self, pair):
        """Returns the digest of a trial's settings, with numbers formatted as they are passed to run.py."""
        return output.json_digest([self._settings, *(f"{value:.6g}" for value in pair)])

    def _read_trial(self, name, pair):
        """Returns a trial's record, or None if the trial is not finished.

        Raises `UserError` if the record is invalid, or if its settings differ from those of this
        search.
        """
        path = os.path.join(self._out, f"{name}.json")
        trial = storage.read_json(path)
        if trial is None:
            return None
        output.check_digest(path, trial.get("settings"), self._digest(pair))
        if (
            not storage.is_fraction(trial.get("metric"))
            and trial.get("metric", math.nan) is not None
        ):
            raise UserError(
                f"{path}: metric={trial.get('metric')} is not a number from 0 to 1. Delete the"
                " file."
            )
        return trial

    def _finish_trial(self, job, pair, error):
        """Records a trial's metric and deletes the trial's directory, so that checkpoints do not fill the disk.

        Returns:
          A dict with `metric` (None if training diverged), `settings` (a digest) and `command`.

        Raises:
          UserError: the trial failed for a reason other than divergence, or its metric is not a
            number.
        """
        if error is not None and error.job_status != TrainingDiverged.status:
            raise error
        path, metric = os.path.join(job.directory, "result.json"), None
        if error is None:
            key = measures.RESULT_KEYS[self._task.metric]
            metric = (storage.read_json(path) or {}).get(key)
            if not storage.is_fraction(metric):
                raise UserError(
                    f"{path}: {key} is {metric}, not a number from 0 to 1. See run.log in the same "
                    "directory."
                )
        trial = dict(metric=metric, settings=self._digest(pair), command=shlex.join(job.command))
        name = os.path.basename(job.directory)
        storage.write_json(os.path.join(self._out, f"{name}.json"), trial)
        # The user may have replaced the directory during the trial.
        _claim(job.directory, self._digest(pair))
        shutil.rmtree(job.directory)
        console.log(f"{name}  {'diverged' if metric is None else f'{metric:.4f}'}")
        return trial


def _claim(directory, digest):
    """Creates a trial's directory and marker file unless both already exist.

    Raises `UserError` if the directory is a link, or contains files but no marker with this digest.
    """
    path = os.path.join(directory, _MARKER)
    marker = None if os.path.islink(directory) else storage.read_json(path)
    if marker == dict(settings=digest):
        return
    # If the search is killed while it writes the marker, trial.json.N.simclr_tmp is left behind.
    if os.path.lexists(directory) and (
        os.path.islink(directory)
        or not os.path.isdir(directory)
        or any(not name.startswith(f"{_MARKER}.") for name in os.listdir(directory))
    ):
        raise UserError(
            f"--out={os.path.dirname(directory)}: {directory} was not created by this search, or"
            " was created with different settings. Move it elsewhere, or use another --out."
        )
    storage.write_json(path, dict(settings=digest))


def trial_name(learning_rate: float, weight_decay: float) -> str:
    """Returns the base name for a trial's files and directory."""
    return f"rate_{learning_rate:.3g}_decay_{weight_decay:.3g}"


def run_grid(arguments: argparse.Namespace) -> None:
    """Runs the grid search (`finetune` or `scratch`) specified by the parsed arguments."""
    protocol, grid = arguments.protocol, _build_grid(arguments)
    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")  # Keep the GPU memory free for the trials.
    task, config, source, settings = output.resolve_inputs(protocol, arguments)
    shared = {
        name: getattr(config, name)
        for name in config_lib.settings_with("network", "data_access")
        # This setting applies only to pretraining.
        if name != "lineareval_while_pretraining"
    }
    shared |= dict(
        seed=arguments.seed,
        checkpoint=_resolve_checkpoint(arguments.checkpoint) if protocol == "finetune" else None,
    )
    shared = {name: value for name, value in shared.items() if value is not None}
    search = GridSearch(
        protocol,
        task,
        source,
        shared,
        config.model_dir,
        settings,
        arguments.batch_size,
        config_lib.parse_settings(arguments.flags),
    )
    with output.open_output_dir(config, source, settings) as out:
        best, metrics = search.select(grid, arguments.jobs)
        labels, scores = search.test(best, grid.steps, arguments.jobs)
        title = "fine-tuning" if protocol == "finetune" else "training from random weights"
        output.write_results(
            title,
            task,
            out,
            labels,
            scores,
            dict(
                learning_rate=best[0],
                weight_decay=best[1],
                validation=[
                    dict(learning_rate=rate, weight_decay=decay, metric=metric)
                    for (rate, decay), metric in metrics.items()
                ],
            ),
        )


def _resolve_checkpoint(path):
    """Resolves --checkpoint once, so that all trials start from the same weights even if newer checkpoints appear."""
    prefix, is_saved_model = weight_files.locate(path)
    return os.path.dirname(os.path.dirname(prefix)) if is_saved_model else prefix


def _build_grid(arguments):
    """Returns the paper's `Grid`, modified according to the parsed arguments. Raises `UserError` for invalid values."""
    overrides = {
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(tasks.Grid)
    }
    grid = dataclasses.replace(
        tasks.GRIDS[arguments.protocol],
        **{name: value for name, value in overrides.items() if value is not None},
    )
    for flag, values, minimum in (
        ("jobs", [arguments.jobs], 1),
        ("steps", [grid.steps], 1),
        ("batch_size", [arguments.batch_size], 1),
        ("seed", [arguments.seed], 0),
        ("weight_decays", grid.weight_decays, 0),
    ):
        if min(values) < minimum:
            raise UserError(
                f"--{flag}={min(values)}: the value is too small. Use at least {minimum}."
            )
    if min(grid.learning_rates) <= 0:
        raise UserError(
            f"--learning_rates={min(grid.learning_rates):g}: the value is too small. Use values"
            " above 0."
        )
    if "://" in (arguments.out or ""):
        raise UserError(
            f"--out={arguments.out}: the trials' logs need a local directory. Use a local path."
        )
    pairs = list(itertools.product(grid.learning_rates, grid.weight_decays))
    if len({trial_name(*pair) for pair in pairs}) < len(pairs):
        raise UserError(
            "--learning_rates, --weight_decays: two values have the same first three significant"
            " digits. Remove one of them."
        )
    return grid
