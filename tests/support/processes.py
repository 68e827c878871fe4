"""Helpers for training runs in separate processes that tests can kill, and for reading checkpoints and logs."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

from checkpoints import checkpoint_files
from support import ROOT, TINY, read_json

WORKER = pathlib.Path(__file__).with_name("worker.py")
# A step on digits takes 10 to 40 ms. An epoch has four steps, so most checkpoints are written
# before an epoch ends.
FLAGS = dict(
    TINY,
    train_batch_size=16,
    train_steps=120,
    checkpoint_steps=17,
    mode="train_then_eval",
    linear_head_learning_rate=0.1,
)


@contextlib.contextmanager
def program(code, *arguments):
    """Starts a Python program, and waits until it prints a line. Yields the process, and then kills it."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline(), process.stderr.read()
            yield process
        finally:
            process.kill()


def run_in(python, program, *arguments):
    """Runs a program in tests/support in another Python interpreter, which has other packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, WORKER.with_name(program), *arguments]
    subprocess.run(command, env=environment, check=True)


def holding_lock(*arguments):
    """Starts a program that holds a lock, given the arguments of `Lock`; see `program`."""
    code = """
import sys, time
from checkpoints.lock import Lock
with Lock(*sys.argv[1:]):
    print("held", flush=True)
    time.sleep(99)
"""
    return program(code, *arguments)


def start(model_dir, environment=None, log=None, program=WORKER, **flags):
    """Starts run.py in a process that appends its output to `log` (default: model_dir.log). Omits flags set to None."""
    flags = {
        name: value
        for name, value in {"model_dir": model_dir, **FLAGS, **flags}.items()
        if value is not None
    }
    command = [
        sys.executable,
        str(program),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    with open(log or f"{model_dir}.log", "a") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **(environment or {})}
        )


def start_workers(model_dir, environments, **flags):
    """Starts one process per environment. They log to model_dir_0.log, model_dir_1.log, ..."""
    return [
        start(model_dir, environment, f"{model_dir}_{index}.log", **flags)
        for index, environment in enumerate(environments)
    ]


def log_of(model_dir):
    """Returns the contents of the run's log file."""
    return pathlib.Path(f"{model_dir}.log").read_text()


def finish(model_dir, environment=None, status=0, **flags):
    """Starts run.py, waits until the process exits, and returns only that process's output."""
    begin = len(log_of(model_dir)) if pathlib.Path(f"{model_dir}.log").exists() else 0
    process = start(model_dir, environment, **flags)
    assert process.wait(300) == status, log_of(model_dir)
    return log_of(model_dir)[begin:]


def wait_until(condition, model_dir, process, seconds=120):
    """Waits until `condition()` is true. Fails if the process exits first."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log_of(model_dir)
        time.sleep(0.02)


def wait_for_checkpoint(model_dir, process, after=0):
    """Waits until the process has written a checkpoint of a step later than `after`."""
    wait_until(
        lambda: max(checkpoint_files.list_steps(str(model_dir)), default=0) > after,
        model_dir,
        process,
    )


def tensors(model_dir, step):
    """Returns a dict mapping checkpoint keys to tensors, without the save counter and the object graph."""
    reader = tf.train.load_checkpoint(str(pathlib.Path(model_dir, f"ckpt-{step}")))
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if not key.startswith(("save_counter", "_CHECKPOINTABLE"))
    }


def assert_same_run(one, two, step=FLAGS["train_steps"]):
    """Asserts that the weights, optimizer slots and results of two runs are bit-identical."""
    actual, expected = tensors(one, step), tensors(two, step)
    assert set(actual) == set(expected) and sum("Momentum" in key for key in actual) > 10
    for key in actual:
        np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)
    results = [read_json(pathlib.Path(path, f"result_{step}.json")) for path in (one, two)]
    assert results[0] == results[1] and "eval/label_top_1_accuracy" in results[0]
