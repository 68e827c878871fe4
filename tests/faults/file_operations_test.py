"""Failures, kills and power failures at single file operations of a run.

With the environment variable SIMCLR_SOAK (`make soak`), all operations are tried instead of a sample.
"""

import errno
import os
import pathlib
import random
import shutil
from concurrent import futures

import numpy as np
import pytest

from checkpoints import checkpoint_files
from runtime import storage
from support import file_faults, processes
from support.runs import read_results

STEP = 6
SETTINGS = dict(
    processes.FLAGS,
    train_steps=STEP,
    checkpoint_steps=2,
    keep_checkpoint_max=1,
    keep_best=True,
    eval_epochs=1,
    eval_split="test[:90]",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    try:
        program = file_faults.Runs(tmp_path_factory.mktemp("library"), SETTINGS)
    except FileNotFoundError:
        pytest.skip("there is no C compiler (cc), which injects faults into file operations")
    yield program
    program.close()


@pytest.fixture(scope="module")
def complete(runs, tmp_path_factory):
    """Returns the directory of an undisturbed run, its number of operations, and their trace.

    The group of the directory may write to it, and owns new files.
    """
    directory, trace = tmp_path_factory.mktemp("complete") / "run", tmp_path_factory.mktemp("trace")
    directory.mkdir()
    directory.chmod(0o2775)
    status, count = runs.run(directory, trace=trace, umask=0o002)
    assert status == 0
    return directory, count, trace


def names_in(directory):
    """Returns the relative paths of all files, without those that may remain after a kill.

    These are events, recent temporary files, and data of checkpoints without an index.
    best/checkpoint is also omitted, because it is written only when weights are saved.
    """
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    names.discard("best/checkpoint")
    names = {
        name
        for name in names
        if ".data-" not in name or f"{name.partition('.data-')[0]}.index" in names
    }
    ignored = ("events", "checkpoint.tmp", storage.TEMP_PREFIX)
    return {name for name in names if not any(text in name for text in ignored)}


def assert_equal(directory, expected):
    """Asserts that weights, slots, results and files of two runs are the same."""
    for folder, step in ((".", STEP), ("best", None)):
        step = step or max(checkpoint_files.list_steps(str(expected / folder)))
        actual = processes.tensors(directory / folder, step)
        np.testing.assert_equal(actual, processes.tensors(expected / folder, step))
    for name in ("result.json", f"result_{STEP}.json", "best/result.json"):
        assert (directory / name).read_bytes() == (expected / name).read_bytes()
    assert names_in(directory) == names_in(expected)
    unfinished = [path for path in directory.rglob(f"{storage.TEMP_PREFIX}*") if path.is_dir()]
    assert not unfinished


def sample(items):
    """Returns 8 random items, or all items in the soak test."""
    items = list(items)
    return items if "SIMCLR_SOAK" in os.environ else random.Random(1).sample(items, 8)


@pytest.mark.slow
def test_a_run_killed_at_any_file_operation_is_completed_by_the_same_command(
    runs, complete, tmp_path
):
    expected, count, _ = complete
    assert count > 150
    for at in sample(range(1, count + 1)):
        directory = tmp_path / str(at)
        assert runs.run(directory, at=at)[0] == -9
        assert runs.run(directory)[0] == 0, f"operation {at}"
        assert_equal(directory, expected)
        shutil.rmtree(directory)


def power_failure(trace, last, directory):
    """Writes what a power failure after operation `last` leaves: all names, but only synced contents."""
    contents = {}  # path -> [content of the file]
    directory.mkdir()
    for index, line in enumerate((trace / "operations").read_text().splitlines()[: last + 1]):
        operation, _, rest = line.partition(" ")
        path, _, target = rest.partition("\t")
        if operation == "mkdir":
            (directory / path).mkdir(exist_ok=True)
        elif operation == "create":
            contents[path] = [b""]
        elif operation == "unlink":
            del contents[path]
        elif operation == "rmdir":
            (directory / path).rmdir()
        elif operation == "fsync" and path in contents:
            contents[path][0] = (trace / str(index)).read_bytes()
        elif operation == "rename" and path in contents:
            contents[target] = contents.pop(path)
        elif operation == "rename":
            (directory / path).rename(directory / target)
            moved = {
                name: name.removeprefix(path) for name in contents if name.startswith(f"{path}/")
            }
            contents.update({target + end: contents.pop(name) for name, end in moved.items()})
    for path, (content,) in contents.items():
        (directory / path).write_bytes(content)


@pytest.mark.slow
def test_a_run_is_completed_after_a_power_failure_at_any_sync(runs, complete, tmp_path):
    expected, _, trace = complete
    lines = (trace / "operations").read_text().splitlines()
    syncs = [index for index, line in enumerate(lines) if line.startswith("fsync")]
    assert len(syncs) > 50
    for index in sample(syncs):
        directory = tmp_path / str(index)
        power_failure(trace, index, directory)
        begin = len(runs.log.read_text())
        assert runs.run(directory)[0] == 0, f"{index}: {lines[index]}"
        assert_equal(directory, expected)
        # A checkpoint of which the directory was synced is never lost.
        saved = [line for line in lines[:index] if line.endswith(".index") and "\tckpt-" in line]
        if saved:
            assert "resumed at step" in runs.log.read_text()[begin:]
        shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "match, status",
    [
        ("fsync */ckpt-2.data*", 2),
        ("fsync */ckpt-4.index", 2),
        ("rename *\tckpt-2.data*", 2),
        ("rename *\tckpt-2.index", 2),
        ("rename *\tckpt-4.index", 2),
        ("rename *\tbest/ckpt-4.index", 2),
        ("rename *\tflags.json", 2),
        ("rename *\tresult.json", 2),
        ("rename *\tsaved_model/6", 2),
        # The new checkpoint is complete, so that training goes on.
        ("unlink ckpt-2.index", 0),
        ("create checkpoint.tmp*", 0),
    ],
)
def test_failed_operation_leaves_a_run_that_the_same_command_completes(
    match, status, runs, complete, tmp_path
):
    for _ in range(2 if status and "SIMCLR_SOAK" in os.environ else 1):
        begin = len(runs.log.read_text())
        assert runs.run(tmp_path / "run", match, 1, errno.EIO)[0] == status
        log = runs.log.read_text()[begin:]
        assert "Traceback" not in log and (status or "could not be deleted" in log)
    assert runs.run(tmp_path / "run")[0] == 0
    assert_equal(tmp_path / "run", complete[0])


