"""Grid search over learning rates and weight decays for fine-tuning or training from scratch (paper, B.8.1)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from checkpoints import loading, records
from checkpoints.lock import Lock
from checkpoints.records import Record
from config import Config, as_flags, parse_settings, settings_with
from runtime import child_processes, console, progress, storage
from runtime.errors import TrainingDiverged, UserError
from runtime.paths import ROOT, hashed_name
from transfer import measures, output, tasks
from transfer.tasks import Task


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
    train_mode: Any = dict(
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
        learning_rate=_rounded(learning_rate),
        warmup_epochs=0,
        weight_decay=_rounded(weight_decay / learning_rate),
        batch_norm_decay=_rounded(max(1 - 10 * batch_size / num_examples, 0.9)),
        color_jitter_strength=0,
        use_blur=False,
        checkpoint_steps=max(1, steps // 10),
        keep_checkpoint_max=1,
        eval_protocol="linear_head",
        save_predictions=True,
    )


def _rounded(value: float) -> float:
    """Returns a number as it is written in a command, so that names do not depend on rounding errors."""
    return float(f"{value:.6g}")


def check_settings(protocol: str, extra_settings: dict) -> None:
    """Raises `UserError` if extra settings for the trials are invalid or are set by the search itself."""
    settings = trial_settings(protocol, tasks.Task("digits", "digits"), 256, 0.1, 0.0, 1)
    reserved = {
        *settings,
        "train_split",
        "eval_split",
        "checkpoint",
        "seed",
        *settings_with("network", "length", "output", "data_access"),
    }
    for name in sorted(reserved.intersection(extra_settings)):
        raise UserError(
            f"--flags: --{name} is set by the grid search. Remove --{name} from --flags."
        )
    checkpoint = dict(checkpoint="-") if protocol == "finetune" else {}
    Config(**{**settings, **checkpoint, **extra_settings})


@dataclasses.dataclass(frozen=True)
class Trial(child_processes.Job):
    """A run.py process with one pair of hyper-parameters, and its run directory.

    Attributes:
      settings: everything that the results depend on. The name of the directory contains their hash.
    """

    settings: dict = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class GridSearch:
    """A grid search that runs each trial as a run.py process. Finished trials are not repeated.

    Attributes:
      inputs: protocol, network, data and output directory.
      shared_settings: run.py settings that all trials share.
      weights: digest of the initial weights, or None if they are random.
      arguments: the parsed arguments, with the grid.
      lock: lock of the output directory, which all trials inherit.
    """

    inputs: output.Inputs
    shared_settings: dict
    weights: str | None
    arguments: argparse.Namespace
    lock: Lock

    def trial(
        self,
        learning_rate: float,
        weight_decay: float,
        train_split: str,
        eval_split: str,
        prefix: str = "",
    ) -> Trial:
        """Returns the trial with the given hyper-parameters and splits.

        The name of its directory starts with `prefix`. Raises `UserError` if a setting is invalid.
        """
        settings = dict(
            trial_settings(
                self.inputs.protocol,
                self.inputs.task,
                self.inputs.source.num_examples(train_split),
                learning_rate,
                weight_decay,
                self.arguments.steps,
                self.arguments.batch_size,
            ),
            **self.shared_settings,
            train_split=train_split,
            eval_split=eval_split,
        )
        identity = self.inputs.settings(Config(**settings), weights=self.weights)
        name = f"{prefix}rate_{learning_rate:.3g}_decay_{weight_decay:.3g}"
        directory = hashed_name(os.path.join(self.inputs.config.model_dir, name), identity)
        flags = as_flags(dict(settings, model_dir=directory))
        command = (sys.executable, os.path.join(ROOT, "run.py"), *flags)
        return Trial(command, directory, inherited=self.lock.descriptors, settings=identity)

    def select(self) -> tuple[tuple[float, float], dict[tuple[float, float], float | None]]:
        """Runs the trials of the grid that are not finished, and evaluates all on the validation split.

        Returns:
          The best (learning rate, weight decay) pair, and a dict mapping pairs to metrics (None for
          diverged trials).

        Raises:
          TrainingDiverged: all trials diverged.
          UserError: a trial failed for another reason.
        """
        trials = {
            pair: self.trial(*pair, self.inputs.task.train_split, self.inputs.task.validation_split)
            for pair in itertools.product(
                self.arguments.learning_rates, self.arguments.weight_decays
            )
        }
        # Equal hyper-parameters lead to equal trials.
        self.run(
            [trial for trial in dict.fromkeys(trials.values()) if not Record.read(trial.directory)]
        )
        metrics = {pair: self.metric(trial) for pair, trial in trials.items()}
        candidates = {pair: metric for pair, metric in metrics.items() if metric is not None}
        if not candidates:
            raise TrainingDiverged(
                f"--learning_rates: all {len(metrics)} trials diverged. Use lower learning rates."
            )
        return max(candidates, key=candidates.get), metrics

    def run(self, trials: Sequence[Trial], keep_files: bool = False) -> None:
        """Runs trials, `arguments.jobs` at a time, and writes their records.

        Unless `keep_files` is set, all other files of a finished trial are deleted, so that checkpoints
        do not fill the disk. Raises `JobFailed` if a trial fails for a reason other than divergence.
        """
        with (
            _Launcher() as launcher,
            contextlib.closing(launcher.run_all(trials, self.arguments.jobs)) as jobs,
        ):
            for trial, error in progress.terminal_bar(jobs, len(trials), "trials"):
                if error is not None and error.job_status != TrainingDiverged.status:
                    raise error
                directory = trial.directory
                path = os.path.join(directory, f"result_{self.arguments.steps}.json")
                results = {} if error else storage.read_json(path)
                records.finish(directory, trial.settings, results, error is not None)
                metric = self.metric(trial)
                value = "diverged" if metric is None else f"{metric:.4f}"
                console.log(f"{os.path.basename(directory)}  {value}")
                if not keep_files:
                    _remove_all_but_record(directory)

    def metric(self, trial: Trial) -> float | None:
        """Returns the metric of a finished trial, or None if training diverged."""
        record, metric = Record.read(trial.directory), self.inputs.task.metric
        if not record or record.diverged:
            return None
        return measures.check_defined(metric, record.results[measures.RESULT_KEYS[metric]])


def _remove_all_but_record(directory: str) -> None:
    """Deletes the contents of a finished trial's directory, except for its record."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        elif entry.name != records.FILE:
            os.remove(entry)


