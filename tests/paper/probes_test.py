"""Table 3's probes: what they show the network, and that their accuracy means something."""

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
    return tf.stack([tf.range(count, dtype=tf.int64), tf.fill([count], tf.constant(3, tf.int64))], 1)


@pytest.mark.parametrize("probe", transformation_probes.PROBES)
def test_images_are_transformed_as_their_classes_say(probe):
    photo = photographs(16, 16)[0] / np.float32(255)
    images = tf.constant(np.repeat(photo[np.newaxis], COUNT, 0))
    shown, classes = (part.numpy() for part in transformation_probes.transform(images, probe, seeds_of(COUNT)))
    shares = [share for share, _ in transformation_probes.PROBES[probe]]
    np.testing.assert_allclose(np.bincount(classes) / COUNT, shares, atol=4 * np.sqrt(0.25 / COUNT))
    np.testing.assert_array_equal(shown[classes == 0], images[classes == 0])
    others = shown[classes == 1]
    if probe == "colour":
        grey = photo @ np.float32([0.2989, 0.587, 0.114])
        np.testing.assert_allclose(others, np.broadcast_to(grey[..., np.newaxis], others.shape), atol=1e-6)
    elif probe == "rotation":
        for turns in range(4):
            np.testing.assert_array_equal(shown[classes == turns][0], np.rot90(photo, turns))
    elif probe == "sobel":
        expected = data_util.from_channels(operators.sobel(data_util.to_channels(images[:1])))
        np.testing.assert_allclose(others, np.repeat(expected, len(others), 0), atol=1e-6)
    else:
        differences = (others - photo).std((1, 2, 3))
        assert differences.min() > 0.02 and differences.std() > 0.02


def test_accuracy_is_full_where_classes_are_apart_and_chance_where_there_is_nothing():
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 1500)
    apart = np.eye(4)[classes] @ random.standard_normal((4, 20)) * 3 + random.standard_normal((1500, 20)) * 0.3
    noise = random.standard_normal((1500, 20))
    for vectors, low, high in ((apart, 0.99, 1.0), (noise, 0.17, 0.33)):
        train_set, test_set = (vectors[:1000], classes[:1000]), (vectors[1000:], classes[1000:])
        accuracy = transformation_probes.probe_accuracy(train_set, test_set)
        assert low <= accuracy <= high
    rings = random.integers(0, 2, 1500)
    angles = random.uniform(0, 2 * np.pi, 1500)
    points = ((1 + rings) * np.stack([np.cos(angles), np.sin(angles)])).T  # No line parts them.
    assert transformation_probes.probe_accuracy((points[:1000], rings[:1000]), (points[1000:], rings[1000:])) > 0.97


def test_the_program_probes_a_network(tmp_path, capsys):
    model = model_lib.build_model(Config(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16), 10)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    (tmp_path / "flags.json").write_text(json.dumps({"image_size": 8}))
    probes.main([f"--checkpoint={tmp_path / 'ckpt-1'}", "--dataset=digits", "--probes=sobel,colour",
                 "--train_split=train[:300]", "--test_split=test[:100]", f"--out={tmp_path / 'out.json'}"])
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"sobel", "colour"} and results["sobel"]["guess"] == 0.5
    assert results["sobel"]["h"] > 0.8  # Outlines are told from digits even by random features.
    assert abs(results["colour"]["h"] - 0.8) < 0.12  # They have no colour.
    assert "sobel" in printed and "guess 0.500" in printed


@pytest.mark.parametrize("arguments, words", [
    (["--out=."], "--out=.: it is a directory. Name a file."),
    (["--out=a*.json"], "--out=a*.json: the path contains *"),
    (["--checkpoint=runs/*"], "--checkpoint=runs/*: the path contains *"),
    (["--probes=colour,shape"], "--probes=colour,shape: use colour, rotation, noise, sobel"),
    (["--test_split=validation"], "--test_split=validation: digits has no such split")])
def test_mistakes_are_told_in_one_line(arguments, words, tmp_path, capsys):
    model = model_lib.build_model(Config(resnet_depth=10, image_size=8, num_proj_layers=1, proj_out_dim=16), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit) as error:
        probes.main([f"--checkpoint={path}", "--dataset=digits", *arguments])
    told = capsys.readouterr().err
    assert error.value.code == 2 and words in told and told.count("\n") == 1


def test_networks_are_of_the_size_of_their_training(tmp_path):
    """Whichever file of a run they are read from."""
    config = Config(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16, model_dir=str(tmp_path))
    model = model_lib.build_model(config, 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    assert common.load(path)[1] == 224
    run_directory.write_flags(str(tmp_path), config, [str(digit) for digit in range(10)])
    saved_model = saving.export_to_model_dir(config, [str(digit) for digit in range(10)], path)
    for place in (path, saved_model):
        loaded, size = common.load(place)
        assert size == 8
        np.testing.assert_array_equal(loaded.variables[0], model.variables[0])


def test_corrupt_images_of_a_folder_are_an_error_or_skipped(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(tf.io.encode_png(np.zeros([8, 8, 3], np.uint8)).numpy())
    (tmp_path / "b" / "2.png").write_bytes(b"corrupt")
    flags = f"--dataset=folder:{tmp_path}"
    with pytest.raises(UserError, match="1 of 3 images cannot be used: b/2.png"):
        common.open_source(common.parse_flags(flags))
    assert common.open_source(common.parse_flags(f"{flags} --corrupt_images=skip")).num_examples("train") == 2


def test_gray_is_the_policys():
    """What the colour probe looks for is what pretraining does to a fifth of the views."""
    grayscale = data_util.color_distortion(1.0, "additive")[1]
    assert grayscale.probability == transformation_probes.PROBES["colour"][1][0]
