"""Checks on a GPU: `python -m pytest -m gpu`. TF32 is off, since its products have only 10 bits of mantissa."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import objective
import train
from benchmarks import programs
from config import Config, parse_settings
from large_batch import blocked_nt_xent
from support import ROOT, golden, processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="requires a GPU"),
]
# The recipe with a tenth of its epochs, and the smallest accuracies that it has to reach.
CIFAR10 = (
    "--flagfile=paper/recipes/cifar10.cfg",
    "--train_epochs=100",
    "--precision=mixed_bfloat16",
    "--linear_head_learning_rate=0.1",
    "--eval_protocol=lbfgs,knn",
    "--seed=1",
)
ACCURACIES = {"eval/lbfgs_top_1_accuracy": 0.845, "eval/knn_top_1_accuracy": 0.82}


@pytest.fixture(autouse=True)
def no_tf32():
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.parametrize("form", [objective.add_contrastive_loss, blocked_nt_xent.contrastive_loss])
def test_contrastive_loss_matches_the_original(form):
    arrays = golden.load("nt_xent")
    for case in map(str, arrays["cases"]):
        z = tf.constant(arrays[f"{case}/hidden"])
        with tf.GradientTape() as tape:
            tape.watch(z)
            loss = form(z, **golden.contrastive_settings(case))[0]
        assert golden.relative_error(loss, arrays[f"{case}/loss"]) < 1e-5
        assert golden.relative_error(tape.gradient(loss, z), arrays[f"{case}/grad"]) < 1e-5


def test_blur_matches_the_original():
    golden.assert_blur_matches("97x131", 1e-5)


@pytest.mark.parametrize("training, bound", [(False, 1e-4), (True, 1e-2)])
def test_networks_match_the_original(training, bound):
    arrays = golden.load("network_train" if training else "network")
    for case in map(str, arrays["cases"]):
        config, _ = golden.config_of(arrays, case)
        model, _ = golden.build_model(config)
        outputs = model(golden.views_of(arrays, case, config.image_size), training=training)
        prefix = f"{case}/{'train' if training else 'eval'}"
        golden.assert_outputs_match(outputs, arrays, prefix, bound)


def two_steps(config, weights=None):
    """Returns the total loss and the changes of the variables after each of two steps, and the initial weights."""
    model, optimizer = programs.build(config)
    if weights is not None:
        model.set_weights(weights)
    weights, start = model.get_weights(), [each.numpy() for each in model.trainable_variables]
    step = tf.function(train.TrainStep(model, optimizer, config, tf.distribute.get_strategy()))
    random, results = np.random.default_rng(0), []
    for _ in range(2):
        # With noise alone, all images would have similar features, and batch norm would amplify
        # rounding errors.
        shape = (config.train_batch_size, 4, 4, 3)
        images = np.kron(random.uniform(size=shape), np.ones([1, *[config.image_size // 4] * 2, 1]))
        views = [images + random.normal(0, 0.1, images.shape) for _ in range(2)]
        labels = tf.constant(random.integers(0, 10, config.train_batch_size))
        views = tuple(tf.constant(view, keras.backend.floatx()) for view in views)
        loss = float(step(views, labels)["train/total_loss"])
        changes = [new - old for new, old in zip(model.trainable_variables, start)]
        results.append((loss, [change.numpy() for change in changes]))
    return results, weights


@pytest.mark.parametrize("depth, size, batch", [(18, 32, 32), (50, 224, 16)])
def test_float32_steps_match_float64_steps_on_the_cpu(depth, size, batch):
    flags = f"--resnet_depth={depth} --image_size={size} --train_batch_size={batch} --nouse_blur"
    flags += " --train_steps=100 --warmup_epochs=0 --seed=1"
    config = Config(**parse_settings(flags))
    actual, weights = two_steps(config)
    keras.backend.set_floatx("float64")
    try:
        with tf.device("/CPU:0"):
            expected, _ = two_steps(config, weights)
    finally:
        keras.backend.set_floatx("float32")
    # Several times larger than the errors on a CPU, which grow quickly, because training is
    # chaotic. In the first step, some variables do not change.
    for (loss, changes), (reference, references), bounds in zip(
        actual, expected, ((1e-5, 0.05, 0.01), (1e-3, 1.0, 0.1))
    ):
        errors = [
            golden.relative_error(*pair) if np.any(pair[1]) else np.abs(pair[0]).max()
            for pair in zip(changes, references)
        ]
        values = golden.relative_error(loss, reference), np.max(errors), np.median(errors)
        assert np.all(np.less(values, bounds)), values


def start(flags, model_dir):
    return subprocess.Popen(
        [sys.executable, "run.py", *flags, f"--model_dir={model_dir}"], cwd=ROOT
    )


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_deterministic_runs_are_equal_also_after_a_kill(precision, tmp_path):
    """All runs share the device, which is a stricter test than running them one after another."""
    flags = [
        "--dataset=digits",
        "--mode=train",
        f"--precision={precision}",
        "--resnet_depth=18",
        "--image_size=32",
        "--train_batch_size=128",
        "--train_steps=60",
        "--checkpoint_steps=10",
        "--warmup_epochs=1",
        "--learning_rate=0.1",
        "--linear_head_learning_rate=0.1",
        "--seed=7",
        "--deterministic",
    ]
    directories = [str(tmp_path / name) for name in ("first", "second", "resumed")]
    runs = [start(flags, directory) for directory in directories]
    while not os.path.exists(f"{directories[2]}/checkpoint"):  # written after the first checkpoint
        assert runs[2].poll() is None
        time.sleep(0.01)
    runs[2].send_signal(signal.SIGKILL)
    runs[2].wait()
    runs[2] = start(flags, directories[2])
    assert [run.wait() for run in runs] == [0, 0, 0]
    first, *others = (processes.tensors(directory, 60) for directory in directories)
    for key, value in first.items():
        assert [other[key].tobytes() for other in others] == [value.tobytes()] * 2, key


@pytest.mark.slow
@pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="requires CIFAR-10 in TFDS_DATA_DIR")
def test_cifar10_reaches_the_expected_accuracies(tmp_path):
    results = programs.accuracies([*CIFAR10], str(tmp_path / "run"))(1)
    assert all(results[name] >= accuracy for name, accuracy in ACCURACIES.items())
