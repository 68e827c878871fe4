import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import inference
from config import Config
from inference import embedding
from support import SMALL, golden, images, write_json
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("stem_only_resnet")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_json(directory / "flags.json", SMALL)
    model, _ = golden.build_model(Config(**SMALL))
    tf.train.Checkpoint(model=model).write(f"{directory}/ckpt-1")
    return str(directory)


def test_encoders_return_the_vectors_of_embed(run_dir, tmp_path):
    paths = [f"{tmp_path}/{index}.png" for index in range(2)]
    for path, photograph in zip(paths, images.photographs()):
        tf.io.write_file(path, tf.io.encode_png(photograph))
    embedding.embed(run_dir, paths, f"{tmp_path}/v.npz")
    expected = np.load(tmp_path / "v.npz")["vectors"]
    encoder = inference.load(run_dir)
    inputs = tf.stack([encoder.preprocess(path) for path in paths])
    assert inputs.shape == [2, encoder.image_size, encoder.image_size, 3]
    assert len(encoder.class_names) == 10
    np.testing.assert_array_equal(encoder(inputs), expected)
    np.testing.assert_array_equal(encoder(inputs, training=True), expected)
    (tmp_path / "text.jpg").write_text("text")
    with rejects("text.jpg: the image cannot be read"):
        encoder.preprocess(f"{tmp_path}/text.jpg")
    with rejects("PATH=missing: no such checkpoint"):
        inference.load("missing")


@pytest.mark.parametrize("trainable", [False, True])
def test_encoders_are_trainable_on_request(trainable, run_dir):
    encoder = inference.load(run_dir, trainable)
    inputs = np.random.default_rng(0).uniform(size=[4, 8, 8, 3]).astype(np.float32)
    model = keras.Sequential([encoder, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    before = {weight.name: weight.numpy() for weight in encoder.weights}
    model.fit(inputs, np.eye(4, 2), verbose=0)
    changed = {weight.name for weight in encoder.weights if np.any(weight != before[weight.name])}
    for kind in ("kernel", "gamma", "moving_mean"):
        assert any(kind in name for name in changed) == trainable
    assert len(model.trainable_weights) == 2 + trainable * len(encoder.trainable_weights)
