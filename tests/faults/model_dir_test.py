"""Faults in a `model_dir`: corrupt files, full disks, concurrent runs, changed flags and temporary files."""

import contextlib
import functools
import os
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf

import checks
import run as run_lib
import train
from checkpoints import checkpoint_files, loading, run_directory, weight_files
from checkpoints.lock import Lock
from config import parse_settings
from runtime import storage
from sources.indexed import IndexedSource
from support import processes, runs
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("stem_only_resnet")

SETTINGS = dict(train_steps=9, checkpoint_steps=3)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def run(run_dir):
    """Returns a function that trains in `run_dir` and returns the log."""
    return lambda **settings: runs.run(run_dir, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def trained_runs(stem_only_resnet, tmp_path_factory):
    """Returns a cached function that trains for a given number of steps and returns the run directory."""

    @functools.cache
    def directory(steps):
        path = tmp_path_factory.mktemp(f"{steps}_steps") / "run"
        runs.run(path, **{**SETTINGS, "train_steps": steps})
        return path

    return directory


@pytest.fixture
def trained(trained_runs, run_dir):
    """Returns a function that takes a number of steps, and copies a finished run of that length to `run_dir`."""
    return lambda steps: shutil.copytree(trained_runs(steps), run_dir)


def corrupt(path, fault):
    """Deletes, empties or truncates a file, or inverts one of its bytes."""
    content = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "empty": b"",
                "truncated": content[:middle],
                "flipped": (
                    content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
                ),
            }[fault]
        )


@pytest.mark.parametrize(
    "name, fault",
    [
        ("ckpt-9.index", "truncated"),
        ("ckpt-9.data-00000-of-00001", "flipped"),
        ("ckpt-9.index", "missing"),
    ],
)
def test_resume_falls_back_if_the_newest_checkpoint_is_corrupt_or_incomplete(
    name, fault, trained, run, run_dir
):
    trained(9)
    expected = processes.tensors(run_dir, 9)
    corrupt(run_dir / name, fault)
    reason = f"incomplete ({name} is missing)" if fault == "missing" else "corrupt ("
    logged = run()
    assert logged.count("warning: ckpt-") == 1 and f"warning: ckpt-9 is {reason}" in logged
    assert "resumed at step 6 from" in logged
    # The run has replaced the corrupt files.
    np.testing.assert_equal(processes.tensors(run_dir, 9), expected)


@pytest.mark.parametrize(
    "name, fault, message",
    [
        ("index", "truncated", "ckpt-3 is corrupt"),
        ("data-00000-of-00001", "empty", "a file of ckpt-3 is"),
        ("data-00000-of-00001", "missing", "a file of ckpt-3 is"),
    ],
)
def test_run_whose_checkpoints_cannot_be_restored_is_rejected_and_not_changed(
    name, fault, message, trained, run, run_dir, tmp_path
):
    shutil.copytree(trained(3), tmp_path / "backup")
    corrupt(run_dir / f"ckpt-3.{name}", fault)
    before = set(run_dir.rglob("*"))
    for _ in range(2):
        with rejects(f"--model_dir=.*{message}"):
            run(train_steps=6)
        assert before == set(run_dir.rglob("*"))
    shutil.rmtree(run_dir)
    (tmp_path / "backup").rename(run_dir)
    assert "resumed at step 3" in run(train_steps=6)


@pytest.mark.parametrize("fault", ["newest corrupt", "file from another run"])
def test_keep_checkpoint_max_is_respected_after_faults(fault, trained, run, run_dir, tmp_path):
    trained(9)
    others = [shutil.copytree(run_dir, tmp_path / name) for name in ("run1", "run 2")]
    if fault == "newest corrupt":
        corrupt(run_dir / "ckpt-9.index", "truncated")
    else:
        paths = "".join(
            f'all_model_checkpoint_paths: "{others[0]}/ckpt-{step}"\n' for step in (3, 6, 9)
        )
        (run_dir / "checkpoint").write_text(f'model_checkpoint_path: "{others[0]}/ckpt-9"\n{paths}')
    run(train_steps=15, keep_checkpoint_max=2)
    assert checkpoint_files.list_steps(str(run_dir)) == [12, 15]
    assert [checkpoint_files.list_steps(str(path)) for path in others] == [[3, 6, 9]] * 2
    assert tf.train.latest_checkpoint(str(run_dir)) == str(run_dir / "ckpt-15")


def test_save_keeps_checkpoints_of_later_steps(tmp_path):
    trackable = tf.train.Checkpoint(value=tf.Variable(1.0))
    for step in (1, 2, 10, 3):
        checkpoint_files.save(trackable, str(tmp_path), step)
    checkpoint_files.prune(str(tmp_path), 3, keep=1)
    assert checkpoint_files.list_steps(str(tmp_path)) == [3, 10]


