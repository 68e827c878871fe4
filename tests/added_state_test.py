"""Layers of the model and further objects that a method adds are saved, resumed and exported without being listed."""

import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.testing import assert_allclose, assert_equal

import model as model_lib
import train
from checkpoints import loading, summary, training_log, weight_files
from export import saving
from support.errors import rejects
from support.processes import tensors
from support.runs import run

pytestmark = pytest.mark.usefixtures("tiny_resnet")

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
AVERAGE, PREDICTOR = "average/", "model/predictor/"


class PredictorModel(model_lib.Model):
    """Applies a further layer to the projections."""

    def __init__(self, *args):
        super().__init__(*args)
        self.predictor = keras.layers.Dense(16)

    def call(self, inputs, training=None):
        endpoints = super().call(inputs, training=training)
        return {**endpoints, "proj_head_output": self.predictor(endpoints["proj_head_output"])}


def add_average(patch):
    """Adds a moving average of the encoder's weights to the training."""
    build, update, average = train.build_training_state, train.TrainStep.update, tf.Module()

    def build_with_average(context, directory):
        patch.setattr(train.TrainStep, "update", update_with_average)
        patch.setattr(train, "TrainingState", state_with_average)
        return build(context, directory)

    def state_with_average(model, *args):
        average.variables_ = [tf.Variable(v) for v in model.resnet_model.trainable_variables]
        return original(model, *args, trackables={"average": average})

    def update_with_average(step, *args):
        scalars = update(step, *args)
        variables = step.model.resnet_model.trainable_variables
        for mean, variable in zip(average.variables_, variables):
            mean.assign(0.9 * mean + 0.1 * variable)
        return scalars

    original = train.TrainingState
    patch.setattr(train, "build_training_state", build_with_average)


def kill_after(patch, step):
    """Interrupts the next run after `step` steps, without saving, as if its process had been killed."""
    update = training_log.TrainingLog.update

    def stop(log, now, *args):
        if now > step:
            raise KeyboardInterrupt
        update(log, now, *args)

    patch.setattr(training_log.TrainingLog, "update", stop)


def test_an_added_layer_and_a_moving_average_resume_to_the_same_bits(tmp_path, monkeypatch):
    settings = dict(train_steps=4, checkpoint_steps=2, mode="train")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setattr(model_lib, "Model", PredictorModel)
    with monkeypatch.context() as patch:
        add_average(patch)
        run(whole, **settings)
        with monkeypatch.context() as kill, pytest.raises(KeyboardInterrupt):
            kill_after(kill, 2)
            run(killed, **settings)
        assert not (killed / "ckpt-4.index").exists()
        assert "resumed at step 2" in run(killed, **settings)
    expected = tensors(whole, 4)
    assert {f"{PREDICTOR}kernel", f"{AVERAGE}variables_/3"} <= {
        name.removesuffix(SUFFIX) for name in expected
    }
    assert_equal(tensors(killed, 4), expected)
    with rejects("different network .unexpected: average/"):
        run(killed, **{**settings, "train_steps": 5})

    assert "resnet10" in summary.describe(str(killed))
    model, info = loading.open_network(str(killed))
    assert_equal(model.predictor.kernel.numpy(), expected[f"{PREDICTOR}kernel{SUFFIX}"])
    assert loading.weights_digest(model) == info.file.digest()
    saving.export(str(killed), str(tmp_path / "exported"))
    file = weight_files.open_weights(str(tmp_path / "exported"))
    assert file.digest() == info.file.digest()
    outputs = tf.saved_model.load(file.location)(images := tf.ones([1, 8, 8, 3]))
    assert_allclose(outputs["proj_head_output"], model(images)["proj_head_output"], rtol=1e-5)
