"""Linear evaluation: l2-regularized logistic regression on frozen features (paper, B.8.1)."""

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
from runtime import console, progress, storage
from runtime.errors import UserError
from transfer import measures, output

L2_OF_SUM_CHOICES = tuple(map(float, np.logspace(5, -6, 45)))  # The strongest choice is first.
_Examples = tuple[np.ndarray, np.ndarray]  # The arrays are features and labels.


def sweep(
    train: _Examples,
    validation: _Examples,
    metric: str,
    l2_of_sum_choices: Sequence[float] = L2_OF_SUM_CHOICES,
    previous: dict[float, float] | None = None,
    on_result: Callable[[dict[float, float]], None] = lambda values: None,
) -> tuple[float, dict[float, float]]:
    """Selects the l2 regularization strength, expressed as `l2_of_sum` (see `logistic_regression`).

    Args:
      train: (features [n, d], labels [n] or [n, classes]) of the training examples.
      validation: (features, labels) of the validation examples, in the same form as `train`.
      metric: key of `measures.METRICS`.
      l2_of_sum_choices: candidate strengths, strongest first.
      previous: results of an interrupted sweep (a dict mapping strengths to metrics), which are not
        recomputed.
      on_result: function that receives all results so far, after each fit.

    Returns:
      The best strength (the strongest if there are ties), and a dict mapping strengths to metrics.

    Raises:
      UserError: see `measures.measure`.
    """
    path, values = logistic_regression.LogisticPath(*train), dict(previous or {})
    for l2_of_sum in progress.track(
        l2_of_sum_choices, len(l2_of_sum_choices), "logistic regressions"
    ):
        if l2_of_sum not in values:
            values[l2_of_sum] = measures.measure(
                metric, validation[1], path.fit(l2_of_sum).scores(validation[0])
            )
            on_result(values)
    return max(l2_of_sum_choices, key=values.get), values


def linear(
    train: _Examples,
    validation: _Examples,
    test: _Examples,
    metric: str,
    l2_of_sum_choices: Sequence[float] = L2_OF_SUM_CHOICES,
    **sweep_arguments: Any,
) -> tuple[dict, np.ndarray]:
    """Evaluates logistic regression on frozen features (paper, B.8.1).

    The l2 strength is selected on `validation`. The final model is fitted on `train` and
    `validation` combined and evaluated once on `test`.

    Args:
      train, validation, test: (features [n, d], labels [n] or [n, classes]).
      metric: key of `measures.METRICS`.
      l2_of_sum_choices: candidate strengths, strongest first.
      sweep_arguments: `previous` and `on_result`; see `sweep`.

    Returns:
      A dict of entries for result.json, and the scores [n, classes] of the test examples. In the
      dict, `l2` is the selected strength, and `validation` is a list of dicts with the entries `l2`
      and `metric`.
    """
    best, values = sweep(train, validation, metric, l2_of_sum_choices, **sweep_arguments)
    trainval = (np.concatenate(pair) for pair in zip(train, validation))
    scores = logistic_regression.LogisticPath(*trainval).fit(best).scores(test[0])
    return (
        dict(
            l2=best,
            validation=[
                dict(l2=l2_of_sum, metric=values[l2_of_sum]) for l2_of_sum in l2_of_sum_choices
            ],
        ),
        scores,
    )


def _read_or_extract_features(config, source, task, arguments, digest):
    """Returns a pair (features, labels) for each of the training, validation and test splits.

    Features are extracted once and cached in the output directory, together with the digest of the
    settings.
    """
    feature_sets, encoder = [], None
    for name, split in dict(
        train=task.train_split, validation=task.validation_split, test=task.test
    ).items():
        path = os.path.join(config.model_dir, f"features_{name}.npz")
        if not tf.io.gfile.exists(path):
            if encoder is None:
                model = model_lib.build_model(config, None)
                for note in restoring.load_parts(
                    model, arguments.checkpoint, ("encoder",)
                ).file.notes:
                    console.log(note)
                encoder = features.encoder_function(model)
            strategy = tf.distribute.get_strategy()
            batches = evaluate.eval_batches(config, source, split, strategy)
            vectors, labels = features.extract(strategy, encoder, batches, f"features of {split}")
            storage.write_arrays(path, vectors=vectors, labels=labels, settings=digest)
        feature_sets.append(_read_features(path, digest))
    train, validation, test = feature_sets
    if (
        not logistic_regression.has_two_classes(train[1])
        or not len(validation[1])
        or not len(test[1])
    ):
        raise UserError(
            f"--train={task.train_split}, --validation={task.validation_split}, --test={task.test}:"
            " there are too few labeled examples. Use a training split with at least two classes"
            " (or, with multiple labels per example, a label that some examples have and others"
            " lack), and validation and test splits with labeled examples."
        )
    return feature_sets


def _read_features(path, digest):
    """Reads features [n, d] and labels [n] or [n, classes] from a feature file.

    Raises `UserError` if the file is invalid.
    """
    vectors, labels, settings = output.read_arrays(path, "vectors", "labels", "settings")
    output.check_digest(path, str(settings), digest)
    if (
        output.find_label_problem(labels)
        or vectors.dtype.kind != "f"
        or vectors.ndim != 2
        or len(labels) != len(vectors)
    ):
        raise UserError(
            f"{path}: the file contains {vectors.dtype} {vectors.shape} and {labels.dtype} "
            f"{labels.shape}, not features [n, d] and their labels. Delete the file."
        )
    if not np.isfinite(vectors).all():
        raise UserError(
            f"{path}: the features contain NaN or Inf. Use a checkpoint from before training"
            " diverged, and a new --out."
        )
    return vectors, labels


def run_linear(arguments: argparse.Namespace) -> None:
    """Runs the linear evaluation specified by the parsed arguments."""
    task, config, source, settings = output.resolve_inputs("linear", arguments)
    with output.open_output_dir(config, source, settings) as out:
        path, digest = os.path.join(out, "sweep.json"), output.json_digest(settings)

        def write_sweep(values):
            metrics = {repr(float(l2_of_sum)): value for l2_of_sum, value in values.items()}
            storage.write_json(path, dict(settings=digest, metrics=metrics))

        feature_sets = _read_or_extract_features(config, source, task, arguments, digest)
        results, scores = linear(
            *feature_sets, task.metric, previous=_read_sweep(path, digest), on_result=write_sweep
        )
        title, test_labels = f"linear evaluation of {arguments.checkpoint}", feature_sets[2][1]
        output.write_results(title, task, out, test_labels, scores, results)


def _read_sweep(path, digest):
    """Reads a dict mapping strengths to metrics from an interrupted sweep.

    Raises `UserError` if the file is invalid.
    """
    sweep = storage.read_json(path)
    if sweep is None:
        return {}
    output.check_digest(path, sweep.get("settings"), digest)
    try:
        values = {float(l2_of_sum): value for l2_of_sum, value in sweep["metrics"].items()}
    except (KeyError, AttributeError, ValueError):
        values = {0.0: None}  # The check below rejects None.
    if not all(map(storage.is_fraction, values.values())):
        raise UserError(f"{path}: the metrics are not numbers from 0 to 1. Delete the file.")
    return values
