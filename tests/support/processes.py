"""Trainings in processes of their own, to be killed; and what they leave behind."""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

WORKER = pathlib.Path(__file__).with_name("worker.py")
# Steps of 10 to 40 ms on digits. Checkpoints fall into the middle of epochs, which have four steps.
FLAGS = dict(dataset="digits", resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16, train_batch_size=16,
             train_split="train[:64]", learning_rate=0.02, train_steps=240, checkpoint_steps=17, seed=7,
             mode="train_then_eval", eval_batch_size=90, log_seconds=0.5, linear_head_learning_rate=0.1)


def start(model_dir, environment=None, log=None, **flags):
    """A training as a process, whose output goes to `log`, or model_dir.log. A flag that is None is left out."""
    flags = {name: value for name, value in {**FLAGS, "model_dir": model_dir, **flags}.items() if value is not None}
    command = [sys.executable, str(WORKER), *(f"--{name}={value}" for name, value in flags.items())]
    with open(log or f"{model_dir}.log", "a") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(environment or {})})


def log_of(model_dir):
    """All that was printed so far."""
    return pathlib.Path(f"{model_dir}.log").read_text()


def finish(model_dir, environment=None, status=0, **flags):
    """Runs to the end, and returns what was printed."""
    begin = len(log_of(model_dir)) if pathlib.Path(f"{model_dir}.log").exists() else 0
    process = start(model_dir, environment, **flags)
    assert process.wait(300) == status, log_of(model_dir)
    return log_of(model_dir)[begin:]


def wait_until(happened, model_dir, process, seconds=120):
    """Waits until `happened()`, while the process runs."""
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None and time.monotonic() < end, log_of(model_dir)
        time.sleep(0.02)


def wait_for(words, model_dir, process, begin=0):
    """Waits until the process has printed `words`, after the first `begin` characters of its log."""
    wait_until(lambda: words in log_of(model_dir)[begin:], model_dir, process)


def tensors(model_dir, step):
    """What a checkpoint holds, but for the count of savings."""
    reader = tf.train.load_checkpoint(str(pathlib.Path(model_dir, f"ckpt-{step}")))
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()
            if not key.startswith(("save_counter", "_CHECKPOINTABLE"))}


def assert_same_run(one, two, step=FLAGS["train_steps"]):
    """The weights, slots and results of two runs are equal, bit by bit."""
    ours, theirs = tensors(one, step), tensors(two, step)
    assert set(ours) == set(theirs) and sum("Momentum" in key for key in ours) > 10
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    results = [json.loads(pathlib.Path(path, f"result_{step}.json").read_text()) for path in (one, two)]
    assert results[0] == results[1] and "eval/label_top_1_accuracy" in results[0]
