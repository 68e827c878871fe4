"""Checkpoints: compatibility with the original, resuming, warm starts and mismatches."""

import contextlib
import functools
import http.server
import tarfile
import threading

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.testing import assert_array_equal

import evaluate
import model as model_lib
import train
from checkpoints import loading, weight_files
from checkpoints.training_state import TrainingState
from config import Config
from export import saving
from runtime import workers
from sources import digits
from support import SMALL, golden, runs
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("tiny_resnet")


def make_state(directory, **settings):
    config = Config(**{**SMALL, **settings})
    model = model_lib.build_model(config, 10)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 100), model)
    return TrainingState(model, optimizer, str(directory), 2)


def take_step(state):
    """Takes one step. Returns the path of a checkpoint."""
    gradients = [tf.ones_like(v) for v in state.model.trainable_variables]
    state.optimizer.apply_gradients(zip(gradients, state.model.trainable_variables))
    return state.save()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the model of a run after its first step, and the path of the checkpoint."""
    state = make_state(tmp_path_factory.mktemp("run"))
    return state.model, take_step(state)


def assert_same_variables(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected):
        assert_array_equal(ours, theirs, err_msg=ours.name)


def load_into_new_model(load, path, original):
    """Calls `load(model, path)`, and asserts that the weights equal those of `original`. Returns the result."""
    model = model_lib.build_model(Config(**SMALL), 10)
    result = load(model, path)
    assert_same_variables(model.variables, original.variables)
    return result


def test_different_checkpoints_of_workers_and_lost_workers_are_detected(tmp_path, monkeypatch):
    def lose_worker(*_):
        raise tf.errors.AbortedError(None, None, "Collective ops is aborted")

    state = TrainingState(tf.Module(), keras.optimizers.legacy.SGD(), str(tmp_path), 1)
    monkeypatch.setattr(workers, "gather_integers", lambda *_: np.array([[-1], [3]]))
    with rejects(r"different checkpoints \(steps: none, 3\)"):
        state.restore_newest(str(tmp_path), tf.distribute.get_strategy())
    state.save()
    # The error is not taken for a corrupt checkpoint.
    monkeypatch.setattr(TrainingState, "resume", lose_worker)
    with pytest.raises(tf.errors.AbortedError):
        state.restore_newest(str(tmp_path), tf.distribute.get_strategy())


@pytest.mark.parametrize("optimizer", ["lars", "momentum", "adam"])
def test_resume_restores_weights_slots_and_step(optimizer, tmp_path):
    state = make_state(tmp_path, optimizer=optimizer)
    take_step(state)
    path = take_step(state)
    assert path.endswith("ckpt-2")
    take_step(state)
    resumed = make_state(tmp_path, optimizer=optimizer)
    resumed.resume(path)
    assert resumed.step == 2
    take_step(resumed)
    assert_same_variables(resumed.model.variables, state.model.variables)
    assert_same_variables(resumed.optimizer.variables(), state.optimizer.variables())


def test_slot_keys_match_the_original(trained):
    keys = tf.train.load_checkpoint(trained[1]).get_variable_to_shape_map()
    kernel = "model/resnet_model/initial_conv_relu_max_pool/0/conv2d/kernel"
    assert f"{kernel}/.OPTIMIZER_SLOT/optimizer/Momentum/.ATTRIBUTES/VARIABLE_VALUE" in keys
    assert (
        "global_step/.ATTRIBUTES/VARIABLE_VALUE" in keys
        or "optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE" in keys
    )


def test_resuming_with_a_different_network_or_optimizer_fails_without_changing_files(tmp_path):
    path = take_step(make_state(tmp_path))
    before = runs.contents(tmp_path)
    for changes, message in (
        (dict(se_ratio=0.25), "missing: model/"),
        (dict(proj_out_dim=8), "instead of"),
        (dict(optimizer="adam"), "different optimizer"),
    ):
        with rejects(f"--model_dir.*{message}"):
            make_state(tmp_path, **changes).resume(path)
    assert runs.contents(tmp_path) == before


# ---------------------------------------------------------------------------------------------------- warm starts


def test_warm_start_accepts_directories_and_prefixes(trained):
    model, prefix = trained
    count = len(model.variables)
    for path in (prefix.removesuffix("/ckpt-1"), prefix):
        lines = load_into_new_model(loading.warm_start, path, model).lines
        assert lines[0] == f"loaded {count} of {count} variables from {prefix} (TF2 checkpoint)"


def test_warm_start_skips_mismatched_heads(trained):
    config = Config(**{**SMALL, "proj_out_dim": 8}, train_mode="finetune")
    model = model_lib.build_model(config, 7)
    fresh_head = model.supervised_head.linear_layer.dense.kernel.numpy()
    loaded = loading.warm_start(model, trained[1])
    assert "has shape [128, 10] instead of [128, 7]" in loaded.not_loaded["linear head"]
    assert "projection head" in loaded.not_loaded
    assert_array_equal(model.supervised_head.linear_layer.dense.kernel, fresh_head)
    assert_same_variables(model.resnet_model.variables, trained[0].resnet_model.variables)


def test_classifier_on_a_projection_layer_requires_the_projection_weights(trained):
    """Missing projection weights raise an error if the classifier would otherwise use a randomly initialized layer."""
    settings = dict(SMALL, num_proj_layers=3, checkpoint=trained[1], dataset="digits")
    for selector in (-1, 0):
        config = Config(**settings, train_mode="finetune", ft_proj_selector=selector)
        model = model_lib.build_model(config, 10)
        parts = evaluate._required_parts(config, digits.digits_source())
        expectation = contextlib.nullcontext
        if selector:
            expectation = functools.partial(rejects, "--num_proj_layers=2")
        with expectation():
            train._initialize_weights(runs.make_context(config), model)
        with expectation():
            loading.load_parts(model, config.checkpoint, parts)


@pytest.mark.parametrize("zero_init", [False, True])
def test_loaded_linear_head_is_logged_unless_it_is_zero_initialized(zero_init, trained, capsys):
    config = Config(
        **SMALL, train_mode="finetune", checkpoint=trained[1], zero_init_logits_layer=zero_init
    )
    model = model_lib.build_model(config, 10)
    train._initialize_weights(runs.make_context(config, digits.digits_source()), model)
    assert ("pass --zero_init_logits_layer to start from zeros" in capsys.readouterr().out) == (
        not zero_init
    )
    assert model.supervised_head.linear_layer.dense.kernel.numpy().any() == (not zero_init)


# --------------------------------------------------------------------------------------------------- SavedModels


@pytest.fixture(scope="module")
def saved_models(trained, tmp_path_factory):
    """Exports the model in three ways. Returns a dict mapping exporters to directories."""
    model, directories = trained[0], {}

    def save(exporter, module, **options):
        directories[exporter] = str(tmp_path_factory.mktemp(exporter))
        tf.saved_model.save(module, directories[exporter], **options)

    module, signatures = saving.build_module(model, Config(**SMALL))
    save("ours", module, signatures=signatures)
    # As in the original, a tf.Module holds the Keras model, so every layer is saved.
    module = tf.Module()
    module.saved_model = model
    save("original", module)
    # As in models converted from TF1, the variables are in a list, and only their names identify
    # them.
    module = tf.Module()
    module.variables_ = [
        tf.Variable(variable, name=golden.tf1_name(key))
        for key, variable in loading.variables_by_key(model=model).items()
    ]
    save("converted", module)
    return directories


def test_weights_are_loaded_from_saved_models_of_all_exporters(saved_models, trained):
    for exporter, directory in saved_models.items():
        file = load_into_new_model(loading.load_model, directory, trained[0])
        assert file.is_saved_model and ("TF1 names" in file.format) == (exporter == "converted")


def test_saved_model_with_a_hub_handle_is_downloaded(saved_models, trained, tmp_path, monkeypatch):
    (tmp_path / "simclr").mkdir()
    with tarfile.open(tmp_path / "simclr" / "1", "w:gz") as tar:
        tar.add(saved_models["ours"], arcname=".")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFHUB_CACHE_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        load_into_new_model(loading.warm_start, f"{address}/simclr/1", trained[0])
        with rejects("--checkpoint=.*/simclr/2: the download failed"):
            weight_files.open_weights(f"{address}/simclr/2")
        server.shutdown()
    cache = tmp_path / ".cache" / "tfhub_modules"  # Other users cannot prepare files there.
    assert list(cache.iterdir()) and cache.stat().st_mode & 0o777 == 0o700
