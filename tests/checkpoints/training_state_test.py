"""Checkpoints: compatibility with the original, resuming, warm starts and mismatches."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.testing import assert_array_equal

import model as model_lib
from checkpoints import restoring
from checkpoints.training_state import TrainingState
from config import Config
from runtime import workers
from support import SMALL, runs
from support.errors import rejects


def make_state(directory, config, classes=4):
    model = model_lib.build_model(config, classes)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 100), model)
    return TrainingState(model, optimizer, str(directory), 2)


def test_workers_that_restored_different_checkpoints_are_rejected(tmp_path, monkeypatch):
    state = TrainingState(tf.Module(), keras.optimizers.legacy.SGD(), str(tmp_path), 1)
    monkeypatch.setattr(workers, "gather_integers", lambda *_: np.array([[-1], [3]]))
    with rejects(r"different checkpoints \(steps: none, 3\)"):
        state.restore_newest(str(tmp_path), tf.distribute.get_strategy())


def test_a_worker_that_is_lost_while_restoring_is_not_taken_for_a_corrupt_checkpoint(
    tmp_path, monkeypatch
):
    def lose_worker(*_):
        raise tf.errors.AbortedError(None, None, "Collective ops is aborted")

    state = TrainingState(tf.Module(), keras.optimizers.legacy.SGD(), str(tmp_path), 1)
    state.save()
    monkeypatch.setattr(TrainingState, "resume", lose_worker)
    with pytest.raises(tf.errors.AbortedError):
        state.restore_newest(str(tmp_path), tf.distribute.get_strategy())


def take_step(state):
    """Takes one step. Returns the path of a checkpoint."""
    gradients = [tf.ones_like(v) for v in state.model.trainable_variables]
    state.optimizer.apply_gradients(zip(gradients, state.model.trainable_variables))
    return state.save()


@pytest.mark.parametrize("optimizer", ["lars", "momentum", "adam"])
def test_resume_restores_weights_slots_and_step(optimizer, tmp_path):
    config = Config(**SMALL, optimizer=optimizer)
    state = make_state(tmp_path, config)
    take_step(state)
    path = take_step(state)
    assert path.endswith("ckpt-2")
    take_step(state)
    resumed = make_state(tmp_path, config)
    resumed.resume(path)
    assert resumed.step == 2
    take_step(resumed)
    for ours, theirs in zip(
        resumed.model.variables + resumed.optimizer.variables(),
        state.model.variables + state.optimizer.variables(),
    ):
        assert_array_equal(ours, theirs, err_msg=ours.name)


def test_slot_keys_match_the_original(tmp_path):
    path = take_step(make_state(tmp_path, Config(**SMALL)))
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    kernel = "model/resnet_model/initial_conv_relu_max_pool/0/conv2d/kernel"
    assert f"{kernel}/.OPTIMIZER_SLOT/optimizer/Momentum/.ATTRIBUTES/VARIABLE_VALUE" in keys
    assert (
        "global_step/.ATTRIBUTES/VARIABLE_VALUE" in keys
        or "optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE" in keys
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(resnet_depth=34), "missing: model/"),
        (dict(proj_out_dim=8), "instead of"),
        (dict(optimizer="adam"), "different optimizer"),
    ],
)
def test_resuming_with_a_different_network_or_optimizer_fails_without_changing_files(
    changes, message, tmp_path
):
    path = take_step(make_state(tmp_path, Config(**SMALL)))
    before = runs.contents(tmp_path)
    other = make_state(tmp_path, Config(**{**SMALL, **changes}))
    with rejects(f"--model_dir.*{message}"):
        other.resume(path)
    assert runs.contents(tmp_path) == before


def test_warm_start_accepts_directories_and_prefixes(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    prefix = take_step(state)
    for path in (str(tmp_path), prefix):
        model = model_lib.build_model(Config(**SMALL), 4)
        lines = restoring.warm_start(model, path).lines
        count = len(model.variables)
        assert lines[0] == f"loaded {count} of {count} variables from {prefix} (TF2 checkpoint)"
        for ours, theirs in zip(model.variables, state.model.variables):
            assert_array_equal(ours, theirs)


def test_warm_start_skips_mismatched_heads(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    config = Config(**{**SMALL, "proj_out_dim": 8}, train_mode="finetune")
    model = model_lib.build_model(config, 7)
    fresh_head = model.supervised_head.linear_layer.dense.kernel.numpy()
    loaded = restoring.warm_start(model, state.save())
    assert "has shape [512, 4] instead of [512, 7]" in loaded.not_loaded["linear head"]
    assert "projection head" in loaded.not_loaded
    assert_array_equal(model.supervised_head.linear_layer.dense.kernel, fresh_head)
    assert_array_equal(
        model.resnet_model.initial_conv_relu_max_pool[0].conv2d.kernel,
        state.model.resnet_model.initial_conv_relu_max_pool[0].conv2d.kernel,
    )
