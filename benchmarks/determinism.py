"""Training speed with and without `--deterministic`, including the input pipeline.

    python -m benchmarks.determinism [--batch=128] [--rounds=3]

Trains a ResNet-18 with the ImageNet stem on the data set `digits` at 32 pixels. Each measurement
runs in a separate process.
"""

from __future__ import annotations

import argparse
import json
import statistics

import tensorflow as tf

import train
from benchmarks import measure
from config import Config
from sources import digits

_STEPS_PER_CALL = 10


def images_per_second(batch, rounds):
    """Returns the median training speed, in images/s."""
    config = Config(
        dataset="digits",
        resnet_depth=18,
        image_size=32,
        stem="imagenet",
        train_batch_size=batch,
        seed=1,
        train_steps=1000,
        model_dir="unused",
    )
    source, strategy = digits.digits_source(), tf.distribute.get_strategy()
    state = train.build_training_state(config, source, strategy, config.model_dir)
    run_steps = train.make_run_steps(
        train.TrainStep(state.model, state.optimizer, config, strategy)
    )
    batches = iter(train.train_dataset(config, source, strategy, 0))
    call = lambda: run_steps(batches, tf.constant(_STEPS_PER_CALL))[0]["train/total_loss"].numpy()  # noqa: E731
    seconds = measure.time_alternately({"steps": call}, rounds)
    return batch * _STEPS_PER_CALL / seconds["steps"]


def main():
    """Prints one JSON line. `ours` is measured with `--deterministic`, and `baseline` is measured without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--child", choices=("deterministic", "default"), help="run the measurement in this process"
    )
    arguments = parser.parse_args()
    if arguments.child:
        if arguments.child == "deterministic":
            tf.config.experimental.enable_op_determinism()
        print(json.dumps(images_per_second(arguments.batch, arguments.rounds)))
        return
    measure.report_machine()
    rates = {"deterministic": [], "default": []}
    for _ in range(arguments.rounds):
        for name, values in rates.items():
            values.append(
                measure.in_child(
                    "benchmarks.determinism",
                    f"--child={name}",
                    f"--batch={arguments.batch}",
                    f"--rounds={arguments.rounds}",
                )
            )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    measure.report(
        "determinism",
        f"batch {arguments.batch}",
        "images/s",
        medians["deterministic"],
        medians["default"],
    )


if __name__ == "__main__":
    main()