def test_continuous_evaluation_skips_a_corrupt_checkpoint(trained, run, run_dir):
    trained(9)
    corrupt(run_dir / "ckpt-6.data-00000-of-00001", "truncated")
    (run_dir / "checkpoint").write_bytes(b"\xff")  # Evaluation does not need this file.
    log = run(mode="eval", eval_timeout=0.1, eval_epochs=1)
    assert "ckpt-6: the checkpoint is corrupt (" in log and log.count("warning: skipped") == 1
    assert {path.name for path in run_dir.glob("result_*.json")} == {
        "result_3.json",
        "result_9.json",
    }
    for path in run_dir.glob("*.data*"):
        corrupt(path, "truncated")
    with rejects("ckpt-9 cannot be read"):
        run(mode="eval", eval_timeout=0.1, eval_epochs=1)


@pytest.mark.parametrize("fault", ["empty", "missing"])
def test_missing_or_corrupt_checkpoint_state_file_is_rewritten(fault, trained, run, run_dir):
    trained(9)
    corrupt(run_dir / "checkpoint", fault)
    assert "resumed at step 9 from" in run(train_steps=12)
    state = tf.train.get_checkpoint_state(str(run_dir))
    assert len(state.all_model_checkpoint_paths) == 4


@pytest.mark.parametrize("content", ["", "{}"])
def test_seed_is_required_if_it_is_not_recorded(content, trained, run, run_dir):
    trained(3)
    (run_dir / "flags.json").write_text(content)
    with rejects("no flags.json that specifies the seed. Set --seed"):
        run(train_steps=6, seed=None)


def test_only_temporary_files_of_killed_processes_are_deleted(trained, run, run_dir, tmp_path):
    trained(3)
    unfinished, recent = storage.TEMP_PREFIX, f"{'2b' * 8}"
    temporary_files = [
        f"{unfinished}ckpt_x1y2/ckpt-6.index",
        f"{unfinished}{'0a' * 8}",
        f"checkpoint.tmp{'0a' * 16}",
    ]
    others = [
        f"{unfinished}{recent}",
        f"{unfinished}notes.txt",
        f"{unfinished}x1y2/0",
        "checkpoint.tmp1234/notes.txt",
        "checkpoint.tmp",
        "notes.json.99.tmp",
        "ckpt-6.data-00000-of-00001",
        "notes.txt",
    ]
    for name in temporary_files + others:
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("half")
        # A recent file may be in use.
        os.utime(run_dir / name, None if recent in name else (0, 0))
    (tmp_path / "elsewhere").mkdir()
    links = {f"{unfinished}ckpt_a1b2": "../elsewhere", f"{unfinished}{'0b' * 8}": "notes.txt"}
    for name, target in links.items():
        (run_dir / name).symlink_to(target)
    run(train_steps=3)
    assert all((run_dir / name).is_symlink() for name in links)
    assert not any((run_dir / name).exists() for name in temporary_files)
    assert all((run_dir / name).read_text() == "half" for name in others)


# ---------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    ["-a 'b' \"c\" $d {e,f} !g] ~h ; größe 日本.tmp", "trailing/", "deep/../relative", "link"],
)
def test_run_resumes_in_a_directory_with_an_unusual_name(
    name, trained, run_dir, tmp_path, monkeypatch
):
    trained(3)
    monkeypatch.chdir(tmp_path)
    if name == "link":
        (tmp_path / name).symlink_to("run")
    else:
        (tmp_path / "deep").mkdir()
        shutil.copytree(run_dir, tmp_path / name)
    # The path is relative, so it starts with the unusual name.
    runs.run(name, **{**SETTINGS, "train_steps": 6, "keep_checkpoint_max": 1})
    assert checkpoint_files.list_steps(name) == [6]
    assert (
        checkpoint_files.latest_checkpoint(name)
        == weight_files.locate(name)[0]
        == os.path.join(name, "ckpt-6")
    )
    # Other programs find the checkpoint, too. (`tf.train.latest_checkpoint` would interpret some
    # names as patterns.)
    assert tf.train.get_checkpoint_state(name).model_checkpoint_path == os.path.join(name, "ckpt-6")
    assert {*os.listdir(tmp_path)} <= {"run", "deep", "relative", name.rstrip("/")}


# ---------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--learning_rate=0.5", r"--learning_rate=0.02 \(now 0.5\)"),
        ("--seed=8 --train_batch_size=16", r"--seed=7 \(now 8\), --train_batch_size=32 \(now 16\)"),
        ("--train_split=train[:40]", r"--train_split=train\[:64\] \(now train\[:40\]\)"),
        ("--cache_dataset", "--cache_dataset=False"),
        ("--shuffle_buffer_mb=8", "--shuffle_buffer_mb=1024"),
    ],
)
def test_changed_flags_are_rejected_and_listed(flags, message, trained, run, run_dir):
    trained(3)
    before, changes = runs.contents(run_dir), parse_settings(flags)
    with rejects(message):
        run(**changes, given=changes)
    assert runs.contents(run_dir) == before


