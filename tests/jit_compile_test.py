"""Checks that training steps compiled by XLA (`--jit_compile`) compute the same as other steps."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

import train
from large_batch import micro_batches
from runtime import devices, replicas
from support import ROOT, processes, replica_worker
from support.errors import rejects

ONE = tf.distribute.get_strategy()
BLUR = {"use_blur": True, "image_size": 20}  # With fewer than 20 pixels, blur has no effect.


def assert_equal_results(strategy, settings):
    """Compares three steps: scalars, gradients, moving statistics, weights and momentum."""
    expected = replica_worker.train_case(strategy, settings)
    results = replica_worker.train_case(strategy, {**settings, "jit_compile": True})
    assert expected["train/contrast_loss"] > 1
    replica_worker.assert_equal(results, expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {**BLUR, "se_ratio": 0.25, "loss_block_rows": 3},
        {"sk_ratio": 0.0625, "contrastive_loss": "nt_logistic"},
        {"micro_batch_size": 4, "contrastive_loss": "margin_triplet", "semi_hard": True},
    ],
    ids=str,
)
def test_compiled_step_on_one_replica(settings, float64):
    assert_equal_results(ONE, settings)


@pytest.mark.slow
def test_compiled_step_on_two_replicas(float64):
    assert_equal_results(replica_worker.two_replicas_on_one_device(), BLUR)


@pytest.mark.slow
def test_steps_on_several_gpus(two_replicas, float64, monkeypatch):
    """Runs on two CPUs what TensorFlow runs only on GPUs.

    These are a step with functions that XLA compiles, and the communication of a step that XLA
    compiles as a whole. Such a step does not call functions in cross-replica context. XLA supports
    its communication only on GPUs, so here the step itself is not compiled.
    """
    expected = replica_worker.train_case(two_replicas, BLUR)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "are_gpus", lambda _: True)
        with_compiled_parts = replica_worker.train_case(two_replicas, BLUR)
    replica_worker.assert_equal(with_compiled_parts, expected, rtol=1e-10)
    monkeypatch.setattr(type(two_replicas.extended), "_use_merge_call", lambda _: False)
    monkeypatch.setattr(tf.distribute.ReplicaContext, "merge_call", None, raising=False)
    without_merge_calls = replica_worker.train_case(two_replicas, BLUR)
    replica_worker.assert_equal(without_merge_calls, expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_compiled_step_in_half_precision(precision):
    def total_loss(jit_compile):
        config = replica_worker.make_config(
            {"precision": precision, "jit_compile": jit_compile, "train_steps": 10}
        )
        model, optimizer = replica_worker.build(config)
        batches = replica_worker.distributed_batches(config, ONE)
        run_steps = train.make_run_steps(train.TrainStep(model, optimizer, config, ONE))
        scalars, num_finite_steps = run_steps(batches, tf.constant(2))
        assert num_finite_steps == 2
        return float(scalars["train/total_loss"])

    assert total_loss(True) == pytest.approx(total_loss(False), rel=0.02)


def test_all_micro_batches_use_the_same_program():
    """XLA compiles a slice once for each position, so the position must not be the start of a slice."""
    calls = {}

    class RecordingStep(train.TrainStep):
        def compiled(self, function):
            def record(*args):
                calls[function.__name__] = function, args
                return function(*args)

            return record

    config = replica_worker.make_config({"micro_batch_size": 2, "use_blur": True})
    model, optimizer = replica_worker.build(config)
    step = RecordingStep(model, optimizer, config, ONE)
    batch = tf.nest.map_structure(tf.constant, replica_worker.batch_of(config))
    micro_step = micro_batches.MicroBatches(step)
    tf.function(lambda: micro_step(batch), autograph=False).get_concrete_function()
    function, args = calls["_add_gradients"]
    batch, gradients, _, sums = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), args)
    second_pass = tf.function(function, jit_compile=True, autograph=False)
    programs = [
        second_pass.experimental_get_compiler_ir(batch, gradients, tf.constant(index), sums)(
            stage="hlo"
        )
        for index in (0, 3)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize(
    "jit_compile, gpus, deterministic, expected",
    [
        (None, 1, False, True),
        (None, 1, True, False),
        (None, 0, False, False),
        (True, 0, True, True),
        (False, 1, False, False),
        (None, 2, False, False),
    ],
)
def test_the_default_is_to_compile_steps_on_a_single_gpu(
    jit_compile, gpus, deterministic, expected, two_replicas, monkeypatch
):
    monkeypatch.setattr(
        devices.framework_config, "is_op_determinism_enabled", lambda: deterministic
    )
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["GPU"] * gpus)
    assert devices.compiles_step(jit_compile, two_replicas if gpus == 2 else ONE) == expected


def test_several_cpus_give_a_one_line_error(two_replicas):
    with rejects("^--jit_compile: XLA cannot compile communication between CPUs. Remove"):
        devices.check_jit_compile(two_replicas)
    devices.check_jit_compile(ONE)


@pytest.mark.slow
@pytest.mark.skipif(
    tf.__version__.startswith("2.15."), reason="TensorFlow 2.15 cannot load programs for CPUs"
)
def test_later_runs_use_the_compiled_program_on_disk(tmp_path):
    def train(name):
        command = [
            sys.executable,
            str(processes.WORKER),
            "--mode=train",
            "--dataset=digits",
            "--image_size=8",
            "--resnet_depth=10",
            "--train_batch_size=8",
            "--train_steps=2",
            "--seed=1",
            "--jit_compile",
            f"--model_dir={tmp_path}/{name}",
        ]
        environment = {
            **os.environ,
            "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={tmp_path}",
        }
        process = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, text=True, capture_output=True
        )
        assert "compiling the training step with XLA" in process.stdout + process.stderr
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pb")}

    programs = train("first")
    assert programs and train("second") == programs
