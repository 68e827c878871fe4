"""A run in remote storage, emulated by TensorFlow's file system in memory, that is killed once."""

import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from checkpoints import checkpoint_files, weight_files
from support import ROOT, processes

FLAGS = dict(
    processes.FLAGS, train_steps=24, checkpoint_steps=5, keep_checkpoint_max=2, mode="train"
)
EVALUATION = dict(
    mode="train_then_eval",
    eval_epochs=3,
    eval_protocol="linear_head",
    keep_best=True,
    eval_baselines=False,
)


def start(directory, killed_at=0, **flags):
    flags = [f"--{name}={value}" for name, value in {**FLAGS, **flags}.items()]
    return subprocess.Popen(
        [
            *(sys.executable, ROOT / "tests" / "support" / "remote_worker.py"),
            *(directory, str(killed_at), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_killed_run_in_remote_storage_matches_an_uninterrupted_local_run(tmp_path):
    """An epoch has four steps."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    for directory in (remote, tmp_path / "empty"):
        directory.mkdir()
    uninterrupted = start(tmp_path / "empty", model_dir=local)
    settings = dict(EVALUATION, model_dir="ram://run")
    killed = start(remote, 17, **settings)
    output, _ = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, output
    assert checkpoint_files.list_steps(str(remote)) == [12, 15]
    assert checkpoint_files.list_steps(str(remote / "best")) == [12]
    resumed = start(remote, **settings)
    output, _ = resumed.communicate()
    assert resumed.returncode == 0 and "resumed at step 15 from ram://run/ckpt-15" in output, output
    assert uninterrupted.wait() == 0

    actual, expected = processes.tensors(remote, 24), processes.tensors(local, 24)
    assert set(actual) == set(expected) and sum("Momentum" in key for key in actual) > 10
    for key in actual:
        np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)
    assert checkpoint_files.list_steps(str(remote)) == [20, 24]
    results = json.loads((remote / "result.json").read_text())
    saved_model = weight_files.open_weights(str(remote / "saved_model" / "24"))
    assert saved_model.digest() == results["computed_from"]["weights"]
    best = max(
        (json.loads(path.read_text())["eval/label_top_1_accuracy"], int(path.stem.split("_")[1]))
        for path in pathlib.Path(remote).glob("result_*.json")
    )
    assert checkpoint_files.list_steps(str(remote / "best")) == [best[1]]
