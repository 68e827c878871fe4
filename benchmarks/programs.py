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
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras
from PIL import Image

import config as config_lib
import data
import metrics as metrics_lib
import model as model_lib
import objective
import train
from benchmarks.measure import repeated
from checkpoints import records
from checkpoints.run_context import RunContext
from large_batch import blocked_nt_xent
from runtime import signals, version
from runtime.pipelines import PARALLEL_CALLS, batched, with_prefetching
from sources import datasets, image_checks

CLASSES = 10
_TEMPERATURE = 0.1

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


def build(config: config_lib.Config) -> tuple[model_lib.Model, keras.optimizers.legacy.Optimizer]:
    """Returns a model with deterministic initial weights, and its optimizer."""
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, CLASSES)
    schedule = model_lib.build_schedule(config, 50_000)
    return model, model_lib.build_optimizer(config, schedule, model)


def step(flags: list[str], with_input: bool) -> Implementation:
    """Training steps on random views in the memory of the device or, with `with_input`, on the data of --dataset."""
    config = config_lib.from_arguments(flags)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    strategy, (model, optimizer) = tf.distribute.get_strategy(), build(config)
    run_steps = train.make_run_steps(train.TrainStep(model, optimizer, config, strategy))
    if with_input:
        source = datasets.open_configured(config)
        context = RunContext(config, source, strategy, is_chief=True, stop=signals.StopSignals())
        batches = iter(train.train_dataset(context, 0))
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

    @tf.function(autograph=False)
    def compute(z):
        with tf.GradientTape() as tape:
            tape.watch(z)
            if blocked:
                loss, *scalars = blocked_nt_xent.contrastive_loss(z, True, _TEMPERATURE)
            else:
                loss, logits_ab, labels = objective.add_contrastive_loss(z, True, _TEMPERATURE)
                scalars = [
                    metrics_lib.contrastive_accuracy(logits_ab, labels),
                    metrics_lib.contrastive_entropy(logits_ab),
                ]
        return [loss, *scalars] if metrics else [loss], tape.gradient(loss, z)

    compute(tf.ones([16, 128]))  # Libraries allocate their buffers here.
    z = tf.random.stateless_normal([size, 128], [0, 0])

    def call():
        outputs, gradient = compute(z)
        return [float(tensor) for tensor in (*outputs, tf.norm(gradient))]

    return repeated(call)


# ---------------------------------------------------------------------------------------------------------------- input


def pipeline(flags: list[str], decodes_only: bool = False) -> Implementation:
    """Batches of our input pipeline or, with `decodes_only`, of one value per decoded image."""
    config = config_lib.from_arguments(flags)
    source = datasets.open_configured(config)
    if decodes_only:
        values = source.records(config.train_split).map(
            lambda key, item, label: tf.reduce_max(source.decode(item)[0, 0]), PARALLEL_CALLS
        )
        dataset = with_prefetching(batched(values.repeat(), config.train_batch_size))
    else:
        dataset = data.build_train_dataset(config, source, 0, config.train_batch_size)
    iterator = iter(dataset)
    return lambda calls: [next(iterator) for _ in range(calls)] and None


# ----------------------------------------------------------------------------------------------------------- evaluation


def accuracies(flags: list[str], model_dir: str) -> Implementation:
    """A run of run.py, which computes only what is missing. Returns the results."""

    def run(calls):
        command = [sys.executable, "run.py", *flags, f"--model_dir={model_dir}"]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return json.loads(pathlib.Path(model_dir, "result.json").read_text())

    return run


def image_folder(count: int) -> tempfile.TemporaryDirectory:
    """Creates a directory with a folder `images`: up to 1,000 classes of links to a photograph of 500 x 375 pixels."""
    directory = tempfile.TemporaryDirectory()
    photograph = f"{directory.name}/photograph.jpg"
    values = np.random.default_rng(0).integers(0, 256, [12, 16, 3], np.uint8)
    Image.fromarray(values).resize([500, 375], Image.Resampling.BICUBIC).save(photograph)
    for index in range(count):
        folder = f"{directory.name}/images/{index % 1000:03}"
        os.makedirs(folder, exist_ok=True)
        os.symlink(photograph, f"{folder}/{index:07}.jpg")
    return directory


def open_folder(count: int) -> Implementation:
    """Finds and checks the images of a folder. The first call decodes a sample. Returns the number of images."""
    directory = image_folder(count)
    os.environ["XDG_CACHE_HOME"] = f"{directory.name}/cache"

    def opened():
        config = config_lib.Config(dataset=f"folder:{directory.name}/images")
        source = datasets.open_configured(config)
        image_checks.check_images(config, source)
        return source.num_examples("train")

    return repeated(opened)
