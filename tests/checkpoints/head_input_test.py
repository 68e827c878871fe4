"""The input of the classifier, found in checkpoints and SavedModels as the original saves them."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import checks
from checkpoints import inspection, loading, saved_graphs, summary, weight_files
from checkpoints.run_directory import Recorded
from checkpoints.weight_files import SLOT, SUFFIX
from config import Config
from support import golden

pytestmark = pytest.mark.usefixtures("stem_only_resnet")
SETTINGS = dict(resnet_depth=10, image_size=8, proj_out_dim=16, train_mode="finetune")


def write(model, path, tf1):
    """Writes a checkpoint with a slot for each variable that receives gradients."""
    variables, tensors = loading.variables_by_key(model=model), {}
    with tf.GradientTape() as tape:
        logits = model(tf.random.uniform([4, 8, 8, 3]), training=True)["logits_sup"]
        loss = tf.reduce_sum(logits**2)
    for key, gradient in tape.gradient(loss, variables).items():
        name = golden.tf1_name(key) if tf1 else f"{key}{SUFFIX}"
        tensors[name] = variables[key]
        if gradient is not None:
            slot = f"{name}/Momentum" if tf1 else f"{key}{SLOT}optimizer/Momentum{SUFFIX}"
            tensors[slot] = variables[key] * 0
    return golden.save_tensors(path, tensors)


def adopt(path):
    """Returns the settings and the lines to log in an evaluation of the weights at `path`."""
    network = inspection.network_flags(weight_files.open_weights(path), with_head_input=True)
    return checks.adopt(Config(mode="eval"), [], Recorded(network=network))


@pytest.mark.parametrize("selector", [0, 1, 2, 3])
def test_classifier_of_a_fine_tuned_checkpoint_is_on_the_layer_it_was_trained_on(
    selector, tmp_path
):
    network, _ = golden.build_model(Config(**SETTINGS, ft_proj_selector=selector))
    images = np.random.default_rng(0).uniform(size=[2, 8, 8, 3]).astype(np.float32)
    for tf1 in (False, True):
        path = write(network, tmp_path / f"ckpt-{tf1:d}", tf1)
        model, info = loading.open_network(path)
        assert info.config.ft_proj_selector == selector
        expected = network(images, training=False)["logits_sup"]
        actual = model(images, training=False)["logits_sup"]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        head = f"the output of layer {selector} of the projection head"
        if selector == 0:
            head = "the encoder's output"
        assert f"10 classes; its input is {head}" in summary.describe(path)
        config, lines = adopt(path)
        assert config.ft_proj_selector == selector and inspection.UNKNOWN_HEAD_INPUT not in lines


def test_unknown_input_is_logged_and_can_be_set(tmp_path, capsys):
    # With a classifier on a last layer that is as wide as h, all layers have slots, as in pretraining.
    config = Config(**{**SETTINGS, "proj_out_dim": 64}, ft_proj_selector=3)
    network, _ = golden.build_model(config)
    path = write(network, tmp_path / "ckpt-1", False)
    assert loading.open_network(path)[1].config.ft_proj_selector == 0
    assert inspection.UNKNOWN_HEAD_INPUT in capsys.readouterr().out
    assert loading.open_network(path, {"ft_proj_selector": 3})[1].config.ft_proj_selector == 3
    assert inspection.UNKNOWN_HEAD_INPUT not in capsys.readouterr().out
    assert "its input is unknown" in summary.describe(path)
    assert inspection.UNKNOWN_HEAD_INPUT in adopt(path)[1]
    (tmp_path / "finetuned_10pct").mkdir()
    path = write(network, tmp_path / "finetuned_10pct" / "ckpt-1", False)
    assert inspection.inspect_checkpoint(path).config.ft_proj_selector == 1


def original(selector):
    """Returns a network whose layers are named as in the original."""
    stages = [keras.Input([4])]
    for index in range(3):
        layer = keras.Sequential([keras.layers.Dense(4, "relu", name="dense")], f"nl_{index}")
        stages.append(layer(stages[-1]))
    linear = keras.Sequential([keras.layers.Dense(4, name="dense")], "linear_layer")
    logits = keras.Sequential([linear], "head_supervised")(stages[selector])
    return keras.Model(stages[0], [stages[-1], logits])


@pytest.mark.parametrize("selector", [0, 1, 3])
def test_graphs_of_saved_models_show_the_input(selector, tmp_path):
    module = tf.Module()
    module.model = original(selector)
    module.call = tf.function(
        lambda x: module.model(x), autograph=False, input_signature=[tf.TensorSpec([None, 4])]
    )
    tf.saved_model.save(module, f"{tmp_path}/tf2")
    assert saved_graphs.head_input(f"{tmp_path}/tf2") == selector

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inputs = tf.compat.v1.placeholder(tf.float32, [None, 4])
        stages = [inputs]
        for index in range(3):
            with tf.name_scope(f"head_contrastive/nl_{index}/dense"):
                stages.append(tf.nn.relu(tf.matmul(stages[-1], tf.eye(4))))
        with tf.name_scope("head_supervised/linear_layer/dense"):
            logits = tf.matmul(stages[selector], tf.eye(4))
        tf.compat.v1.saved_model.simple_save(
            session, f"{tmp_path}/tf1", {"x": inputs}, {"z": stages[-1], "y": logits}
        )
    assert saved_graphs.head_input(f"{tmp_path}/tf1") == selector


def test_saved_models_without_a_classifier_show_no_input(tmp_path):
    module = tf.Module()
    module.call = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, str(tmp_path))
    assert saved_graphs.head_input(str(tmp_path)) is None
    assert saved_graphs.head_input(f"{tmp_path}/missing") is None
