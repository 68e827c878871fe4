"""Parts `step` and `input` of `benchmarks.accelerator`: speed of the training step, and time waiting for input."""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

import model as model_lib
import train
from benchmarks import input_pipeline, measure, plain_keras
from config import Config
from runtime import child_processes
from sources import datasets

_CLASSES = 10
_PHOTO_SHAPE = (300, 400)  # height and width of the generated photographs
# Up to this size, the generated images are PNG files without blur, as for CIFAR-10.
_LARGEST_SMALL_IMAGE = 32


class Repeat:
    """An iterator that always returns the same batch, without copying it from the host."""

    def __init__(self, views, labels):
        self._batch = views, labels

    def __iter__(self):
        return self

    def __next__(self):
        return self._batch


def random_batch(batch, size):
    """Returns two random views [batch, size, size, 3] and labels [batch], in the memory of the device."""
    views = tf.random.stateless_uniform([2, batch, size, size, 3], [1, 2])
    return tuple(views), tf.random.stateless_uniform([batch], [1, 3], 0, _CLASSES, tf.int64)


def build_run_steps(depth, size, batch, precision, jit_compile=False, **settings):
    """Returns the function of `train.make_run_steps` for a new model."""
    if jit_compile:
        settings["jit_compile"] = True
    config = Config(
        resnet_depth=depth,
        image_size=size,
        train_batch_size=batch,
        precision=precision,
        train_steps=10_000,
        warmup_epochs=0.0,
        learning_rate=0.01,
        seed=1,
        **settings,
    )
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, _CLASSES)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 50_000), model)
    return train.make_run_steps(
        train.TrainStep(model, optimizer, config, tf.distribute.get_strategy())
    )


def _our_steps(steps, views, labels, **settings):
    """Returns a function that runs `steps` steps of our training loop and waits for the loss."""
    run_steps, batches = build_run_steps(**settings), Repeat(views, labels)
    return lambda: float(run_steps(batches, tf.constant(steps))[0]["train/total_loss"])


def _keras_steps(steps, views, labels, jit_compile, **settings):
    """Returns a function that runs `steps` steps of plain Keras and waits for the loss."""
    step = plain_keras.make_step(plain_keras.resnet(**settings, classes=_CLASSES), jit_compile)

    @tf.function
    def run_steps(count):
        total = tf.zeros([])
        for _ in tf.range(count):
            total += step(views, labels)[0]
        return total

    return lambda: float(run_steps(tf.constant(steps)))


def step(depth, size, batch, steps, rounds, precision, jit_compile):
    """Yields the speed of our training step, in images/s. The baseline is plain Keras.

    Args:
      depth: depth of the ResNet.
      size: height and width of the images, in pixels.
      batch: images per step. Each image has two views.
      steps: steps per call.
      rounds: timed calls of each implementation.
      precision: float32 (without TF32), tf32, mixed_float16 or mixed_bfloat16.
      jit_compile: whether XLA compiles the steps.
    """
    tf.config.experimental.enable_tensor_float_32_execution(precision != "float32")
    views, labels = random_batch(batch, size)
    settings = dict(
        steps=steps,
        views=views,
        labels=labels,
        depth=depth,
        size=size,
        jit_compile=jit_compile,
        precision="float32" if precision == "tf32" else precision,
    )
    builders = {
        "ours": lambda: _our_steps(**settings, batch=batch, use_blur=False),
        "Keras": lambda: _keras_steps(**settings, cifar_stem=Config(image_size=size).cifar_stem),
    }
    if size > _LARGEST_SMALL_IMAGE:
        builders["ours with blur"] = lambda: _our_steps(**settings, batch=batch, use_blur=True)
    functions, first_seconds, errors = measure.first_calls(builders)
    rates = {
        name: steps * batch / value
        for name, value in measure.time_alternately(functions, rounds).items()
    }
    case = (
        f"step, ResNet-{depth}, {size} pixels, batch {batch},"
        f" {precision}{', XLA' if jit_compile else ''}"
    )
    for name in builders:
        if name in errors:
            yield dict(benchmark="accelerator", case=f"{case}, {name}", error=errors[name])
        elif name != "Keras" or "ours" in errors:
            yield measure.line(
                "accelerator",
                f"{case}, {name}",
                "images/s",
                rates[name] if name != "Keras" else None,
                rates.get("Keras"),
                first_call_seconds=round(first_seconds[name], 1),
            )


