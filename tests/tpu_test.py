"""Parts of TPU support that can be tested on a CPU: connection, errors, and XLA support for all operations."""

import numpy as np
import pytest
import tensorflow as tf

import data
import metrics
import model as model_lib
import resnet
from config import Config
from probing import features
from runtime import devices
from runtime.errors import UserError
from sources import digits
from train import TrainStep

SMALL = dict(dataset="digits", resnet_depth=10, image_size=8, train_batch_size=4, num_proj_layers=2, proj_out_dim=16,
             seed=1)


class FakeTpu:
    """Fake TPU that replaces TensorFlow's TPU functions and records calls to them."""

    def __init__(self, monkeypatch, master="", fails_at=None):
        self.calls = []

        def record(name, result=None):
            def function(*args, **kwargs):
                self.calls.append((name, args, kwargs))
                if name == fails_at:
                    raise tf.errors.NotFoundError(None, None, "TPUs not found\non the network")
                return self if result is None else result
            return function

        self.master = lambda: master
        for owner, name in ((tf.distribute.cluster_resolver, "TPUClusterResolver"),
                            (tf.config, "experimental_connect_to_cluster"),
                            (tf.tpu.experimental, "initialize_tpu_system"), (tf.distribute, "TPUStrategy"),
                            (devices.socket, "create_connection")):
            monkeypatch.setattr(owner, name, record(name))

    def close(self):
        """Does nothing. `create_connection` returns this object instead of a socket."""

    @property
    def names(self):
        return [name for name, _, _ in self.calls]


def make_strategy(**settings):
    config = Config(use_tpu=True, **settings)
    return devices.make_strategy(config.use_tpu, config.tpu_address, config.tpu_zone, config.gcp_project)


def test_tpu_setup_functions_are_called_in_the_documented_order(monkeypatch):
    tpu = FakeTpu(monkeypatch, "grpc://10.0.0.2:8470")
    assert make_strategy(tpu_name="mine", tpu_zone="zone", gcp_project="project") is tpu
    assert tpu.names == ["TPUClusterResolver", "create_connection", "experimental_connect_to_cluster",
                         "initialize_tpu_system", "TPUStrategy"]
    assert tpu.calls[0][2] == dict(tpu="mine", zone="zone", project="project")
    assert tpu.calls[1][1] == (("10.0.0.2", 8470),)
    assert all(call[1:] == ((tpu,), {}) for call in tpu.calls[2:])


def test_a_tpu_vm_uses_its_local_tpu_without_a_network_connection(monkeypatch):
    tpu = FakeTpu(monkeypatch)
    make_strategy(tpu_name="local")
    assert tpu.calls[0][2]["tpu"] == "local" and "create_connection" not in tpu.names


@pytest.mark.parametrize("step", [
    "TPUClusterResolver", "create_connection", "experimental_connect_to_cluster", "initialize_tpu_system",
    "TPUStrategy"])
def test_an_unreachable_tpu_gives_a_one_line_error(step, monkeypatch):
    FakeTpu(monkeypatch, "grpc://10.0.0.2:8470", step)
    with pytest.raises(UserError, match="--use_tpu: no TPU could be reached .TPUs not found.") as error:
        make_strategy(master="mine")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings, environment, started", [
    (dict(use_tpu=False), "", True), (dict(use_tpu=True), "", False), (dict(use_tpu=False), '{"cluster": {}}', False)])
def test_runtime_startup_is_deferred_if_a_tpu_or_tf_config_is_used(settings, environment, started, monkeypatch):
    calls = []
    monkeypatch.setenv("TF_CONFIG", environment)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: calls.append(1))
    devices.start_runtime(**settings)
    assert bool(calls) == started


@pytest.fixture
def few_blocks(monkeypatch):
    """Shrinks the network so that tracing is fast. More blocks would not add new operations."""
    monkeypatch.setitem(resnet.DEPTHS, SMALL["resnet_depth"], (False, (1, 2)))


def lower_to_xla(function, *arguments):
    """Returns the HLO text of `function`. Fails if XLA does not support one of the function's operations."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo")


@pytest.mark.parametrize("settings", [
    dict(linear_head_learning_rate=0.1), dict(optimizer="momentum", train_mode="finetune", stem="imagenet"),
    dict(contrastive_loss="nt_logistic", semi_hard=True, lineareval_while_pretraining=False)])
def test_xla_supports_all_operations_in_the_training_step(settings, few_blocks, tmp_path):
    config = Config(**{**SMALL, **settings})
    model = model_lib.build_model(config, 10)
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 64), model)
    step = TrainStep(model, optimizer, config.replace(seed=1), tf.distribute.get_strategy())
    batch = next(iter(data.build_train_dataset(config, digits.digits_source(), 1, 4)))
    assert "convolution" in lower_to_xla(step, *batch)


def test_xla_supports_all_operations_in_evaluation(few_blocks):
    config = Config(**SMALL)
    model = model_lib.build_model(config, 10)
    encode = features.encoder_function(model)

    def evaluate(images, labels):
        logits = model(images, training=False)["logits_sup"]
        return encode(images), metrics.top_1_hits(labels, logits), metrics.top_k_hits(labels, logits, 5)

    assert "convolution" in lower_to_xla(evaluate, tf.zeros([4, 8, 8, 3]), tf.constant([1, 2, 3, -1], tf.int64))


def test_all_batches_have_static_shapes():
    config, source = Config(**SMALL), digits.digits_source()
    training = data.build_train_dataset(config, source, 1, 4)
    for dataset in (training, data.build_eval_dataset(config, source, "test", 7, replicas=8)):
        assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)
    assert training.cardinality() == tf.data.INFINITE_CARDINALITY
    assert np.all([spec.dtype != tf.string for spec in training.element_spec])
