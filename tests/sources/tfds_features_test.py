"""Checks data sets that users have prepared with TFDS: features, formats of files, and hints about directories."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from numpy.testing import assert_array_equal

from config import Config
from sources import datasets
from support.errors import rejects

features = tfds.features
CLASSES = features.ClassLabel(names=["crow", "gull", "wren"])
DEEP = features.Image(shape=(None, None, 1), dtype=np.uint16, encoding_format="png")
DEPTH = features.Image(shape=(None, None, 1), dtype=np.float32)


def pixels(number, channels=3, dtype=np.uint8):
    return np.random.default_rng(number).integers(0, 200, [6, 5, channels]).astype(dtype)


def prepare(directory, kinds, example, keys=None, **options):
    """Prepares a data set `own_set` with eight training and four test examples."""

    class OwnSet(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=features.FeaturesDict(kinds), supervised_keys=keys
            )

        def _split_generators(self, manager):
            del manager
            return {"train": self._generate_examples(8), "test": self._generate_examples(4)}

        def _generate_examples(self, count):
            return ((number, example(number)) for number in range(count))

    OwnSet(data_dir=str(directory), **options).download_and_prepare()
    tfds.core.registered._DATASET_REGISTRY.pop("own_set", None)  # As in another process.
    return str(directory)


def rows_of(source, split="train"):
    """Returns the pixels of the records and the labels, sorted by pixels."""
    rows = [
        (source.decode(item).numpy(), label.numpy()) for _, item, label in source.records(split)
    ]
    return sorted(rows, key=lambda row: row[0].tobytes())


def expected_rows(label):
    rows = [(pixels(number), label(number)) for number in range(8)]
    return sorted(rows, key=lambda row: row[0].tobytes())


@pytest.mark.parametrize(
    "kinds, example, keys, settings, names, label",
    [
        (
            {"img": features.Image(), "cls": CLASSES},
            lambda n: {"img": pixels(n), "cls": n % 3},
            None,
            {},
            ["crow", "gull", "wren"],
            lambda n: n % 3,
        ),
        (
            {"a": features.Image(), "b": features.Image(), "x": CLASSES, "y": tf.int64},
            lambda n: {"a": pixels(n + 50), "b": pixels(n), "x": 0, "y": n // 2},
            None,
            dict(image_key="b", label_key="y"),
            ["0", "1", "2", "3"],
            lambda n: n // 2,
        ),
        (
            {"image": features.Image(), "label": tf.int32},
            lambda n: {"image": pixels(n), "label": n % 2},
            ("image", "label"),
            {},
            ["0", "1"],
            lambda n: n % 2,
        ),
        (
            {"image": features.Image(), "birds": features.Sequence(CLASSES)},
            lambda n: {"image": pixels(n), "birds": [0, 2][: n % 3]},
            None,
            {},
            ["crow", "gull", "wren"],
            lambda n: [n % 3 > 0, 0, n % 3 > 1],
        ),
        (
            {"image": features.Image(), "x": CLASSES, "y": CLASSES},
            lambda n: {"image": pixels(n), "x": 0, "y": 1},
            None,
            {},
            None,
            lambda n: -1,
        ),
    ],
)
def test_features_are_found_by_their_types(kinds, example, keys, settings, names, label, tmp_path):
    source = datasets.open_source("own_set", prepare(tmp_path, kinds, example, keys), **settings)
    assert source.class_names == names
    for (image, actual), (expected_image, expected) in zip(rows_of(source), expected_rows(label)):
        assert_array_equal(image, expected_image)
        assert_array_equal(actual, expected)


LABELED = {"a": features.Image(), "label": CLASSES}, lambda n: {"a": pixels(n), "label": 0}


@pytest.mark.parametrize(
    "kinds, example, settings, message",
    [
        (
            {"a": features.Image(), "b": features.Image()},
            lambda n: {"a": pixels(n), "b": pixels(n)},
            {},
            "several image features; its features are a .Image., b .Image.. Set --image_key",
        ),
        (
            *LABELED,
            dict(label_key="b"),
            "--label_key=b: own_set has no such labels. Use one of label",
        ),
        (
            *LABELED,
            dict(image_key="b"),
            "no image feature b; its features are a .Image., label .ClassLabel.. Set --image_key",
        ),
        (
            {"depth": DEPTH},
            lambda n: {"depth": np.ones([4, 4, 1], np.float32)},
            {},
            "floating-point",
        ),
        ({"x": CLASSES}, lambda n: {"x": 0}, {}, "x .ClassLabel.. Choose an image data set"),
    ],
)
def test_unsupported_features_are_named(kinds, example, settings, message, tmp_path):
    with rejects(message):
        datasets.open_source("own_set", prepare(tmp_path, kinds, example), **settings)


def test_images_of_sixteen_bits(tmp_path):
    def example(number):
        return {"image": pixels(number, 1, np.uint16) * 20}

    config = Config(dataset="own_set", data_dir=prepare(tmp_path, {"image": DEEP}, example))
    for white_level in (None, "3980"):
        source = datasets.open_configured(config.replace(white_level=white_level))
        assert source.largest_values("train", 8) == (3980, 65535)
        images = sorted(
            (
                np.round(pixels(number, 1) * 20.0 / float(white_level or 65535) * 255)
                for number in range(8)
            ),
            key=lambda image: np.repeat(image, 3, -1).astype(np.uint8).tobytes(),
        )
        for (image, _), expected in zip(rows_of(source), images):
            assert_array_equal(image, np.repeat(expected, 3, -1))


def test_bands_of_images(tmp_path):
    kinds = {"image": features.Image(shape=(None, None, 4))}
    config = Config(
        dataset="own_set",
        data_dir=prepare(tmp_path, kinds, lambda number: {"image": pixels(number, 4)}),
        bands="4,1,1",
    )
    expected = [pixels(number, 4)[..., [3, 0, 0]] for number in range(8)]
    rows = rows_of(datasets.open_configured(config))
    for (image, _), row in zip(rows, sorted(expected, key=np.ndarray.tobytes), strict=True):
        assert_array_equal(image, row)


def test_array_record_files_are_read_in_the_same_order(tmp_path):
    kinds = {"image": features.Image(), "label": CLASSES}
    sources = [
        datasets.open_source(
            "own_set",
            prepare(
                tmp_path / name,
                kinds,
                lambda n: {"image": pixels(n), "label": n % 3},
                file_format=name,
            ),
        )
        for name in ("tfrecord", "array_record")
    ]
    for split in ("train", "train[25%:75%]", "test"):
        first, second = (
            [(item, int(label)) for _, item, label in source.records(split).as_numpy_iterator()]
            for source in sources
        )
        assert first == second and len(first) == {"train": 8, "test": 4}.get(split, 4)


@pytest.mark.parametrize(
    "name", ["PATH", "folder:PATH", "PATH/own_set", "folder:PATH/own_set/1.0.0"]
)
def test_directories_of_prepared_data_sets_are_recognized(name, tmp_path):
    prepare(tmp_path, {"image": features.Image()}, lambda n: {"image": pixels(n)})
    with rejects(f"Use --dataset=own_set --data_dir={tmp_path}[.]"):
        datasets.open_source(name.replace("PATH", str(tmp_path)))


def test_unknown_data_sets_need_a_directory():
    with rejects("For a data set that you have prepared, set --data_dir"):
        datasets.open_source("own_set")
