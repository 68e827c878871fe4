"""A run in remote storage, which TensorFlow's file system in memory emulates, that is killed once."""

import signal

import pytest

from checkpoints import weight_files
from support import ROOT, processes, runs

SETTINGS = dict(
    processes.FLAGS,
    train_steps=24,  # six epochs
    checkpoint_steps=5,
    keep_checkpoint_max=2,
    eval_epochs=3,
    eval_protocol="linear_head",
    eval_baselines=False,
    keep_best=True,
)


@pytest.mark.slow
def test_killed_run_in_remote_storage_matches_an_uninterrupted_local_run(tmp_path):
    local, remote = tmp_path / "local", tmp_path / "remote"
    uninterrupted = processes.start(local, program=ROOT / "run.py", **SETTINGS)
    settings = dict(SETTINGS, program=ROOT / "tests" / "support" / "remote_worker.py")
    processes.finish(remote, {"KILLED_AT": "17"}, -signal.SIGKILL, **settings)
    log = processes.finish(remote, **settings)
    assert "resumed at step 15 from ram://run/ckpt-15" in log
    assert uninterrupted.wait() == 0
    processes.assert_same_run(remote, local, 24)
    assert runs.lasting_files(remote).keys() == runs.lasting_files(local).keys()
    assert (local / "best/result.json").exists() and (local / "ckpt-20.index").exists()
    one, two = (weight_files.open_weights(f"{path}/saved_model/24") for path in (local, remote))
    assert one.digest() == two.digest()
