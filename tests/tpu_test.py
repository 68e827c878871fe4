"""Parts of TPU support that can be tested on a CPU: connection, errors, and XLA support for all operations."""

import collections
import functools
import os
import re
import socket
import subprocess
import sys

import pytest
import tensorflow as tf

import data
import metrics
import model as model_lib
from config import Config, parse_settings
from probing import features
from runtime import devices
from sources import digits
from support import ROOT, SMALL, replica_worker
from support.errors import rejects
from train import TrainStep

SETTINGS = {**SMALL, "dataset": "digits", "train_batch_size": 4, "seed": 1}


class FakeTpu:
    """Replaces TensorFlow's TPU functions. As with a real TPU, each one fails unless the one before it was called.

    The reachability check, which precedes them, opens a real connection to `master`.
    """

    def __init__(self, monkeypatch, master="", fails_at=None):
        self.master = lambda: master
        self.arguments, self._state, self._fails_at = None, "found", fails_at
        monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", self._find)
        for owner, name, before, after in (
            (tf.config, "experimental_connect_to_cluster", "found", "connected"),
            (tf.tpu.experimental, "initialize_tpu_system", "connected", "initialized"),
            (tf.distribute, "TPUStrategy", "initialized", "in use"),
        ):
            monkeypatch.setattr(owner, name, functools.partial(self._advance, name, before, after))

    def _find(self, **arguments):
        self._fail_at("TPUClusterResolver")
        self.arguments = arguments
        return self

    def _advance(self, name, before, after, resolver):
        self._fail_at(name)
        if resolver is not self or self._state != before:
            raise tf.errors.FailedPreconditionError(
                None, None, f"{name}: the TPU is {self._state}, not {before}"
            )
        self._state = after
        return f"TPU {after}"

    def _fail_at(self, name):
        if name == self._fails_at:
            raise tf.errors.NotFoundError(None, None, "TPUs not found\non the network")


@pytest.fixture
def server():
    """Returns a socket that listens on a local port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        yield listening


def address_of(server):
    return f"grpc://127.0.0.1:{server.getsockname()[1]}"


def make_strategy(**settings):
    config = Config(use_tpu=True, **settings)
    return devices.make_strategy(
        config.use_tpu, config.tpu_address, config.tpu_zone, config.gcp_project
    )


def test_strategy_uses_an_initialized_tpu_with_the_given_name(monkeypatch, server):
    tpu = FakeTpu(monkeypatch, address_of(server))
    assert make_strategy(tpu_name="mine", tpu_zone="zone", gcp_project="project") == "TPU in use"
    assert tpu.arguments == {"tpu": "mine", "zone": "zone", "project": "project"}
    server.accept()[0].close()  # Times out unless the program has connected to the TPU's address.


@pytest.mark.parametrize(
    "name, variable, has_tpu, expected",
    [("local", "other", False, "local"), (None, "mine", True, "mine"), (None, None, True, "local")],
)
def test_the_default_is_the_tpu_in_the_environment_or_that_of_the_vm(
    name, variable, has_tpu, expected, monkeypatch, tmp_path
):
    """FakeTpu has no address, so that no network connection is required."""
    tpu = FakeTpu(monkeypatch)
    if variable:
        monkeypatch.setenv("TPU_NAME", variable)
    path = tmp_path / "accel0"
    monkeypatch.setattr(devices, "_TPU_DEVICES", (str(path),))
    if has_tpu:
        path.touch()
    assert make_strategy(tpu_name=name) == "TPU in use"
    assert tpu.arguments["tpu"] == expected


@pytest.mark.parametrize(
    "step", ["TPUClusterResolver", "initialize_tpu_system", "TPUStrategy", None]
)
def test_an_unreachable_tpu_gives_a_one_line_error(step, monkeypatch, server):
    FakeTpu(monkeypatch, address_of(server), step)
    reason = "TPUs not found"
    if step is None:
        server.close()
        reason = "refused"
    with rejects(f"^--use_tpu: no TPU could be reached .*{reason}.* Check --tpu_name"):
        make_strategy(master="mine")


def test_reason_is_shown_if_the_tpu_of_the_vm_cannot_be_used(monkeypatch, stub_tensorflow, logged):
    stub_tensorflow("sys.exit(3)")
    FakeTpu(monkeypatch, fails_at="initialize_tpu_system")
    with rejects("--use_tpu: no TPU could be reached"):
        make_strategy(tpu_name="local")
    assert logged[0].endswith("with status 3:\n  reason 1\n  reason 2")


@pytest.mark.slow
@pytest.mark.skipif("SIMCLR_TPU" not in os.environ, reason="`make test-tpu` runs this test")
def test_documented_packages_can_be_installed_and_start_the_program(tmp_path):
    """Requires a network connection, and a machine without a TPU."""
    section = (ROOT / "docs/accelerators.md").read_text().split("\n## TPUs\n")[1]
    program = f"""
{sys.executable} -m venv {tmp_path}/env
. {tmp_path}/env/bin/activate
{"; ".join(re.findall("^    (pip install .*)", section, re.MULTILINE))}
pip list
python -c "import cloud_tpu_client"
export TPU_SKIP_MDS_QUERY=1  # Otherwise, libtpu waits several minutes for Google Cloud.
python run.py --use_tpu --tpu_name=local --dataset=digits
"""
    done = subprocess.run(["bash", "-ec", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no TPU could be reached" in done.stderr, done.stderr
    packages = re.findall(r"^(\S+) +\d", done.stdout.replace("_", "-"), re.MULTILINE)
    assert {"tensorflow-tpu", "libtpu", "tf-keras"} < {*packages} and "tensorflow" not in packages
    assert "/libtpu.so\n" in done.stdout


def make_step(config, strategy):
    """Returns the training step of a network with one block. More blocks would not add new operations."""
    with strategy.scope():
        model, optimizer = replica_worker.build(config)
    return TrainStep(model, optimizer, config, strategy)


def lower_to_xla(function, *arguments):
    """Returns the HLO text of `function`. Fails if XLA does not support one of the function's operations."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo")