def test_run_resumes_with_more_steps_and_with_allowed_flag_changes(trained, run, tmp_path):
    trained(3)
    log = run(train_steps=6)
    assert "was started with --train_steps=3 (now 6): the learning-rate schedule changes" in log
    log = run(learning_rate=0.5, allow_flag_changes=True)
    assert (
        "the run was started with --learning_rate=0.02 (now 0.5); accepted because of"
        " --allow_flag_changes" in log
    )
    assert "resumed at step 6" in log


# ----------------------------------------------------------------------------------------------------------- data


class Data(IndexedSource):
    """Data source that has no examples and returns the given data description."""

    def __init__(self, classes=("blue", "green", "red"), **description):
        super().__init__("colors", {}, list(classes) if classes else None, tf.identity)
        self._description = {
            "name": "colors",
            "version": "1.0.0",
            "splits": {"train": 64, "test": 10},
            **description,
        }

    def describe_data(self):
        return self._description


def start_run(directory, source, **settings):
    config = runs.tiny_config(model_dir=str(directory), **settings)
    run_directory.write_start(config, source, str(directory), 3)
    return config


def check_resumed(config, source):
    checks._check_resumed(config, source, run_directory.read_run(config.model_dir))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(splits={"train": 63, "test": 10}), r"train has 63 examples \(64 at the start\)"),
        (dict(splits={"train": 64}), r"test has 0 examples \(10 at the start\)"),
        (dict(splits={"train": 64, "test": 10, "extra": 5}), "split extra is new"),
        (dict(version="1.0.1"), r"version 1.0.1 \(1.0.0 at the start\)"),
        (dict(files="b"), "names or sizes of the files"),
        (
            dict(classes=("green", "red", "zblue")),
            r"classes \(only in the data set: zblue; only in the run: blue\)",
        ),
        (dict(classes=("red", "green", "blue")), "same classes in a different order"),
        (dict(classes=None), "only in the run: blue, green, red"),
    ],
)
def test_changed_data_is_rejected_unless_flag_changes_are_allowed(
    changes, message, tmp_path, capsys
):
    config = start_run(tmp_path, Data(files="a"))
    check_resumed(config, Data(files="a"))
    with rejects(f"--dataset=digits: the data has changed .*{message}.*--allow_flag_changes"):
        check_resumed(config, Data(**{"files": "a", **changes}))
    check_resumed(config.replace(allow_flag_changes=True), Data(**{"files": "a", **changes}))
    assert "warning: --dataset=digits: the data has changed" in capsys.readouterr().out


def test_changed_class_names_are_accepted_without_a_linear_head(tmp_path):
    config = start_run(tmp_path, Data(), lineareval_while_pretraining=False)
    check_resumed(config, Data(classes=("a", "b")))


def test_resumed_run_checks_its_data(trained, run, tmp_path, monkeypatch):
    trained(3)
    with monkeypatch.context() as patch:
        patch.setattr(IndexedSource, "describe_data", lambda self: {"splits": {"train": 5}})
        with rejects("train has 5 examples"):
            run(train_steps=6)
    assert "resumed at step 3" in run(train_steps=6)


# ----------------------------------------------------------------------------------------------------------- disk


@contextlib.contextmanager
def small_disk(path, kilobytes):
    """Mounts a file system of the given size at `path`."""
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # Event files are still open.


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can mount a file system")
@pytest.mark.parametrize("free_kilobytes", [0, 1000])
def test_last_checkpoint_survives_a_full_disk(free_kilobytes, run, run_dir, tmp_path):
    # This makes checkpoints larger than the other files of the run.
    large = dict(proj_out_dim=8192)
    run(train_steps=6, **large)
    expected = processes.tensors(run_dir, 6)
    used = sum(path.stat().st_size for path in run_dir.rglob("*")) // 1024
    run_dir.rename(tmp_path / "copy")
    with small_disk(run_dir, used + 200 + free_kilobytes):
        subprocess.run(
            ["cp", "-r", *map(str, (tmp_path / "copy").iterdir()), str(run_dir)], check=True
        )
        with rejects("--model_dir=.* (could not|cannot) be written"):
            run(train_steps=9, **large)
        assert not list(run_dir.glob("ckpt-9.index"))
        actual = processes.tensors(run_dir, 6)
        for path in [*run_dir.glob("ckpt-3.*")]:
            # After space is freed, the same command resumes the run.
            path.unlink()
        subprocess.run(["mount", "-o", f"remount,size={4 * used}k", str(run_dir)], check=True)
        assert "resumed at step 6" in run(train_steps=9, **large)
    np.testing.assert_equal(actual, expected)


