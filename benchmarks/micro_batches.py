"""Peak memory and time of a training step with micro-batches: ResNet-50, 32 pixels, batch size 4096.

    python -m benchmarks.micro_batches [--batch=4096] [--micro=64] [--precision=float32] [--whole]

The reported memory is the peak of the whole process. `--whole` also runs the baseline (the same
batch without micro-batches), which must fit in memory.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks import measure


def run_step(batch, micro, precision):
    """Runs one step in this process, and prints the time in seconds (including tracing) and the peak memory in MB."""
    import tensorflow as tf

    import model as model_lib
    import train
    from config import Config

    config = Config(
        resnet_depth=50,
        image_size=32,
        train_batch_size=batch,
        micro_batch_size=micro,
        precision=precision,
        seed=1,
    )
    model = model_lib.build_model(config, 10)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 50_000), model)
    run_steps = train.make_run_steps(
        train.TrainStep(model, optimizer, config, tf.distribute.get_strategy())
    )
    views = tuple(tf.random.stateless_uniform([2, batch, 32, 32, 3], [1, 2]))
    batches = iter(tf.data.Dataset.from_tensors((views, tf.range(batch) % 10)))
    begin = time.perf_counter()
    loss = float(run_steps(batches, tf.constant(1))[0]["train/contrast_loss"])
    print(
        json.dumps(
            dict(seconds=time.perf_counter() - begin, megabytes=measure.peak_megabytes(), loss=loss)
        )
    )


def main():
    """Prints JSON lines for memory and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4096, help="images per step")
    parser.add_argument("--micro", type=int, default=64, help="images per micro-batch")
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--whole", action="store_true", help="also measure the step without micro-batches"
    )
    parser.add_argument("--child", action="store_true", help="run the step in this process")
    arguments = parser.parse_args()
    if arguments.child:
        run_step(arguments.batch, arguments.micro, arguments.precision)
        return
    measure.report_machine()
    settings = ["--child", f"--batch={arguments.batch}", f"--precision={arguments.precision}"]
    ours = measure.in_child("benchmarks.micro_batches", *settings, f"--micro={arguments.micro}")
    baseline = (
        measure.in_child("benchmarks.micro_batches", *settings, "--micro=0")
        if arguments.whole
        else {}
    )
    case = (
        f"ResNet-50, batch {arguments.batch} in micro-batches of {arguments.micro},"
        f" {arguments.precision}"
    )
    for quantity, unit in (("megabytes", "MB"), ("seconds", "s")):
        measure.report(
            "micro_batches", case, unit, ours[quantity], baseline.get(quantity), loss=ours["loss"]
        )


if __name__ == "__main__":
    main()
