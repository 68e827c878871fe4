"""Parts `device`, `golden`, `reference`, `deterministic` and `cifar10` of `benchmarks.accelerator`.

In the lines with `holds`, `baseline` is the largest allowed error, or the smallest allowed
accuracy.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

import data_util
import metrics
import model as model_lib
import objective
import train
from benchmarks import measure
from checkpoints import checkpoint_files
from config import Config
from large_batch import blocked_nt_xent
from lars_optimizer import LARSOptimizer
from runtime import child_processes

# The recorded values, and the functions that read them, belong to the tests.
sys.path.append("tests")
from support import golden as recorded  # noqa: E402

_CLASSES = 10
_LINEAR, _KNN = "eval/lbfgs_top_1_accuracy", "eval/knn_top_1_accuracy"


def _check(case, unit, value, bound, holds):
    """Returns the line of a check. Without a bound, the value is only reported."""
    details = {} if bound is None else dict(holds=bool(holds))
    return measure.line("accelerator", case, unit, value, bound, **details)


# ------------------------------------------------------------------------------------------------------------ device


def device():
    """Yields one line with the devices, the driver and the versions of the libraries."""
    gpus = [
        dict(tf.config.experimental.get_device_details(gpu))
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    build, driver = tf.sysconfig.get_build_info(), None
    if shutil.which("nvidia-smi"):
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
    versions = {}
    for package in ("tf_keras", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    yield dict(
        benchmark="accelerator",
        case="device",
        gpus=gpus,
        driver=driver,
        tensorflow=tf.__version__,
        **versions,
        cuda=build.get("cuda_version"),
        cudnn=build.get("cudnn_version"),
        cores=child_processes.cpu_info()[1],
        tf32=tf.config.experimental.tensor_float_32_execution_enabled(),
    )


# ------------------------------------------------------------------------------------------------------------ golden


def golden(tf32, cases=None):
    """Yields the largest errors on this device, relative to values recorded from the original on a CPU.

    Args:
      tf32: whether to enable TF32. The bounds are for float32 without TF32, so errors with TF32 are
        only reported.
      cases: number of recorded networks to use, or None for all.
    """
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    # The bounds are several times larger than the errors on a CPU, since other devices add in a
    # different order.
    for name, errors, bound in (
        ("NT-Xent", _loss_errors(_plain_loss), 1e-5),
        ("NT-Xent in blocks", _loss_errors(_blocked_loss), 1e-5),
        ("LARS", _lars_errors(), 1e-5),
        ("blur", _blur_errors(), 1e-5),
        ("networks, inference", _network_errors("network", False, cases), 1e-4),
        ("networks, training", _network_errors("network_train", True, cases), 1e-2),
        ("losses of the first step", _step_errors(cases), 1e-4),
    ):
        error = np.max(list(errors))  # NaN if any error is NaN
        yield _check(
            f"golden, {name}, {'tf32' if tf32 else 'float32'}",
            "relative error",
            error,
            None if tf32 else bound,
            error <= bound,
        )


def _plain_loss(z, hidden_norm, temperature):
    loss, logits_ab, labels = objective.add_contrastive_loss(z, hidden_norm, temperature)
    return (
        loss,
        metrics.contrastive_accuracy(logits_ab, labels),
        metrics.contrastive_entropy(logits_ab),
    )


def _blocked_loss(z, hidden_norm, temperature):
    return blocked_nt_xent.contrastive_loss(z, hidden_norm, temperature, block_rows=3)


def _loss_errors(function):
    arrays = recorded.load("nt_xent")
    for case in map(str, arrays["cases"]):
        z, temperature = (
            tf.constant(arrays[f"{case}/hidden"]),
            float(case.split("tau")[1].split("_")[0]),
        )
        with tf.GradientTape() as tape:
            tape.watch(z)
            loss, accuracy, entropy = function(z, case.endswith("norm1"), temperature)
        for name, value in (
            ("loss", loss),
            ("grad", tape.gradient(loss, z)),
            ("contrast_acc", accuracy),
            ("contrast_entropy", entropy),
        ):
            if np.any(arrays[f"{case}/{name}"]):
                yield recorded.relative_error(value, arrays[f"{case}/{name}"])


def _lars_errors():
    arrays = recorded.load("lars")
    names = [str(name) for name in arrays["names"]]
    for case in map(str, arrays["cases"]):
        variables = [tf.Variable(arrays[f"{case}/init/{name}"], name=name) for name in names]
        optimizer = LARSOptimizer(**json.loads(str(arrays[f"{case}/config"])))
        for step in range(4):
            optimizer.apply_gradients(
                [
                    (tf.constant(arrays[f"{case}/grad{step}/{name}"]), variable)
                    for name, variable in zip(names, variables)
                ]
            )
            for name, variable in zip(names, variables):
                start = arrays[f"{case}/init/{name}"]
                yield recorded.relative_error(
                    variable - start, arrays[f"{case}/param{step}/{name}"] - start
                )


def _blur_errors():
    arrays = recorded.load("images")
    for image in ("97x131", "240x180"):
        batch = tf.constant(np.stack([arrays[f"{image}/blur_in"]] * 3))
        blurred = data_util.gaussian_blur(batch, 6, tf.constant([0.3, 1.0, 2.0]))
        for row, sigma in zip(blurred, ("0.3", "1.0", "2.0")):
            yield recorded.relative_error(row, arrays[f"{image}/blur_k6_sigma{sigma}"])


def _network_errors(file, training, cases):
    arrays = recorded.load(file)
    for case in map(str, arrays["cases"][:cases]):
        config, _ = recorded.config_of(arrays, case)
        model = model_lib.build_model(config, _CLASSES)
        recorded.assign_computed_weights(model)
        shape = (4, config.image_size, config.image_size, 6)
        views = (
            np.random.default_rng(int(arrays[f"{case}/views_seed"]))
            .uniform(0, 1, shape)
            .astype(np.float32)
        )
        outputs = model(np.concatenate([views[..., :3], views[..., 3:]]), training=training)
        for ours, theirs in (("proj_head_output", "proj"), ("logits_sup", "logits")):
            yield recorded.relative_error(
                outputs[ours], arrays[f"{case}/{'train' if training else 'eval'}/{theirs}"]
            )


def _step_errors(cases):
    # The later steps are not compared. In float32, their losses differ by up to 1 %, because
    # training is chaotic.
    arrays = recorded.load("train_step")
    for case in map(str, arrays["cases"][:cases]):
        config, settings = recorded.config_of(arrays, case)
        model = model_lib.build_model(config, _CLASSES)
        recorded.assign_computed_weights(model)
        optimizer = model_lib.build_optimizer(
            config, model_lib.build_schedule(config, settings["num_examples"]), model
        )
        step = tf.function(
            train.TrainStep(model, optimizer, config.replace(seed=0), tf.distribute.get_strategy())
        )
        random, size = np.random.default_rng(settings["data_seed"]), config.image_size
        views = random.uniform(0, 1, (16, size, size, 6)).astype(np.float32)
        scalars, _ = step(tf.split(views, 2, -1), tf.constant(random.integers(0, _CLASSES, 16)))
        losses = [
            scalars[f"train/{name}"]
            for name in ("contrast_loss", "supervised_loss", "weight_decay")
        ]
        yield from map(recorded.relative_error, losses, arrays[f"{case}/step0/losses"])


# --------------------------------------------------------------------------------------------------------- reference


def reference(depth, size, batch):
    """Yields the differences between training in float32 on this device and in float64 on the CPU, for two steps.

    The differences are relative. Those of the weights compare the change of each variable since the
    start, in the l2 norm, and therefore include the errors of the gradients. If a variable does not
    change in float64, its largest absolute change is used. Both models start from the same initial
    weights.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    config = Config(
        resnet_depth=depth,
        image_size=size,
        train_batch_size=batch,
        use_blur=False,
        train_steps=100,
        warmup_epochs=0.0,
        learning_rate=0.3,
        seed=1,
    )
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, _CLASSES)
    weights = model.get_weights()
    actual = _two_steps(config, model)
    keras.backend.set_floatx("float64")
    try:
        with tf.device("/CPU:0"):
            model = model_lib.build_model(config, _CLASSES)
            model.set_weights(weights)
            expected = _two_steps(config, model)
    finally:
        keras.backend.set_floatx("float32")
    case = f"reference, ResNet-{depth}, {size} pixels, batch {batch}"
    # The bounds are several times larger than the errors on a CPU. Errors grow quickly, because
    # training is chaotic.
    bounds = {"loss": (1e-5, 1e-3), "weights, largest": (0.05, 1.0), "weights, median": (0.01, 0.1)}
    for step, ((loss, changes), (expected_loss, expected_changes)) in enumerate(
        zip(actual, expected)
    ):
        # In the first step, some variables do not change, because the last batch norm of each block
        # outputs zeros.
        errors = [
            (
                recorded.relative_error(change, expected_change)
                if np.any(expected_change)
                else np.abs(change).max()
            )
            for change, expected_change in zip(changes, expected_changes)
        ]
        values = {
            "loss": recorded.relative_error(loss, expected_loss),
            "weights, largest": np.max(errors),
            "weights, median": float(np.median(errors)),
        }
        for name, error in values.items():
            bound = bounds[name][step]
            yield _check(
                f"{case}, step {step + 1}, {name}", "relative error", error, bound, error <= bound
            )


