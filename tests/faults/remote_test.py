"""A run in remote storage, which TensorFlow's file system in memory emulates, that is killed once."""

import re
import signal

import pytest

from checkpoints import weight_files
from support import ROOT, processes

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


def files(directory):
    """Returns the names of all files, except for locks, and for TensorBoard events, whose names contain the time."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    names = {str(path.relative_to(directory)) for path in paths}
    return {name for name in names if not re.search(r"tfevents|\.lock$", name)}


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
    assert files(remote) == files(local) >= {"best/result.json", "ckpt-20.index"}
    one, two = (weight_files.open_weights(f"{path}/saved_model/24") for path in (local, remote))
    assert one.digest() == two.digest()
