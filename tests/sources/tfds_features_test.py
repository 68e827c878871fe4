"""Checks data sets that users have prepared with TFDS: features, formats of files, and hints about directories."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

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
            return {"train": self._generate_examples(8), "test": self._generate_examples(4)}

        def _generate_examples(self, count):
            return ((number, example(number)) for number in range(count))

    OwnSet(data_dir=str(directory), **options).download_and_prepare()
    tfds.core.registered._DATASET_REGISTRY.pop("own_set", None)  # As in another process.
    return str(directory)


def labels_of(source):
    """Returns a dict that maps the pixels of the training images to the labels."""
    return {
        source.decode(item).numpy().tobytes(): label.numpy().tolist()
        for _, item, label in source.records("train")
    }


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
    assert labels_of(source) == {pixels(number).tobytes(): label(number) for number in range(8)}


@pytest.mark.parametrize(
    "kinds, settings, message",
    [
        (
            {"a": features.Image(), "b": features.Image()},
            {},
            "several image features; its features are a .Image., b .Image.. Set --image_key",
        ),
        (
            {"a": features.Image(), "label": CLASSES},
            dict(label_key="b"),
            "--label_key=b: own_set has no such labels. Use one of label",
        ),
        (
            {"a": features.Image(), "label": CLASSES},
            dict(image_key="b"),
            "no image feature b; its features are a .Image., label .ClassLabel.. Set --image_key",
        ),
        ({"depth": DEPTH}, {}, "floating-point"),
        ({"label": CLASSES}, {}, "label .ClassLabel.. Choose an image data set"),
    ],
)
def test_unsupported_features_are_named(kinds, settings, message, tmp_path):
    values = {"a": pixels(0), "b": pixels(0), "depth": np.float32(pixels(0, 1)), "label": 0}
    data_dir = prepare(tmp_path, kinds, lambda _: {name: values[name] for name in kinds})
    with rejects(message):
        datasets.open_source("own_set", data_dir, **settings)


def test_images_of_sixteen_bits(tmp_path):
    data_dir = prepare(
        tmp_path, {"image": DEEP}, lambda number: {"image": pixels(number, 1, np.uint16) * 20}
    )
    config = Config(dataset="own_set", data_dir=data_dir)
    for white_level in (None, "3980"):
        source = datasets.open_configured(config.replace(white_level=white_level))
        assert source.largest_values("train", 8) == (3980, 65535)
        grays = (pixels(number, 1) * 20.0 / float(white_level or 65535) for number in range(8))
        assert labels_of(source).keys() == {
            np.repeat(np.round(gray * 255), 3, -1).astype(np.uint8).tobytes() for gray in grays
        }


def test_bands_of_images(tmp_path):
    kinds = {"image": features.Image(shape=(None, None, 4))}
    data_dir = prepare(tmp_path, kinds, lambda number: {"image": pixels(number, 4)})
    source = datasets.open_configured(Config(dataset="own_set", data_dir=data_dir, bands="4,1,1"))
    expected = {pixels(number, 4)[..., [3, 0, 0]].tobytes() for number in range(8)}
    assert labels_of(source).keys() == expected


def test_array_record_files_are_read_in_the_same_order(tmp_path):
    kinds, example = {"image": features.Image()}, lambda number: {"image": pixels(number)}
    directories = [
        prepare(tmp_path / name, kinds, example, file_format=name)
        for name in ("tfrecord", "array_record")
    ]
    for split, count in {"train": 8, "train[25%:75%]": 4, "test": 4}.items():
        first, second = (
            [item.numpy() for _, item, _ in datasets.open_source("own_set", path).records(split)]
            for path in directories
        )
        assert first == second and len(first) == count


@pytest.mark.parametrize(
    "name", ["PATH", "folder:PATH", "PATH/own_set", "folder:PATH/own_set/1.0.0"]
)
def test_directories_of_prepared_data_sets_are_recognized(name, tmp_path):
    prepare(tmp_path, {"image": features.Image()}, lambda n: {"image": pixels(n)})
    with rejects(f"Use --dataset=own_set --data_dir={tmp_path}[.]"):
        datasets.open_source(name.replace("PATH", str(tmp_path)))
