"""Training speed, and time from process start to the end of the first step, for this program and for plain Keras.

    python -m benchmarks.train_step [--batch=128] [--depth=18] [--rounds=5]

Measures a ResNet with the CIFAR stem at 32 pixels: forward and backward passes, losses and update,
but neither the input pipeline nor blur. The baseline runs in float32.
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


def make_our_step(depth, views, labels, **settings):
    """Returns a function that runs one step of our training loop."""
    config = Config(
        resnet_depth=depth,
        image_size=_SIZE,
        train_batch_size=len(labels),
        use_blur=False,
        train_steps=1000,
        warmup_epochs=0.0,
        seed=1,
        **settings,
    )
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, _CLASSES)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 50_000), model)
    run_steps = train.make_run_steps(
        train.TrainStep(model, optimizer, config, tf.distribute.get_strategy())
    )
    batches = iter(tf.data.Dataset.from_tensors((views, labels)).repeat())
    return lambda: run_steps(batches, tf.constant(1))[0]["train/total_loss"].numpy()


def make_baseline_step(depth, views, labels):
    """Returns a function that runs one float32 step of plain Keras."""
    step = plain_keras.make_step(plain_keras.resnet(depth, _SIZE, classes=_CLASSES))
    return lambda: step(views, labels).numpy()


def make_batch(size):
    """Returns two random views [size, 32, 32, 3] and labels [size]."""
    random = np.random.default_rng(0)
    return (
        tuple(tf.constant(random.uniform(0, 1, (2, size, _SIZE, _SIZE, 3)).astype(np.float32))),
        tf.constant(random.integers(0, _CLASSES, size)),
    )


def report_first_step(depth, rounds):
    """Reports the run time of a process that runs one step on a batch of two.

    The time includes imports, and building and tracing the model.
    """
    run_child = functools.partial(measure.in_child, "benchmarks.train_step", f"--depth={depth}")
    children = {
        name: functools.partial(run_child, f"--first_step={name}") for name in ("ours", "baseline")
    }
    seconds = measure.time_alternately(children, rounds)
    measure.report(
        "train_step",
        "process start to end of first step",
        "s",
        seconds["ours"],
        seconds["baseline"],
    )


def main():
    """Prints one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument(
        "--depth", type=int, choices=(10, 18, 50), default=18, help="depth of the ResNet"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--first_step", choices=("ours", "baseline"), help="run one step in this process and exit"
    )
    arguments = parser.parse_args()
    if arguments.first_step:
        views, labels = make_batch(2)
        make_step = make_our_step if arguments.first_step == "ours" else make_baseline_step
        print(json.dumps(make_step(arguments.depth, views, labels)().tolist()))
        return
    measure.report_machine()
    report_first_step(arguments.depth, min(arguments.rounds, 3))
    views, labels = make_batch(arguments.batch)
    steps = {"baseline": make_baseline_step(arguments.depth, views, labels)}
    make_step = functools.partial(make_our_step, arguments.depth, views, labels)
    steps.update(
        {precision: make_step(precision=precision) for precision in ("float32", "mixed_bfloat16")}
    )
    steps["four micro-batches"] = make_step(micro_batch_size=arguments.batch // 4)
    steps["XLA"] = make_step(jit_compile=True)
    seconds = measure.time_alternately(steps, arguments.rounds)
    rates = {name: 2 * arguments.batch / value for name, value in seconds.items()}
    for name, rate in rates.items():
        if name != "baseline":
            measure.report(
                "train_step", f"{name}, batch {arguments.batch}", "views/s", rate, rates["baseline"]
            )


if __name__ == "__main__":
    main()
