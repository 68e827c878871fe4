"""Linear evaluation: l2-regularised logistic regression on frozen features (paper, B.8.1)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import evaluate
import model as model_lib
from checkpoints import restoring
from probing import features, logistic_regression
from runtime import progress, storage
from runtime.errors import UserError
from transfer import measures, output

L2_OF_SUM_CHOICES = tuple(map(float, np.logspace(5, -6, 45)))  # the strongest first
_Examples = tuple[np.ndarray, np.ndarray]  # features, labels


# ------------------------------------------------------------------------------------------------- linear evaluation


def sweep(train: _Examples, validation: _Examples, metric: str, l2_of_sum_choices: Sequence[float] = L2_OF_SUM_CHOICES,
          found: dict[float, float] | None = None, note: Callable[[dict[float, float]], None] = lambda found: None
          ) -> tuple[float, dict[float, float]]:
    """Chooses the strength of l2 regularisation; its unit is that of `logistic_regression`'s `l2_of_sum`.

    Args:
      train: (features [n, d], labels [n] or [n, classes]) of the training examples.
      validation: the same for the validation examples.
      metric: name in `METRICS`.
      l2_of_sum_choices: strengths, the strongest first.
      found: what is known already: dict: strength -> metric.
      note: function to call with what has been found so far.

    Returns:
      the best strength, the stronger one of equals; and a dict: strength -> metric.

    Raises:
      UserError: see `measure`.
    """
    path, found = logistic_regression.LogisticPath(*train), dict(found or {})
    for l2_of_sum in progress.track(l2_of_sum_choices, len(l2_of_sum_choices), "logistic regressions"):
        if l2_of_sum not in found:
            found[l2_of_sum] = measures.measure(metric, validation[1], path.fit(l2_of_sum).scores(validation[0]))
            note(found)
    return max(l2_of_sum_choices, key=found.get), found


def linear(train: _Examples, validation: _Examples, test: _Examples, metric: str,
           l2_of_sum_choices: Sequence[float] = L2_OF_SUM_CHOICES, **resumed: Any) -> tuple[dict, np.ndarray]:
    """Evaluates logistic regression on frozen features (paper, B.8.1).

    The strength of l2 is selected on `validation`. The final model is fitted on `train` and `validation`, and tested
    once.

    Args:
      train, validation, test: (features [n, d], labels [n] or [n, classes]).
      metric: name in `METRICS`.
      l2_of_sum_choices: strengths to choose from, the strongest first.
      resumed: `found` and `note` of `sweep`.

    Returns:
      dict with keys of result.json: `l2`, the strength in the same unit, and `validation`, a list of dicts of `l2` and
      `metric`; and the scores [n, classes] of `test`.
    """
    best, found = sweep(train, validation, metric, l2_of_sum_choices, **resumed)
    trainval = (np.concatenate(pair) for pair in zip(train, validation))
    scores = logistic_regression.LogisticPath(*trainval).fit(best).scores(test[0])
    return dict(l2=best, validation=[
        dict(l2=l2_of_sum, metric=found[l2_of_sum]) for l2_of_sum in l2_of_sum_choices]), scores


def _read_or_extract_features(config, source, task, arguments, digest):
    """Returns (features, labels) of the training, validation and test splits.

    Features that the directory already has are read from it; `digest` is that of the settings.
    """
    parts, encoder = [], None
    for name, split in dict(train=task.train_split, validation=task.validation_split, test=task.test).items():
        path = os.path.join(config.model_dir, f"features_{name}.npz")
        if not tf.io.gfile.exists(path):
            if encoder is None:
                model = model_lib.build_model(config, None)
                restoring.load_parts(model, arguments.checkpoint, ("encoder",))
                encoder = features.encoder_function(model)
            strategy = tf.distribute.get_strategy()
            batches = evaluate.eval_batches(config, source, split, strategy)
            vectors, labels = features.extract(strategy, encoder, batches, f"features of {split}")
            storage.write_arrays(path, vectors=vectors, labels=labels, settings=digest)
        parts.append(_read_features(path, digest))
    train, validation, test = parts
    if not logistic_regression.has_two_classes(train[1]) or not len(validation[1]) or not len(test[1]):
        raise UserError(
            f"--train={task.train_split}, --validation={task.validation_split}, --test={task.test}: too few labelled "
            "examples. Training needs two classes (or, with several labels per example, one label that some examples "
            "have and some do not); validation and test need at least one example.")
    return parts


def _read_features(path, digest):
    """Features [n, d] and labels [n] or [n, classes] of a file that `_features` wrote. Raises `UserError`."""
    vectors, labels, settings = output.read_arrays(path, "vectors", "labels", "settings")
    output.check_digest(path, str(settings), digest)
    if (output.problem_of_labels(labels) or vectors.dtype.kind != "f" or vectors.ndim != 2
            or len(labels) != len(vectors)):
        raise UserError(f"{path}: {vectors.dtype} {vectors.shape} and {labels.dtype} {labels.shape} are not features "
                        "and labels. Remove it.")
    if not np.isfinite(vectors).all():
        raise UserError(f"{path}: the features contain NaN or infinite values. Use a checkpoint from before its "
                        "training diverged, and another --out.")
    return vectors, labels


def run_linear(arguments: argparse.Namespace) -> None:
    """Runs the linear evaluation of parsed arguments."""
    task, config, source, settings = output.resolve_inputs("linear", arguments)
    with output.open_output_dir(config, source, settings) as out:
        path, digest = os.path.join(out, "sweep.json"), output.digest_of_json(settings)
        parts = _read_or_extract_features(config, source, task, arguments, digest)
        results, scores = linear(
            *parts, task.metric, found=_read_sweep(path, digest), note=lambda found: storage.write_json(
                path, dict(settings=digest, metrics={repr(float(key)): value for key, value in found.items()})))
        output.write_results(f"linear transfer of {arguments.checkpoint}", task, out, parts[2][1], scores, results)


def _read_sweep(path, digest):
    """The metrics that an interrupted sweep has written: dict: strength -> metric. Raises `UserError`."""
    sweep = storage.read_json(path)
    if sweep is None:
        return {}
    output.check_digest(path, sweep.get("settings"), digest)
    try:
        found = {float(key): value for key, value in sweep["metrics"].items()}
    except (KeyError, AttributeError, ValueError):
        found = {0.0: None}
    if not all(map(storage.is_fraction, found.values())):
        raise UserError(f"{path}: its metrics are not numbers from 0 to 1. Remove it.")
    return found
