"""Linear evaluation: l2-regularized logistic regression on frozen features (paper, B.8.1)."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tf_keras as keras

import evaluate
from checkpoints import loading, records
from probing import features, logistic_regression
from runtime import progress, storage
from runtime.errors import UserError
from runtime.paths import hashed_name
from transfer import measures, output

L2_OF_SUM_CHOICES = tuple(np.logspace(5, -6, 45).tolist())  # The strongest choice is first.


def linear(
    train: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    metric: str,
    l2_of_sum_choices: Sequence[float] = L2_OF_SUM_CHOICES,
    previous: Mapping[float, float] | tuple = (),
    on_result: Callable[[dict[float, float]], None] = lambda values: None,
) -> tuple[dict, np.ndarray]:
    """Evaluates logistic regression on frozen features (paper, B.8.1).

    The l2 strength, expressed as `l2_of_sum` (see `logistic_regression`), is selected on
    `validation`. If there are ties, the strongest is selected. The final model is fitted on `train`
    and `validation` combined and evaluated once on `test`.

    Args:
      train, validation, test: (features [n, d], labels [n] or [n, classes]).
      metric: key of `measures.RESULT_KEYS`.
      l2_of_sum_choices: candidate strengths, strongest first.
      previous: results of an interrupted sweep (a dict mapping strengths to metrics), which are not
        recomputed.
      on_result: function that receives all results so far, after each fit.

    Returns:
      A dict of entries for result.json, and the scores [n, classes] of the test examples. In the
      dict, `l2` is the selected strength, and `validation` is a list of dicts with the entries `l2`
      and `metric`.

    Raises:
      UserError: see `measures.measure`.
    """
    path = logistic_regression.LogisticPath(*train)
    values = dict(previous)
    for l2_of_sum in progress.track(l2_of_sum_choices, "logistic regressions"):
        if l2_of_sum not in values:
            values[l2_of_sum] = measures.measure(
                metric, validation[1], path.fit(l2_of_sum).scores(validation[0])
            )
            on_result(values)
    best = max(l2_of_sum_choices, key=values.get)
    trainval = (np.concatenate(pair) for pair in zip(train, validation))
    scores = logistic_regression.LogisticPath(*trainval).fit(best).scores(test[0])
    results = [dict(l2=l2_of_sum, metric=values[l2_of_sum]) for l2_of_sum in l2_of_sum_choices]
    return dict(l2=best, validation=results), scores


def run_linear(arguments: argparse.Namespace) -> None:
    """Runs the linear evaluation specified by the parsed arguments.

    Features and results of the sweep are kept in a directory whose name contains a hash of
    everything that they depend on, so that an interrupted command resumes.
    """
    inputs = output.resolve_inputs(arguments)
    task, model = inputs.task, inputs.load_network()
    settings = inputs.settings(
        inputs.config, weights=loading.weights_digest(model), metric=task.metric, splits=task.splits
    )
    with inputs.open_output_dir():
        directory = hashed_name(os.path.join(inputs.config.model_dir, "linear"), settings)
        with records.timing(directory):
            train, validation, test = _extract_features(inputs, model, directory)
            path = os.path.join(directory, "sweep.json")
            results, scores = linear(
                train,
                validation,
                test,
                task.metric,
                previous={
                    float(key): value for key, value in storage.read_json(path, default={}).items()
                },
                on_result=functools.partial(storage.write_json, path),
            )
        inputs.write_results(test[1], scores, results)
        records.finish(directory, settings, results)


def _extract_features(
    inputs: output.Inputs, model: keras.Model, directory: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns features [n, d] and labels [n] or [n, classes] of the splits.

    The features are written to `directory`. If they already exist, they are read from there.
    """
    feature_sets, encoder = [], features.encoder_function(model)
    for name, split in inputs.task.splits.items():
        path = os.path.join(directory, f"features_{name}.npz")
        if not tf.io.gfile.exists(path):
            strategy = tf.distribute.get_strategy()
            batches = evaluate.eval_batches(inputs.config, inputs.source, split, strategy)
            vectors, labels = features.extract(strategy, encoder, batches, f"features of {split}")
            storage.write_arrays(path, vectors=vectors, labels=labels)
        feature_sets.append(output.read_arrays(path, "vectors", "labels"))
    (_, labels), *others = feature_sets
    if not logistic_regression.has_two_classes(labels) or not all(len(pair[1]) for pair in others):
        splits = ", ".join(f"--{name}={split}" for name, split in inputs.task.splits.items())
        raise UserError(
            f"{splits}: there are too few labeled examples. Use a training split with two classes (or"
            " with and without a label), and validation and test splits with labeled examples."
        )
    return feature_sets
