"""Probes for Table 3: transformed images and their classes, accuracies, memory, and command-line errors."""

import json

import numpy as np
import pytest
import tensorflow as tf

import data_util
import model as model_lib
from augmentation import operators
from checkpoints import run_directory
from config import Config
from export import saving
from paper import common, probes, transformation_probes
from runtime.errors import UserError
from support.images import photographs

COUNT = 600


def seeds_of(count):
    return tf.stack(
        [tf.range(count, dtype=tf.int64), tf.fill([count], tf.constant(3, tf.int64))], 1
    )


@pytest.mark.parametrize("probe", transformation_probes.PROBES)
def test_each_class_has_the_right_transformation_and_fraction_of_images(probe):
    photo = photographs(16, 16)[0] / np.float32(255)
    images = tf.constant(np.repeat(photo[np.newaxis], COUNT, 0))
    outputs, classes = (
        tensor.numpy() for tensor in transformation_probes.transform(images, probe, seeds_of(COUNT))
    )
    probabilities = [probability for probability, _ in transformation_probes.PROBES[probe]]
    np.testing.assert_allclose(
        np.bincount(classes) / COUNT, probabilities, atol=4 * np.sqrt(0.25 / COUNT)
    )
    np.testing.assert_array_equal(outputs[classes == 0], images[classes == 0])
    transformed = outputs[classes == 1]
    if probe == "color":
        gray = photo @ np.float32([0.2989, 0.587, 0.114])
        np.testing.assert_allclose(
            transformed, np.broadcast_to(gray[..., np.newaxis], transformed.shape), atol=1e-6
        )
    elif probe == "rotation":
        for turns in range(4):
            np.testing.assert_array_equal(outputs[classes == turns][0], np.rot90(photo, turns))
    elif probe == "sobel":
        expected = data_util.from_channels(operators.sobel(data_util.to_channels(images[:1])))
        np.testing.assert_allclose(transformed, np.repeat(expected, len(transformed), 0), atol=1e-6)
    else:
        differences = (transformed - photo).std((1, 2, 3))
        assert differences.min() > 0.02 and differences.std() > 0.02


def test_probes_can_be_run_from_the_command_line(tmp_path, capsys):
    model = model_lib.build_model(
        Config(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16), 10
    )
    # With zero weights, all images have the same z, so predictions from z cannot be better than the
    # majority baseline.
    for variable in model._projection_head.linear_layers[-1].trainable_variables:
        variable.assign(tf.zeros_like(variable))
    tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    (tmp_path / "flags.json").write_text(json.dumps({"image_size": 8}))
    probes.main(
        [
            f"--checkpoint={tmp_path / 'ckpt-1'}",
            "--dataset=digits",
            "--probes=sobel,color",
            "--train_split=train[:300]",
            "--test_split=test[:100]",
            f"--out={tmp_path / 'out.json'}",
        ]
    )
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"sobel", "color"} and results["sobel"]["majority_baseline"] == 0.5
    # Even random features separate Sobel-filtered images from digits.
    assert results["sobel"]["h"] > 0.8
    assert results["sobel"]["z"] == pytest.approx(0.5, abs=0.1)
    # Digits are gray, so accuracy should match the majority baseline.
    assert abs(results["color"]["h"] - 0.8) < 0.12
    assert "sobel" in printed and "majority baseline 0.500" in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--out=."], "--out=.: the path is a directory. Pass the path of a file."),
        (["--out=a*.json"], "--out=a*.json: the path contains *"),
        (["--checkpoint=runs/*"], "--checkpoint=runs/*: the path contains *"),
        (
            ["--probes=color,shape"],
            (
                "--probes=color,shape: unknown probe shape. Use one or more of"
                " color,rotation,noise,sobel."
            ),
        ),
        (["--test_split=validation"], "--test_split=validation: digits has no such split"),
    ],
)
def test_invalid_arguments_give_one_line_errors_and_exit_status_2(
    arguments, words, tmp_path, capsys
):
    model = model_lib.build_model(
        Config(resnet_depth=10, image_size=8, num_proj_layers=1, proj_out_dim=16), 10
    )
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit) as error:
        probes.main([f"--checkpoint={path}", "--dataset=digits", *arguments])
    message = capsys.readouterr().err
    assert error.value.code == 2 and words in message and message.count("\n") == 1


def test_checkpoints_and_saved_models_are_loaded_with_their_training_image_size(tmp_path):
    config = Config(
        resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16, model_dir=str(tmp_path)
    )
    model = model_lib.build_model(config, 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    assert common.load(path)[1] == 224
    run_directory.write_flags(str(tmp_path), config, [str(digit) for digit in range(10)])
    saved_model = saving.export_to_model_dir(config, str(tmp_path), path)
    for weights in (path, saved_model):
        loaded, size = common.load(weights)
        assert size == 8
        np.testing.assert_array_equal(loaded.variables[0], model.variables[0])


def test_corrupt_images_cause_an_error_unless_skipping_is_requested(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(
            tf.io.encode_png(np.zeros([8, 8, 3], np.uint8)).numpy()
        )
    (tmp_path / "b" / "2.png").write_bytes(b"corrupt")
    flags = f"--dataset=folder:{tmp_path}"
    with pytest.raises(UserError, match="1 of 3 images cannot be used: b/2.png"):
        common.open_source(common.parse_flags(flags))
    assert (
        common.open_source(common.parse_flags(f"{flags} --corrupt_images=skip")).num_examples(
            "train"
        )
        == 2
    )


def test_color_probe_uses_the_same_grayscale_probability_as_pretraining():
    grayscale = data_util.color_distortion(1.0, "additive")[1]
    assert grayscale.probability == transformation_probes.PROBES["color"][1][0]
