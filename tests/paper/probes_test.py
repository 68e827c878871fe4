"""Probes for Table 3: transformed images and their classes, accuracies, memory, and command-line errors."""

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal
from sklearn import linear_model

import data_util
from augmentation import operators
from paper import common, probes, transformation_probes
from support import read_json, write_json
from support.errors import rejects
from support.images import photographs, write_images

COUNT = 600


@pytest.mark.parametrize("probe", transformation_probes.PROBES)
def test_each_class_has_the_right_transformation_and_fraction_of_images(probe):
    photo = photographs(16, 16)[0] / np.float32(255)
    images = np.repeat(photo[np.newaxis], COUNT, 0)
    seeds = tf.constant([[index, 3] for index in range(COUNT)], tf.int64)
    outputs, classes = transformation_probes.transform(tf.constant(images), probe, seeds)
    probabilities, _ = zip(*transformation_probes.PROBES[probe])
    bound = 4 * np.sqrt(0.25 / COUNT)
    assert_allclose(np.bincount(classes) / COUNT, probabilities, atol=bound)
    assert_array_equal(outputs[classes == 0], images[classes == 0])
    transformed = outputs[classes == 1].numpy()
    if probe == "rotation":
        for turns in range(4):
            assert_array_equal(outputs[classes == turns][0], np.rot90(photo, turns))
    elif probe == "noise":
        differences = (transformed - photo).std((1, 2, 3))
        assert differences.min() > 0.02 and differences.std() > 0.02
    else:
        expected = photo @ np.float32([[0.2989], [0.587], [0.114]])  # gray
        if probe == "sobel":
            expected = data_util.from_channels(operators.sobel(data_util.to_channels(images[:1])))
        assert np.abs(transformed - expected).max() < 1e-6


def accuracy(train, test):
    return linear_model.LogisticRegression().fit(*train).score(*test)


def test_probes_can_be_run_from_the_command_line(tmp_path, write_network, capsys, monkeypatch):
    # `mlp_test.py` tests the MLP.
    monkeypatch.setattr(transformation_probes.mlp, "mlp_accuracy", accuracy)
    path, network = write_network(tmp_path)
    # With zero weights, all images have the same z, so predictions from z cannot be better than the
    # majority baseline.
    for variable in network._projection_head.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    tf.train.Checkpoint(model=network).write(path)
    write_json(tmp_path / "flags.json", {"image_size": 8})
    assert common.load(path, "digits", "")[1].image_size == 8
    splits = ["--train_split=train[:300]", "--test_split=test[:100]"]
    arguments = [f"--checkpoint={path}", "--dataset=digits", "--probes=sobel", *splits]
    probes.main([*arguments, f"--out={tmp_path}/out.json"])
    printed, results = capsys.readouterr().out, read_json(tmp_path / "out.json")
    assert set(results) == {"sobel", "checksum"} and results["sobel"]["majority_baseline"] == 0.5
    # Even random features separate Sobel-filtered images from digits.
    assert results["sobel"]["h"] > 0.8
    assert results["sobel"]["z"] == pytest.approx(0.5, abs=0.1)
    assert "sobel" in printed and "majority_baseline" in printed and " 0.500 " in printed


def test_invalid_arguments_give_one_line_errors_and_exit_status_2(network, fails):
    for argument, words in {
        "--out=.": "the path is a directory. Pass the path of a file.",
        "--checkpoint=runs/*": "the path contains *",
        "--probes=color,shape": "unknown probe shape. Use one or more of",
        "--test_split=validation": "digits has no such split",
    }.items():
        arguments = [f"--checkpoint={network[0]}", "--dataset=digits", argument]
        fails(f"{argument}: {words}", probes.main, arguments)


def test_corrupt_images_cause_an_error_unless_skipping_is_requested(tmp_path):
    write_images(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "b/2.png").write_bytes(b"corrupt")
    flags = f"--dataset=folder:{tmp_path}"
    with rejects("1 of 3 images cannot be used: b/2.png"):
        common.open_source(common.parse_flags(flags))
    source = common.open_source(common.parse_flags(f"{flags} --corrupt_images=skip"))
    assert source.num_examples("train") == 2


def test_color_probe_uses_the_same_grayscale_probability_as_pretraining():
    grayscale = data_util.color_distortion(1.0, "additive")[1]
    assert grayscale.probability == transformation_probes.PROBES["color"][1][0]