def test_evaluation_does_not_see_a_checkpoint_that_is_being_saved(runs, complete, tmp_path):
    directory = tmp_path / "run"
    assert runs.run(directory, "rename *\tckpt-4.index", 1)[0] == -9
    assert (directory / "ckpt-4.data-00000-of-00001").exists()
    begin = len(runs.log.read_text())
    evaluation = dict(mode="eval", eval_timeout=0.5, eval_epochs=0, keep_best=False)
    assert runs.run(directory, **evaluation)[0] == 0
    log = runs.log.read_text()[begin:]
    assert "evaluating step 2" in log and "ckpt-4" not in log and "corrupt" not in log
    assert runs.run(directory)[0] == 0
    assert runs.run(directory, **evaluation)[0] == 0
    assert read_results(directory / "result.json")["global_step"] == STEP


def test_files_of_a_run_are_writable_for_its_group(complete):
    directory = complete[0]
    for path in directory.rglob("*"):
        assert path.stat().st_mode & 0o020, path
        assert not path.is_dir() or path.stat().st_mode & 0o2000, path


def test_concurrent_writes_in_processes_with_the_same_id_are_never_torn(tmp_path):
    path, contents = str(tmp_path / "x.json"), [bytes([65 + index]) * 9999 for index in range(4)]
    storage.write_bytes(path, contents[0])

    def write(content):
        for _ in range(50):
            storage.write_bytes(path, content)

    # Threads have the same process ID, like processes in different containers.
    with futures.ThreadPoolExecutor() as pool:
        writes = [pool.submit(write, content) for content in contents]
        while not all(done.done() for done in writes):
            assert pathlib.Path(path).read_bytes() in contents
    assert os.listdir(tmp_path) == ["x.json"]


def test_file_system_that_cannot_sync_directories_is_tolerated(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    storage.write_bytes(str(tmp_path / "x"), b"content")
    assert (tmp_path / "x").read_bytes() == b"content"
