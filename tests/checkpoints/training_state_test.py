"""Checkpoints: the original's files, resuming, warm starts, and refusals."""

import numpy as np
import pytest
import tensorflow as tf

import model as model_lib
from checkpoints import restoring
from checkpoints.training_state import TrainingState
from config import Config
from runtime.errors import UserError
from support import golden

SMALL = dict(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16)


def write_key_by_key(path, tensors):
    """A checkpoint file made without any of our objects."""
    tf.raw_ops.SaveV2(prefix=path, tensor_names=list(tensors), shape_and_slices=[""] * len(tensors),
                      tensors=[tf.constant(value) for value in tensors.values()])
    return path


def write_formula_weights(path, model):
    variables = restoring.variables_by_key(model=model)
    return write_key_by_key(path, {
        f"{key}/.ATTRIBUTES/VARIABLE_VALUE": golden.formula_weight(key, tuple(variable.shape))
        for key, variable in variables.items()})


def make_state(directory, config, classes=4):
    model = model_lib.build_model(config, classes)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 100), model)
    return TrainingState(model, optimizer, str(directory), 2)


def take_step(state):
    gradients = [tf.ones_like(v) for v in state.model.trainable_variables]
    state.optimizer.apply_gradients(zip(gradients, state.model.trainable_variables))


@pytest.mark.parametrize("name", sorted(golden.load_json("checkpoint_keys")))
def test_files_with_the_originals_keys_load(name, tmp_path):
    shapes = golden.load_json("checkpoint_keys")[name]
    settings = dict(part.rsplit("=", 1) for part in
                    name.replace("_se_", ";se_").replace("_width", ";width").replace("_image", ";image")
                    .replace("_num_", ";num_").replace("_proj_out", ";proj_out").replace("_sk_", ";sk_").split(";"))
    config = Config(**{"image_size": 32, **{key: float(value) if "." in value else int(value)
                                            for key, value in settings.items()}})
    path = write_key_by_key(str(tmp_path / "ckpt-7"), {
        f"{key}/.ATTRIBUTES/VARIABLE_VALUE": golden.formula_weight(key, tuple(shape)) for key, shape in shapes.items()})
    model = model_lib.build_model(config, 10)
    restoring.load_model(model, path)
    for key, variable in restoring.variables_by_key(model=model).items():
        np.testing.assert_array_equal(variable, golden.formula_weight(key, tuple(variable.shape)))


@pytest.mark.parametrize("optimizer", ["lars", "momentum", "adam"])
def test_resume_restores_weights_slots_and_step(optimizer, tmp_path):
    config = Config(**SMALL, optimizer=optimizer)
    state = make_state(tmp_path, config)
    take_step(state), take_step(state)
    path = state.save()
    assert path.endswith("ckpt-2")
    take_step(state)
    resumed = make_state(tmp_path, config)
    resumed.resume(path)
    assert resumed.step == 2
    take_step(resumed)
    for ours, theirs in zip(resumed.model.variables + resumed.optimizer.variables(),
                            state.model.variables + state.optimizer.variables()):
        np.testing.assert_array_equal(ours, theirs, err_msg=ours.name)


def test_slot_keys_are_the_originals(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    take_step(state)
    keys = tf.train.load_checkpoint(state.save()).get_variable_to_shape_map()
    kernel = "model/resnet_model/initial_conv_relu_max_pool/0/conv2d/kernel"
    assert f"{kernel}/.OPTIMIZER_SLOT/optimizer/Momentum/.ATTRIBUTES/VARIABLE_VALUE" in keys
    assert "global_step/.ATTRIBUTES/VARIABLE_VALUE" in keys or "optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE" in keys


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    for _ in range(3):
        take_step(state), state.save()
    assert {path.name for path in tmp_path.glob("*.index")} == {"ckpt-2.index", "ckpt-3.index"}


@pytest.mark.parametrize("changes, words", [
    (dict(resnet_depth=34), "is missing there"), (dict(num_proj_layers=3), "is missing there"),
    (dict(proj_out_dim=8), "there, "), (dict(optimizer="adam"), "another optimizer")])
def test_another_network_or_optimizer_is_refused_and_nothing_is_changed(changes, words, tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    take_step(state)
    path = state.save()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    other = make_state(tmp_path, Config(**{**SMALL, **changes}))
    with pytest.raises(UserError, match=words) as error:
        other.resume(path)
    assert "--model_dir" in str(error.value) and "\n" not in str(error.value)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_file_with_more_than_a_training_has_is_refused(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    path = tf.train.Checkpoint(model=state.model, optimizer=state.optimizer, global_step=state.optimizer.iterations,
                               average=tf.Variable(1.0)).write(str(tmp_path / "ckpt-0"))
    with pytest.raises(UserError, match="another optimizer"):
        make_state(tmp_path, Config(**SMALL)).resume(path)


def test_warm_start_takes_directories_and_prefixes_and_tells(tmp_path):
    state = make_state(tmp_path, Config(**SMALL))
    take_step(state)
    prefix = state.save()
    for path in (str(tmp_path), prefix):
        model = model_lib.build_model(Config(**SMALL), 4)
        lines = restoring.warm_start(model, path).lines
        count = len(model.variables)
        assert lines[0] == f"loaded {count} of {count} variables from {prefix} (TF2 checkpoint)"
        assert lines[1].startswith("left out: ") and "tensors of the optimizer" in lines[1] and len(lines) == 2
        for ours, theirs in zip(model.variables, state.model.variables):
            np.testing.assert_array_equal(ours, theirs)


def test_warm_start_leaves_out_heads_that_do_not_fit(tmp_path):
    prefix = write_formula_weights(str(tmp_path / "ckpt-1"), model_lib.build_model(Config(**SMALL), 4))
    model = model_lib.build_model(Config(**{**SMALL, "proj_out_dim": 8}, train_mode="finetune"), 7)
    fresh_head = model.supervised_head.linear_layer.dense.kernel.numpy()
    lines = restoring.warm_start(model, prefix).lines
    assert any("left out: linear head" in line and "is [512, 4] there, [512, 7] here" in line for line in lines)
    assert any("left out: projection head" in line for line in lines)
    np.testing.assert_array_equal(model.supervised_head.linear_layer.dense.kernel, fresh_head)
    key = "model/resnet_model/initial_conv_relu_max_pool/0/conv2d/kernel"
    np.testing.assert_array_equal(model.resnet_model.initial_conv_relu_max_pool[0].conv2d.kernel,
                                  golden.formula_weight(key, (3, 3, 3, 64)))


def test_warm_start_refuses_another_encoder(tmp_path):
    prefix = write_formula_weights(str(tmp_path / "ckpt-1"), model_lib.build_model(Config(**SMALL), 4))
    with pytest.raises(UserError, match="--checkpoint: .* holds another network"):
        restoring.warm_start(model_lib.build_model(Config(**{**SMALL, "resnet_depth": 34}), 4), prefix)
