"""Our implementations: the only module of the benchmarks that builds models, steps and input pipelines of SimCLR.

Each function returns an implementation for `measure.measure`, which receives a number of calls.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

import config as config_lib
import data
import evaluate
import metrics as metrics_lib
import model as model_lib
import objective
import train
from benchmarks import inputs
from benchmarks.measure import repeated
from checkpoints import records, restoring
from checkpoints.run_directory import RunContext
from large_batch import blocked_nt_xent
from probing import features
from runtime import signals, version
from sources import datasets, image_checks
from sources.source import Source

CLASSES = 10
_TEMPERATURE = 0.1
_TUNING_SECONDS = 1.0  # in which tf.data tunes the parallelism of the original's pipeline

Implementation = Callable[[int], Any]


def machine() -> Implementation:
    """Returns a dict with the processor and the accelerators, and the versions of the software."""
    line = dict(processor=records.machine(), versions=version.describe())
    return lambda calls: {"machine": line}


# ------------------------------------------------------------------------------------------------------------- training


def random_batch(batch: int, size: int) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
    """Returns two random views, each [batch, size, size, 3], and labels [batch], in the memory of the device."""
    views = tf.random.stateless_uniform([2, batch, size, size, 3], [1, 2])
    return tuple(tf.unstack(views)), tf.random.stateless_uniform(
        [batch], [1, 3], 0, CLASSES, tf.int64
    )


def run_context(config: config_lib.Config, source: Source) -> RunContext:
    """Returns the context of a run in this process."""
    strategy, stop = tf.distribute.get_strategy(), signals.StopSignals()
    return RunContext(config, source, strategy, is_chief=True, stop=stop)


def build(config: config_lib.Config) -> tuple[model_lib.Model, keras.optimizers.legacy.Optimizer]:
    """Returns a model with deterministic initial weights, and its optimizer."""
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, CLASSES)
    schedule = model_lib.build_schedule(config, 50_000)
    return model, model_lib.build_optimizer(config, schedule, model)


def train_step(
    config: config_lib.Config, model: model_lib.Model, optimizer: keras.optimizers.legacy.Optimizer
) -> train.TrainStep:
    """Returns a function that runs one step on (views, labels)."""
    return train.TrainStep(model, optimizer, config, tf.distribute.get_strategy())


def step(flags: list[str], with_input: bool) -> Implementation:
    """Training steps on random views in the memory of the device or, with `with_input`, on the data of --dataset."""
    config = config_lib.from_arguments(flags)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    run_steps = train.make_run_steps(train_step(config, *build(config)))
    if with_input:
        source = datasets.open_configured(config)
        batches = iter(train.train_dataset(run_context(config, source), 0))
    else:
        # The batch is not copied from the host.
        batches = itertools.repeat(random_batch(config.train_batch_size, config.image_size))
    return lambda calls: float(run_steps(batches, tf.constant(calls))[0]["train/total_loss"])


def profiled_step(flags: list[str], directory: str) -> Implementation:
    """Training steps with the input pipeline, of which a TensorBoard profile is written to `directory`."""
    run_steps = step(flags, with_input=True)
    run_steps(1)

    def profiled(calls):
        with tf.profiler.experimental.Profile(directory):
            return run_steps(calls)

    return profiled


def nt_xent(size: int, metrics: bool, blocked: bool) -> Implementation:
    """NT-Xent and its gradient for `size` projections of 128 dimensions, in blocks or with the whole matrix."""

    def form(z):
        if blocked:
            return blocked_nt_xent.contrastive_loss(z, True, _TEMPERATURE)
        loss, logits_ab, labels = objective.add_contrastive_loss(z, True, _TEMPERATURE)
        accuracy = metrics_lib.contrastive_accuracy(logits_ab, labels)
        return loss, accuracy, metrics_lib.contrastive_entropy(logits_ab)

    @tf.function(autograph=False)
    def compute(z):
        with tf.GradientTape() as tape:
            tape.watch(z)
            outputs = form(z)[: 3 if metrics else 1]
        return outputs, tape.gradient(outputs[0], z)

    compute(tf.ones([16, 128]))  # Libraries allocate their buffers here.
    z = tf.random.stateless_normal([size, 128], [0, 0])

    def call():
        outputs, gradient = compute(z)
        return [float(tensor) for tensor in (*outputs, tf.norm(gradient))]

    return repeated(call)


# ---------------------------------------------------------------------------------------------------------------- input


def open_records(flags: list[str]) -> tuple[config_lib.Config, Any, tf.data.Dataset]:
    """Returns the settings, the source and an infinite dataset of (key, item, label), shuffled as in training."""
    config = config_lib.from_arguments(flags)
    source = datasets.open_configured(config)
    split, megabytes = config.train_split, config.shuffle_buffer_mb
    records = tf.data.Dataset.range(tf.int64.max).flat_map(
        lambda epoch: source.records(split, epoch, buffer_mb=megabytes)
    )
    return config, source, records


def batches_of(dataset: tf.data.Dataset) -> Implementation:
    """Batches of a dataset, after one second in which batches are discarded."""
    iterator, begin = iter(dataset), time.perf_counter()
    while time.perf_counter() < begin + _TUNING_SECONDS:
        next(iterator)
    return lambda calls: [next(iterator) for _ in range(calls)] and None


def pipeline(flags: list[str]) -> Implementation:
    """Batches of our input pipeline."""
    config, source, _ = open_records(flags)
    return batches_of(data.build_train_dataset(config, source, 0, config.train_batch_size))


def decoding(flags: list[str]) -> Implementation:
    """Batches of one value per decoded image."""
    config, source, records = open_records(flags)
    decoded = records.map(
        lambda key, item, label: tf.reduce_max(source.decode(item)[0, 0]), tf.data.AUTOTUNE
    )
    return batches_of(decoded.batch(config.train_batch_size).prefetch(2))


# ----------------------------------------------------------------------------------------------------------- evaluation


def _run(flags: Sequence[str]) -> None:
    """Executes run.py, whose output goes to stderr."""
    subprocess.run([sys.executable, "run.py", *flags], stdout=sys.stderr, check=True)


def accuracies(flags: list[str], model_dir: str) -> Implementation:
    """A run, which computes only what is missing. Returns the results."""

    def run(calls):
        _run([*flags, f"--model_dir={model_dir}"])
        return json.loads(pathlib.Path(model_dir, "result.json").read_text())

    return run


def frozen_accuracies(flags: list[str], model_dir: str, neighbors: int) -> Implementation:
    """A run, and the evaluation of its encoder before and after training with the protocol of docs/parity.md."""

    def evaluated(calls):
        _run([*flags, f"--model_dir={model_dir}"])
        config = config_lib.from_arguments(flags)
        source = datasets.open_configured(config)
        keras.utils.set_random_seed(config.seed + 1)  # Training initializes weights with this seed.
        model = model_lib.build_model(config, source.num_classes)
        untrained = _classify(model, config, source, neighbors)
        restoring.load_model(model, model_dir, "--runs_dir")
        trained = _classify(model, config, source, neighbors)
        results = {"untrained": untrained, "pretrained": trained}
        return {f"{name}, {key}": results[name][key] for name in results for key in untrained}

    return evaluated


def _classify(
    model: model_lib.Model, config: config_lib.Config, source: Source, num_neighbors: int
) -> dict[str, float]:
    """Returns the accuracies of both classifiers on the representations h of a model."""
    from sklearn import linear_model, neighbors, pipeline, preprocessing

    strategy, function = tf.distribute.get_strategy(), features.encoder_function(model)
    train_set, test_set = (
        features.extract(strategy, function, evaluate.eval_batches(config, source, split, strategy))
        for split in (config.train_split, config.eval_split)
    )
    scaler = preprocessing.StandardScaler
    regressions = [
        pipeline.make_pipeline(scaler(), linear_model.LogisticRegression(C=c, max_iter=2000))
        for c in (1e-3, 1e-2, 1e-1)
    ]
    knn = neighbors.KNeighborsClassifier(num_neighbors, metric="cosine", algorithm="brute")
    return {
        "logistic regression": max(
            regression.fit(*train_set).score(*test_set) for regression in regressions
        ),
        "nearest neighbors": knn.fit(*train_set).score(*test_set),
    }


def open_folder(count: int) -> Implementation:
    """Finds and checks the images of a folder. The first call decodes a sample. Returns the number of images."""
    directory = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = f"{directory.name}/cache"
    inputs.image_folder(f"{directory.name}/images", count)

    def opened():
        config = config_lib.Config(dataset=f"folder:{directory.name}/images")
        source = datasets.open_configured(config)
        image_checks.check_images(config, source)
        return source.num_examples("train")

    return repeated(opened)
