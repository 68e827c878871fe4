"""View pairs per second of `data.build_train_dataset` and of the original's formulas, side by side.

    python -m benchmarks.input_pipeline --tfds_dir=DIR --photos_dir=DIR

`--tfds_dir` holds a prepared cifar10 (PNG, 32 pixels), `--photos_dir` JPEG photographs. Both sides read the same
records through the same shuffling; what differs is all that follows. Blur is left out: it runs on the device on both
sides.
"""

from __future__ import annotations

import argparse
import statistics
import time

import tensorflow as tf

import data
from benchmarks import measure, original_pipeline
from config import Config
from sources import datasets
from sources.tfds_source import TfdsSource

_WARM_UP = 1.0  # seconds in which a new iterator finds its parallelism


def pairs_per_second(dataset, batch_size, seconds):
    """Examples per second of one new iterator once it has warmed up.

    The iterator ends with the call, so that nothing of it runs on while another pipeline is measured; and when time
    begins to count, the batches that had been prefetched while nobody took them are gone.
    """
    iterator = iter(dataset)
    next(iterator)
    begin = time.perf_counter()
    while time.perf_counter() < begin + _WARM_UP:
        next(iterator)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        next(iterator)
        count += 1
    return count * batch_size / (time.perf_counter() - begin)


def compare(datasets, batch_size, rounds, seconds):
    """Median rate of every dataset, taken in turn so that what disturbs one disturbs all."""
    rates = {name: [] for name in datasets}
    for _ in range(rounds):
        for name, dataset in datasets.items():
            rates[name].append(pairs_per_second(dataset, batch_size, seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def shuffled(source, config):
    """Records over endless epochs, shuffled as for training."""
    epochs = tf.data.Dataset.range(tf.int64.max)
    return epochs.flat_map(lambda epoch: source.records(
        config.train_split, epoch, buffer_mb=config.shuffle_buffer_mb))


def decoded(source, config):
    """Images decoded and thrown away."""
    def decode(key, item, label):
        return tf.reduce_max(source.decode(item)[0, 0])
    return shuffled(source, config).map(decode, tf.data.AUTOTUNE).batch(config.train_batch_size).prefetch(2)


def run_case(name, source, config, arguments):
    """Prints the line of one case."""
    batch_size = config.train_batch_size
    datasets = dict(
        ours=data.build_train_dataset(config, source, 0, batch_size),
        yardstick=original_pipeline.build(
            shuffled(source, config), config.image_size, config.color_jitter_strength, batch_size))
    rates = compare(datasets, batch_size, arguments.rounds, arguments.seconds)
    measure.report("input_pipeline", name, "pairs/s", rates["ours"], rates["yardstick"])


def run_decoding(name, source, config, arguments):
    """Prints what decoding alone would allow; it is the same on both sides."""
    rate = compare({"decode": decoded(source, config)}, config.train_batch_size, arguments.rounds, arguments.seconds)
    measure.report("input_pipeline", name, "images/s", rate["decode"], None)


def cases(arguments):
    """(name, function, source, config) of every case."""
    cifar10 = TfdsSource("cifar10", arguments.tfds_dir)
    photos = datasets.open_source(f"folder:{arguments.photos_dir}")
    for strength in (1.0, 0.5):
        small = Config(
            dataset="cifar10", image_size=32, train_batch_size=256, color_jitter_strength=strength)
        yield f"cifar10, 32 pixels, strength {strength}", run_case, cifar10, small
    large = Config(dataset="photos", image_size=224, train_batch_size=32, color_jitter_strength=1.0)
    yield "photographs, 224 pixels, strength 1.0", run_case, photos, large
    yield "cifar10, decoding alone", run_decoding, cifar10, small
    yield "photographs, decoding alone", run_decoding, photos, large


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tfds_dir", required=True, help="TFDS directory with a prepared cifar10.")
    parser.add_argument("--photos_dir", required=True, help="Directory of JPEG photographs.")
    parser.add_argument("--rounds", type=int, default=5, help="Turns of each side; the median counts.")
    parser.add_argument("--seconds", type=float, default=2.0, help="Seconds that one turn counts.")
    parser.add_argument("--only", default="", help="Only the cases whose name has this in it.")
    return parser.parse_args()


def main():
    """Prints one JSON line a case."""
    arguments = parse_arguments()
    measure.report_machine()
    for name, function, source, config in cases(arguments):
        if arguments.only in name:
            function(name, source, config, arguments)


if __name__ == "__main__":
    main()
