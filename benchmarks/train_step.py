"""Speed of the training step, and time from the start of a process to its first step, against plain Keras in float32.

    python -m benchmarks.train_step [--batch=128] [--rounds=5]

ResNet-18 with the small stem at 32 pixels; forward, backward, losses and update, without data pipeline and blur.
"""

from __future__ import annotations

import argparse
import functools
import json

import numpy as np
import tensorflow as tf
import tf_keras as keras

import model as model_lib
import train
from benchmarks import measure, plain_keras
from config import Config

_SIZE, _CLASSES = 32, 10


def ours(batch, views, labels, **settings):
    """A call that takes one of our steps."""
    config = Config(resnet_depth=18, image_size=_SIZE, train_batch_size=batch, use_blur=False, train_steps=1000,
                    warmup_epochs=0.0, seed=1, **settings)
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, _CLASSES)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 50_000), model)
    run_steps = train.make_run_steps(train.TrainStep(model, optimizer, config, tf.distribute.get_strategy()))
    batches = iter(tf.data.Dataset.from_tensors((views, labels)).repeat())
    return lambda: run_steps(batches, tf.constant(1))[0]["train/total_loss"].numpy()


def plain(views, labels, precision="float32"):
    """A call that takes one step of the yardstick."""
    keras.mixed_precision.set_global_policy(precision)
    model = plain_keras.resnet18(_SIZE, classes=_CLASSES)
    keras.mixed_precision.set_global_policy("float32")
    step = plain_keras.make_step(model)
    return lambda: step(views, labels).numpy()


def make_batch(size):
    """Random (views, labels)."""
    random = np.random.default_rng(0)
    return (tf.constant(random.uniform(0, 1, (size, _SIZE, _SIZE, 6)).astype(np.float32)),
            tf.constant(random.integers(0, _CLASSES, size)))


def report_start(rounds):
    """Seconds of processes that import, build, trace and take one step of a batch of two."""
    children = {name: functools.partial(measure.in_child, "benchmarks.train_step", f"--first_step={name}")
                for name in ("ours", "yardstick")}
    seconds = measure.side_by_side(children, rounds)
    measure.report("train_step", "process start to end of first step", "s", seconds["ours"], seconds["yardstick"])


def main():
    """Measures and prints JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first_step", choices=("ours", "yardstick"), help="take one step in this process and end")
    arguments = parser.parse_args()
    if arguments.first_step:
        call = {"ours": functools.partial(ours, 2), "yardstick": plain}[arguments.first_step](*make_batch(2))
        print(json.dumps(call().tolist()))
        return
    measure.report_machine()
    report_start(min(arguments.rounds, 3))
    views, labels = make_batch(arguments.batch)
    calls = {"yardstick": plain(views, labels)}
    calls.update({precision: ours(arguments.batch, views, labels, precision=precision)
                  for precision in ("float32", "mixed_bfloat16")})
    calls["micro-batches of a quarter"] = ours(arguments.batch, views, labels, micro_batch_size=arguments.batch // 4)
    seconds = measure.side_by_side(calls, arguments.rounds)
    rates = {name: 2 * arguments.batch / value for name, value in seconds.items()}
    for name, rate in rates.items():
        if name != "yardstick":
            measure.report("train_step", f"{name}, batch {arguments.batch}", "views/s", rate, rates["yardstick"])


if __name__ == "__main__":
    main()