# ----------------------------------------------------------------------------------------------------------- lock


def test_lock_rejects_a_second_run_and_is_released_when_the_first_run_is_killed(tmp_path):
    with processes.holding_lock(tmp_path) as other:
        with rejects(rf"--model_dir=.* is in use by process {other.pid} on \S+\. Wait"):
            runs.run(tmp_path)
        other.kill()
        other.wait()
    with Lock(str(tmp_path)):
        assert f"process {os.getpid()} " in (tmp_path / "train.lock").read_text()


@pytest.mark.parametrize(
    "module, function",
    [
        (train, "build_training_state"),
        (train, "make_run_steps"),
        (run_lib.evaluate, "evaluate_and_write"),
    ],
)
def test_directory_of_another_run_is_not_modified(
    module, function, trained, run_dir, tmp_path, monkeypatch
):
    """Replaces the run directory with that of another run before or in training, or before an evaluation."""

    def replace(*arguments, **options):
        run_dir.rename(tmp_path / "gone")
        (tmp_path / "other").rename(run_dir)
        return call(*arguments, **options)

    call = getattr(module, function)
    trained(3)
    run_dir.rename(tmp_path / "other")
    before = runs.contents(tmp_path / "other")
    monkeypatch.setattr(module, function, replace)
    with rejects("the directory was removed or replaced during the run"):
        runs.run(
            run_dir,
            **{**SETTINGS, "mode": "train_then_eval", "learning_rate": 0.01, "train_steps": 3},
        )
    assert runs.contents(run_dir) == before


def test_run_in_a_directory_with_other_files_replaces_only_its_own_names(run, run_dir, tmp_path):
    run_dir.mkdir()
    own, other = ("flags.json", "views.png", "train.lock", "result.json"), ("notes.txt", "a.index")
    for name in own + other:
        (run_dir / name).write_text('{"mine": 1}')
    (tmp_path / "photo.png").write_text("mine")
    (run_dir / "views.png").unlink()
    (run_dir / "views.png").symlink_to(tmp_path / "photo.png")
    run(train_steps=1, mode="train_then_eval")
    assert (tmp_path / "photo.png").read_text() == "mine"
    files = [path for path in run_dir.iterdir() if path.is_file()]
    kept = {path.name for path in files if b"mine" in path.read_bytes()}
    assert kept == set(other)


def test_lock_that_is_a_link_is_rejected(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "train.lock").symlink_to("notes.txt")
    with rejects("--model_dir=.*train.lock cannot be opened"):
        Lock(str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_evaluation_does_not_need_the_lock(trained, run, run_dir):
    trained(3)
    with Lock(str(run_dir)):
        assert "evaluating step 3" in run(mode="eval", train_steps=3, eval_timeout=0.1)


# ----------------------------------------------------------------------------------------------------- best weights


@pytest.fixture
def accuracies(monkeypatch):
    """Returns a list to fill with accuracies of the linear head. Each evaluation removes and reports the first item."""
    values = []
    monkeypatch.setattr(
        run_lib.evaluate.Evaluator,
        "linear_head",
        lambda *_: {"eval/label_top_1_accuracy": values.pop(0), "eval/label_top_5_accuracy": 1.0},
    )
    return values


def test_keep_best_keeps_the_best_and_the_latest_checkpoint(run, run_dir, accuracies):
    accuracies += [0.5, 0.7, 0.6]
    for steps in (3, 6, 9):
        run(mode="train_then_eval", train_steps=steps, keep_best=True, keep_checkpoint_max=1)
    assert checkpoint_files.list_steps(str(run_dir)) == [9]
    assert checkpoint_files.list_steps(str(run_dir / "best")) == [6]
    model = train.model_lib.build_model(runs.tiny_config(), 10)
    assert loading.load_model(model, str(run_dir / "best")).step == 6


def test_best_checkpoint_is_not_written_through_a_link(run, run_dir, tmp_path, accuracies):
    accuracies += [0.5]
    run_dir.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ckpt-1.index").write_text("another run's")
    (run_dir / "best").symlink_to(tmp_path / "other")
    assert "best is a link" in run(mode="train_then_eval", train_steps=1, keep_best=True)
    assert os.listdir(tmp_path / "other") == ["ckpt-1.index"]


def test_best_checkpoint_records_the_training_settings(run, run_dir, accuracies):
    accuracies += [0.5]
    run(train_steps=3, weight_decay=1e-3)
    # This evaluation uses the default weight decay.
    run(mode="eval", train_steps=3, keep_best=True)
    flags = [run_directory.read_flags(str(run_dir / subdirectory)) for subdirectory in ("", "best")]
    assert flags[0] == flags[1] and flags[1]["weight_decay"] == 1e-3
    assert len(weight_files.read_classes(str(run_dir / "best"))[0]) == 10