def _two_steps(config, model):
    """Runs two training steps. Returns the total loss and the changes of the trainable variables, for each step."""
    start = [variable.numpy() for variable in model.trainable_variables]
    optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 50_000), model)
    step = tf.function(train.TrainStep(model, optimizer, config, tf.distribute.get_strategy()))
    random, results = np.random.default_rng(0), []
    for _ in range(2):
        # With noise alone, all images would have similar features, and batch norm would amplify
        # rounding errors.
        colors = random.uniform(0, 1, (config.train_batch_size, 4, 4, 3)).repeat(
            config.image_size // 4, 1
        )
        image = colors.repeat(config.image_size // 4, 2)
        views = [image + random.normal(0, 0.1, image.shape) for _ in range(2)]
        labels = random.integers(0, _CLASSES, config.train_batch_size)
        scalars, _ = step(
            [tf.constant(view, keras.backend.floatx()) for view in views], tf.constant(labels)
        )
        results.append(
            (
                float(scalars["train/total_loss"]),
                [variable.numpy() - old for variable, old in zip(model.trainable_variables, start)],
            )
        )
    return results


# ----------------------------------------------------------------------------------------------------- deterministic


def deterministic(precision, steps, checkpoint_steps, flags):
    """Yields the numbers of tensors that differ between the last checkpoints of three runs with `--deterministic`.

    All runs have the same settings. One of them is killed after its first checkpoint, and then
    resumed. The runs share the device, which is a stricter test than running them one after
    another.
    """
    flags = [
        "--dataset=digits",
        "--mode=train",
        f"--precision={precision}",
        f"--train_steps={steps}",
        f"--checkpoint_steps={checkpoint_steps}",
        "--warmup_epochs=1",
        "--learning_rate=0.1",
        "--linear_head_learning_rate=0.1",
        "--seed=7",
        "--deterministic",
        *flags,
    ]
    with tempfile.TemporaryDirectory() as directory:
        names = {name: os.path.join(directory, name) for name in ("first", "second", "resumed")}
        runs = {name: _start(flags, path) for name, path in names.items()}
        while not checkpoint_files.list_steps(names["resumed"]):
            if runs["resumed"].poll() is not None:
                raise RuntimeError(f"run.py exited with status {runs['resumed'].returncode}")
            time.sleep(0.01)
        runs["resumed"].send_signal(signal.SIGKILL)
        runs["resumed"].wait()
        step = max(checkpoint_files.list_steps(names["resumed"]))
        if step >= steps:
            raise RuntimeError("the run finished before it was killed")
        runs["resumed"] = _start(flags, names["resumed"])
        for name, process in runs.items():
            if process.wait():
                raise RuntimeError(f"the {name} run exited with status {process.returncode}")
        expected = _tensors(names["first"], steps)
        for name in ("second", "resumed"):
            actual = _tensors(names[name], steps)
            different = sum(actual[key].tobytes() != expected[key].tobytes() for key in expected)
            details = dict(killed_at_step=step) if name == "resumed" else {}
            yield {
                **_check(
                    f"deterministic, {precision}, {name} run",
                    "tensors",
                    different,
                    0,
                    not different,
                ),
                "compared": len(expected),
                **details,
            }


def _start(flags, model_dir):
    """Starts run.py. Its output is written to stderr."""
    return subprocess.Popen(
        [sys.executable, "run.py", *flags, f"--model_dir={model_dir}"], stdout=sys.stderr
    )


def _tensors(model_dir, step):
    """Returns a dict mapping checkpoint keys to tensors, without the save counter and the object graph."""
    reader = tf.train.load_checkpoint(os.path.join(model_dir, f"ckpt-{step}"))
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if not key.startswith(("save_counter", "_CHECKPOINTABLE"))
    }


# ----------------------------------------------------------------------------------------------------------- cifar10


def cifar10(model_dir, flags, min_linear=None, min_knn=None):
    """Pretrains and evaluates a network with run.py, or resumes the run, and yields its accuracies.

    `seconds` is the time of this process; after a restart, it does not include the time before the
    restart.
    """
    begin, path = time.perf_counter(), os.path.join(model_dir, "result.json")
    resumed = max(checkpoint_files.list_steps(model_dir), default=0)
    if not os.path.exists(path):
        process = _start(flags, model_dir)
        if process.wait():
            raise RuntimeError(f"run.py exited with status {process.returncode}")
    with open(path, encoding="utf-8") as file:
        results = json.load(file)
    seconds = round(time.perf_counter() - begin)
    for name, bound in (
        (_LINEAR, min_linear),
        (_KNN, min_knn),
        ("eval/knn_weighted_top_1_accuracy", None),
        ("eval/label_top_1_accuracy", None),
    ):
        line = _check(
            f"cifar10, {name}", "accuracy", results[name], bound, results[name] >= (bound or 0)
        )
        yield {**line, "seconds": seconds, "resumed_at_step": resumed}
