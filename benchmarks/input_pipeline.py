"""Speed of our input pipeline and of a reimplementation of the original pipeline, in view pairs per second.

    python -m benchmarks.input_pipeline --tfds_dir=DIR --photos_dir=DIR

`--tfds_dir` must contain the prepared cifar10 data set (PNG, 32 pixels), and `--photos_dir` must
contain JPEG photographs. Our pipeline is `data.build_train_dataset`; the baseline is
`original_pipeline.build`. Both read the same records, shuffle them with different seeds, and
otherwise differ only in decoding, augmentation and batching. Blur is not measured, because it runs
on the device.
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

_WARM_UP = 1.0  # seconds for which tf.data tunes the parallelism of the baseline


def pairs_per_second(dataset, batch_size, seconds):
    """Returns the number of examples per second that a new iterator yields after a warm-up.

    The iterator exists only during the call, so it does not prefetch while another pipeline is
    measured. The warm-up also consumes the batches that were prefetched before the measurement.
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
    """Returns the median rates.

    The datasets are measured alternately, so that background load affects all of them equally.
    """
    rates = {name: [] for name in datasets}
    for _ in range(rounds):
        for name, dataset in datasets.items():
            rates[name].append(pairs_per_second(dataset, batch_size, seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def shuffled_records(source, config):
    """Returns an infinite dataset of records, shuffled as in training."""
    epochs = tf.data.Dataset.range(tf.int64.max)
    return epochs.flat_map(
        lambda epoch: source.records(config.train_split, epoch, buffer_mb=config.shuffle_buffer_mb)
    )


def decoded_images(source, config):
    """Returns batches with one value per decoded image, to measure decoding alone."""

    def decode(key, item, label):
        return tf.reduce_max(source.decode(item)[0, 0])

    return (
        shuffled_records(source, config)
        .map(decode, tf.data.AUTOTUNE)
        .batch(config.train_batch_size)
        .prefetch(2)
    )


def run_case(name, source, config, arguments):
    """Measures both pipelines and prints one JSON line."""
    batch_size = config.train_batch_size
    datasets = dict(
        ours=data.build_train_dataset(config, source, 0, batch_size),
        baseline=original_pipeline.build(
            shuffled_records(source, config),
            config.image_size,
            config.color_jitter_strength,
            batch_size,
        ),
    )
    rates = compare(datasets, batch_size, arguments.rounds, arguments.seconds)
    measure.report("input_pipeline", name, "pairs/s", rates["ours"], rates["baseline"])


def run_on_device(name, source, config, arguments):
    """Measures our pipeline with and without `--augment_on=device`, and prints one JSON line."""
    datasets = {
        place: data.build_train_dataset(
            config.replace(augment_on=place), source, 0, config.train_batch_size
        )
        for place in ("device", "host")
    }
    rates = compare(datasets, config.train_batch_size, arguments.rounds, arguments.seconds)
    measure.report("input_pipeline", name, "pairs/s", rates["device"], rates["host"])


def run_decoding(name, source, config, arguments):
    """Prints the rate of decoding alone, an upper bound for both pipelines."""
    datasets = {"decode": decoded_images(source, config)}
    rates = compare(datasets, config.train_batch_size, arguments.rounds, arguments.seconds)
    measure.report("input_pipeline", name, "images/s", rates["decode"], None)


def cases(arguments):
    """Yields (name, function, source, config) for each case."""
    cifar10 = TfdsSource("cifar10", arguments.tfds_dir)
    photos = datasets.open_source(f"folder:{arguments.photos_dir}")
    for strength in (1.0, 0.5):
        cifar10_config = Config(
            dataset="cifar10", image_size=32, train_batch_size=256, color_jitter_strength=strength
        )
        yield f"cifar10, 32 pixels, strength {strength}", run_case, cifar10, cifar10_config
    photos_config = Config(
        dataset="photos", image_size=224, train_batch_size=32, color_jitter_strength=1.0
    )
    yield "photographs, 224 pixels, strength 1.0", run_case, photos, photos_config
    for name, source, config in (
        ("cifar10, 32", cifar10, cifar10_config),
        ("photographs, 224", photos, photos_config),
    ):
        yield f"{name} pixels, --augment_on=device (baseline: host)", run_on_device, source, config
    yield "cifar10, decoding alone", run_decoding, cifar10, cifar10_config
    yield "photographs, decoding alone", run_decoding, photos, photos_config


def parse_arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tfds_dir", required=True, help="TFDS directory with the prepared cifar10 data set"
    )
    parser.add_argument("--photos_dir", required=True, help="directory of JPEG photographs")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements per pipeline; the median is reported"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement")
    parser.add_argument(
        "--only", default="", help="run only the cases whose names contain this text"
    )
    return parser.parse_args()


def main():
    """Prints one JSON line per case."""
    arguments = parse_arguments()
    measure.report_machine()
    for name, function, source, config in cases(arguments):
        if arguments.only in name:
            function(name, source, config, arguments)


if __name__ == "__main__":
    main()