def count_operations(hlo):
    """Returns a dict with the number of HLO operations of each kind.

    Fails if a shape is dynamic, or if an operation communicates with the host or calls a library,
    since a TPU would recompile or wait for the host.
    """
    assert not re.search(r"[\[,]<=", hlo)
    counts = collections.Counter(re.findall(r" = (?:\(.*?\)|\S+) ([a-z][a-z-]*)\(", hlo))
    unsuitable = "infeed|outfeed|send|recv|custom-call|set-dimension-size"
    assert counts["parameter"] and not any(re.fullmatch(unsuitable, kind) for kind in counts)
    return counts


def test_dynamic_shapes_and_host_callbacks_are_detected():
    values = tf.constant([1.0, 2.0])
    assert count_operations(lower_to_xla(lambda x: tf.sin(x), values))["sine"] == 1
    with pytest.raises(AssertionError):
        count_operations(lower_to_xla(lambda x: x[x > 1], values))
    with pytest.raises(ValueError):
        lower_to_xla(lambda x: tf.py_function(tf.sin, [x], tf.float32), values)


@pytest.mark.parametrize(
    "flags",
    [
        "--linear_head_learning_rate=0.1",
        "--optimizer=momentum --train_mode=finetune --stem=imagenet",
        "--contrastive_loss=nt_logistic --semi_hard --nolineareval_while_pretraining",
    ],
)
def test_xla_supports_all_operations_in_the_training_step(flags):
    config = Config(**SETTINGS, **parse_settings(flags))
    step = make_step(config, tf.distribute.get_strategy())
    batch = next(iter(data.build_train_dataset(config, digits.digits_source(), 1, 4)))
    hlo = lower_to_xla(lambda *arguments: step(*arguments), *batch)
    operations = count_operations(hlo)
    # Convolutions whose kernel covers the image are matrix products.
    assert operations["convolution"] + operations["dot"] > 15, operations


def lower_step(config, strategy):
    """Returns the HLO text of a training step on all replicas of `strategy`."""
    step = make_step(config, strategy)

    def run_share(*batch):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return step(
            *tf.nest.map_structure(
                lambda x: tf.reshape(x, [strategy.num_replicas_in_sync, -1, *x.shape[1:]])[index],
                batch,
            )
        )

    batch = tf.nest.map_structure(tf.constant, replica_worker.batch_of(config))
    return lower_to_xla(lambda *tensors: strategy.run(run_share, tensors), *batch)


@pytest.mark.slow
def test_a_training_step_on_two_replicas_is_a_single_xla_program():
    """`jit_compile_test.py` compares its results with those of a step without XLA."""
    config = replica_worker.make_config({"use_blur": True})
    counts = [
        count_operations(lower_step(config, strategy))
        for strategy in (tf.distribute.get_strategy(), replica_worker.two_replicas_on_one_device())
    ]
    assert counts[1]["convolution"] == 2 * counts[0]["convolution"] > 20


def test_xla_supports_all_operations_in_evaluation(tiny_resnet):
    model = model_lib.build_model(Config(**SETTINGS), 10)
    encode = features.encoder_function(model)

    def evaluate(images, labels):
        logits = model(images, training=False)["logits_sup"]
        hits = metrics.top_1_hits(labels, logits), metrics.top_k_hits(labels, logits, 5)
        return encode(images), hits

    hlo = lower_to_xla(evaluate, tf.zeros([4, 8, 8, 3]), tf.constant([1, 2, 3, -1], tf.int64))
    assert count_operations(hlo)["convolution"] > 3


def test_all_batches_have_static_shapes():
    config, source = Config(**SETTINGS), digits.digits_source()
    training, on_device = (
        data.build_train_dataset(config.replace(augment_on=place), source, 1, 4)
        for place in ("host", "device")
    )
    evaluation = data.build_eval_dataset(config, source, "test", 7, replicas=8)
    specs = [tf.nest.flatten(each.element_spec) for each in (training, on_device, evaluation)]
    assert all(spec.shape.is_fully_defined() for spec in sum(specs, []))
    assert all(spec.dtype != tf.string for spec in specs[0])
    assert training.cardinality() == tf.data.INFINITE_CARDINALITY