class _Launcher(child_processes.Launcher):
    """A launcher that records the duration of each job."""

    def run(self, job: child_processes.Job, devices: str | None = None) -> None:
        with records.timing(job.directory):
            super().run(job, devices)


def run_grid(arguments: argparse.Namespace) -> None:
    """Runs the grid search (`finetune` or `scratch`) specified by the parsed arguments."""
    if "://" in str(arguments.out):
        raise UserError(
            f"--out={arguments.out}: the trials' logs need a local directory. Use a local path."
        )
    tf.config.set_visible_devices([], "GPU")  # Keep the GPU memory free for the trials.
    extra_settings = parse_settings(arguments.flags)
    check_settings(arguments.protocol, extra_settings)
    inputs = output.resolve_inputs(arguments)
    shared = storage.without_none(
        {
            name: getattr(inputs.config, name)
            for name in settings_with("network", "data_access", "pixels")
        }
    )
    del shared["lineareval_while_pretraining"]  # applies only to pretraining
    shared.update(extra_settings, seed=arguments.seed)
    weights = None
    if inputs.protocol == "finetune":
        shared["checkpoint"] = inputs.checkpoint
        weights = loading.weights_digest(inputs.load_network())
    with inputs.open_output_dir() as lock:
        search = GridSearch(inputs, shared, weights, arguments, lock)
        best, metrics = search.select()
        final = search.trial(*best, inputs.task.trainval_split, inputs.task.test, prefix="best_")
        if not Record.read(final.directory):
            search.run([final], keep_files=True)  # The run uses as many devices as a trial.
        if search.metric(final) is None:
            raise TrainingDiverged(
                f"--learning_rates={best[0]:g}: the final run diverged. Remove this learning rate."
            )
        path = os.path.join(final.directory, f"predictions_{arguments.steps}.npz")
        inputs.write_results(
            *output.read_predictions(path),
            dict(
                learning_rate=best[0],
                weight_decay=best[1],
                validation=[
                    dict(learning_rate=rate, weight_decay=decay, metric=metric)
                    for (rate, decay), metric in metrics.items()
                ],
            ),
            Record.read(final.directory).results.get("computed_from"),
        )