# ------------------------------------------------------------------------------------------------------------- input


def write_textures(directory, count, size):
    """Writes random textures in two classes: JPEG photographs, or PNG images if `size` is at most 32 pixels."""
    height, width = _PHOTO_SHAPE if size > _LARGEST_SMALL_IMAGE else (size, size)
    random = np.random.default_rng(0)
    for index in range(count):
        coarse = random.uniform(0, 255, (1, height // 10, width // 10, 3))
        image = tf.image.resize(coarse, [height, width], "bicubic")[0] + random.normal(
            0, 4, (height, width, 3)
        )
        image = tf.saturate_cast(image, tf.uint8)
        folder = os.path.join(directory, str(index % 2))
        os.makedirs(folder, exist_ok=True)
        if size > _LARGEST_SMALL_IMAGE:
            tf.io.write_file(
                os.path.join(folder, f"{index}.jpg"), tf.io.encode_jpeg(image, quality=90)
            )
        else:
            tf.io.write_file(os.path.join(folder, f"{index}.png"), tf.io.encode_png(image))


def _images_per_second(call, images_per_call, seconds):
    """Returns the rate of calls that are repeated for `seconds`, after two untimed calls."""
    call()
    call()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        call()
        count += 1
    return count * images_per_call / (time.perf_counter() - begin)


def input_share(depth, size, batch, steps, seconds, images, precision):
    """Yields the speed of training with the input pipeline, compared with the speed on constant data, in images/s.

    `waiting_share`, 1 - ours / baseline, is the share of the time in which the device waits for
    input, including copies from the host. `constant_on_host` is the speed on constant data that is
    copied from the host in each step.

    Args:
      depth: depth of the ResNet.
      size: height and width of the network's input, in pixels.
      batch: images per step.
      steps: steps per call.
      seconds: duration of each measurement.
      images: number of generated images.
      precision: precision of the network.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_textures(directory, images, size)
        settings = dict(
            use_blur=size > _LARGEST_SMALL_IMAGE,
            dataset=f"folder:{directory}",
            color_jitter_strength=1.0 if size > _LARGEST_SMALL_IMAGE else 0.5,
        )
        config = Config(image_size=size, train_batch_size=batch, seed=1, **settings)
        source, strategy = datasets.open_source(config.dataset), tf.distribute.get_strategy()
        run_steps = build_run_steps(depth, size, batch, precision, **settings)

        def rate(batches):
            def call():
                return float(run_steps(batches, tf.constant(steps))[0]["train/total_loss"])

            return _images_per_second(call, batch * steps, seconds)

        dataset = train.train_dataset(config, source, strategy, 0)
        alone = input_pipeline.pairs_per_second(dataset, batch, seconds)
        constant = next(iter(dataset))
        rates = {
            "device": rate(Repeat(*(tf.identity(tensor) for tensor in constant))),
            "host": rate(iter(tf.data.Dataset.from_tensors(constant).repeat())),
            "pipeline": rate(iter(dataset)),
        }
    yield measure.line(
        "accelerator",
        f"input, ResNet-{depth}, {size} pixels, batch {batch}, {precision}",
        "images/s",
        rates["pipeline"],
        rates["device"],
        waiting_share=round(1 - rates["pipeline"] / rates["device"], 3),
        constant_on_host=round(rates["host"]),
        pipeline_alone=round(alone),
        cores=child_processes.cpu_info()[1],
    )
