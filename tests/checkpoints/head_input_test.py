"""The input of the classifier, found in checkpoints and SavedModels as the original saves them."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import checks
from checkpoints import inspection, restoring, saved_graphs, summary, weight_files
from checkpoints.run_directory import Recorded
from checkpoints.weight_files import SLOT, SUFFIX
from config import Config
from support import golden

SETTINGS = dict(resnet_depth=10, image_size=8, proj_out_dim=16, train_mode="finetune")


@pytest.fixture(scope="module")
def networks():
    """Returns a dict that maps selectors to fine-tuned networks with the same weights."""
    return {
        selector: golden.build_model(Config(**SETTINGS, ft_proj_selector=selector))[0]
        for selector in range(4)
    }


def gradients(model):
    """Returns the set of the keys of variables that receive gradients in fine-tuning."""
    with tf.GradientTape() as tape:
        logits = model(tf.random.uniform([4, 8, 8, 3]), training=True)["logits_sup"]
        loss = tf.reduce_sum(logits**2)
    values = tape.gradient(loss, restoring.variables_by_key(model=model))
    return {key for key, value in values.items() if value is not None}


def write(model, path, tf1):
    """Writes a checkpoint with a slot for each variable that receives gradients."""
    tensors, trained = {}, gradients(model)
    for key, variable in restoring.variables_by_key(model=model).items():
        name = golden.tf1_name(key) if tf1 else f"{key}{SUFFIX}"
        slot = f"{name}/Momentum" if tf1 else f"{key}{SLOT}optimizer/Momentum{SUFFIX}"
        tensors.update({name: variable} | ({slot: variable * 0} if key in trained else {}))
    return golden.save_tensors(path, tensors)


def adopt(path):
    """Returns the settings and the lines to log in an evaluation of the weights at `path`."""
    network = inspection.network_flags(weight_files.open_weights(path), with_head_input=True)
    return checks.adopt(Config(mode="eval"), [], Recorded(network=network))


@pytest.mark.parametrize("tf1", [False, True])
@pytest.mark.parametrize("selector", [0, 1, 2, 3])
def test_classifier_of_a_fine_tuned_checkpoint_is_on_the_layer_it_was_trained_on(
    selector, tf1, networks, tmp_path
):
    path = write(networks[selector], tmp_path / "ckpt-1", tf1)
    model, info = restoring.open_network(path)
    assert info.config.ft_proj_selector == selector
    images = np.random.default_rng(0).uniform(size=[2, 8, 8, 3]).astype(np.float32)
    expected = networks[selector](images, training=False)["logits_sup"]
    actual = model(images, training=False)["logits_sup"]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    head = (
        f"the output of layer {selector} of the projection head"
        if selector
        else "the encoder's output"
    )
    assert f"10 classes; its input is {head}" in summary.describe(path)
    config, lines = adopt(path)
    assert config.ft_proj_selector == selector and inspection.UNKNOWN_HEAD_INPUT not in lines


def test_unknown_input_is_logged_and_can_be_set(tmp_path, capsys):
    # With a classifier on a last layer that is as wide as h, all layers have slots, as in pretraining.
    config = Config(**{**SETTINGS, "proj_out_dim": 512}, ft_proj_selector=3)
    network, _ = golden.build_model(config)
    path = write(network, tmp_path / "ckpt-1", False)
    assert restoring.open_network(path)[1].config.ft_proj_selector == 0
    assert inspection.UNKNOWN_HEAD_INPUT in capsys.readouterr().out
    assert restoring.open_network(path, {"ft_proj_selector": 3})[1].config.ft_proj_selector == 3
    assert inspection.UNKNOWN_HEAD_INPUT not in capsys.readouterr().out
    assert "its input is unknown" in summary.describe(path)
    assert inspection.UNKNOWN_HEAD_INPUT in adopt(path)[1]
    (tmp_path / "finetuned_10pct").mkdir()
    path = write(network, tmp_path / "finetuned_10pct" / "ckpt-1", False)
    assert inspection.inspect_checkpoint(path).config.ft_proj_selector == 1


class Head(keras.layers.Layer):
    """A part of the original's network: dense layers, each in a layer with one of the given names."""

    def __init__(self, name, *names):
        super().__init__(name=name)
        self.parts = [
            keras.Sequential([keras.layers.Dense(4, name="dense")], name) for name in names
        ]

    def call(self, inputs):
        outputs = [inputs]
        for part in self.parts:
            outputs.append(tf.nn.relu(part(outputs[-1])))
        return outputs


class Original(keras.Model):
    """A network whose layers are named as in the original."""

    def __init__(self, selector):
        super().__init__(name="model")
        self.projection_head = Head("projection_head", "nl_0", "nl_1", "nl_2")
        self.supervised_head = Head("head_supervised", "linear_layer")
        self.selector = selector

    def call(self, inputs):
        outputs = self.projection_head(inputs)
        return outputs[-1], self.supervised_head(outputs[self.selector])[-1]


@pytest.mark.parametrize("selector", [0, 1, 3])
def test_graphs_of_saved_models_show_the_input(selector, tmp_path):
    model = Original(selector)
    signature = tf.TensorSpec([None, 4])
    module = tf.Module()
    module.model = model
    module.call = tf.function(lambda x: model(x), autograph=False, input_signature=[signature])
    tf.saved_model.save(module, str(tmp_path / "tf2"))
    assert saved_graphs.head_input(str(tmp_path / "tf2")) == selector

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inputs = tf.compat.v1.placeholder(tf.float32, [None, 4])
        stages = [inputs]
        for index in range(3):
            with tf.compat.v1.variable_scope(f"head_contrastive/nl_{index}/dense"):
                kernel = tf.compat.v1.get_variable("kernel", [4, 4])
                stages.append(tf.nn.relu(tf.matmul(stages[-1], kernel)))
        with tf.compat.v1.variable_scope("head_supervised/linear_layer/dense"):
            logits = tf.matmul(stages[selector], tf.compat.v1.get_variable("kernel", [4, 4]))
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.saved_model.simple_save(
            session, str(tmp_path / "tf1"), {"x": inputs}, {"z": stages[-1], "y": logits}
        )
    assert saved_graphs.head_input(str(tmp_path / "tf1")) == selector


def test_saved_models_without_a_classifier_show_no_input(tmp_path):
    module = tf.Module()
    module.call = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, str(tmp_path))
    assert saved_graphs.head_input(str(tmp_path)) is None
    assert saved_graphs.head_input(str(tmp_path / "missing")) is None
