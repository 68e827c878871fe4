"""Checks that killed or stopped runs, once resumed, give the same results as uninterrupted runs."""

import signal
import time

import pytest
import tensorflow as tf

import model as model_lib
from config import Config
from runtime import progress, signals, storage
from runtime.errors import STOPPED_STATUS, Stopped
from support import SMALL, processes, read_json
from support.addresses import worker_environments


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns the directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    processes.finish(directory)
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_triggers_a_checkpoint_and_the_same_command_resumes_the_run(
    signal_number, uninterrupted, tmp_path
):
    process = processes.start(tmp_path / "run")
    processes.wait_for_checkpoint(tmp_path / "run", process)
    process.send_signal(signal_number)
    assert process.wait(60) == 75
    log = processes.log_of(tmp_path / "run")
    assert f"{signal_number.name}: finishing the current work, then saving" in log
    saved = log.split(f"stopped by {signal_number.name}: saved ")[1].split(";")[0]
    assert f"resumed at step {saved.rpartition('-')[2]} from" in processes.finish(tmp_path / "run")
    processes.assert_same_run(uninterrupted, tmp_path / "run")


def test_signal_takes_effect_at_the_next_safe_point():
    done, before = [], signal.getsignal(signal.SIGINT)
    with signals.StopSignals() as stop, pytest.raises(Stopped, match="stopped by SIGINT"):
        for _ in progress.track(range(3), "turns"):
            signal.raise_signal(signal.SIGINT)
            done.append(stop.requested)
    assert done == [True]
    # In a background process, `before` may be SIG_IGN.
    assert signal.getsignal(signal.SIGINT) is before
    assert list(progress.track(range(3), "turns")) == [0, 1, 2]


@pytest.mark.usefixtures("default_sighup")
def test_sighup_stops_the_run_unless_it_is_ignored():
    with signals.StopSignals(), pytest.raises(Stopped, match="stopped by SIGHUP"):
        signal.raise_signal(signal.SIGHUP)
        signals.safe_point()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with signals.StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            signals.safe_point()
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def end_running(process):
    """Asserts that a process, which has received another signal, is still running, and that SIGTERM ends it."""
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("default_sighup")
def test_repeated_sighup_from_a_closed_terminal_does_not_kill_the_run():
    with processes.program(_BUSY) as process:
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
        end_running(process)


def test_signal_interrupts_downloads():
    with (
        signals.StopSignals() as stop,
        pytest.raises(Stopped, match="stopped by SIGTERM"),
        stop.interruptible(),
    ):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(9)
        raise AssertionError("not interrupted")


def test_program_does_not_wait_for_the_threads_of_an_interrupted_download():
    code = """
import concurrent.futures, time
from runtime import command_line, signals
with command_line.reporting_errors("x"), signals.StopSignals() as stop, stop.interruptible():
    future = concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 99)
    print("busy", flush=True)
    future.result()
"""
    with processes.program(code) as process:
        # Wait until `print` has returned. Otherwise, the interrupted flush would print the line
        # again.
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == STOPPED_STATUS
        assert process.stdout.read().startswith("stopped by SIGTERM: ")


_BUSY = """
import time
from runtime import signals
with signals.StopSignals():
    print("busy", flush=True)
    time.sleep(99)
"""


def test_second_signal_of_a_different_type_ends_the_process_at_once():
    with processes.program(_BUSY) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline().startswith("SIGINT: finishing the current work")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        end_running(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, seed, distills", [({}, None, False), ({"REPLICAS": "2"}, 7, False), ({}, 7, True)]
)
def test_killed_run_matches_an_uninterrupted_run(
    environment, seed, distills, tmp_path, tiny_resnet
):
    """Includes a run whose seed is chosen at random when it starts."""
    flags = dict(seed=seed, train_steps=60, color_jitter_strength=1.0)
    if distills:
        (tmp_path / "teacher").mkdir()
        storage.write_json(str(tmp_path / "teacher" / "flags.json"), dict(image_size=8))
        config = Config(**SMALL, train_mode="supervised")
        teacher = tf.train.Checkpoint(model=model_lib.build_model(config, 10))
        flags |= dict(
            train_mode="distill",
            teacher=teacher.write(str(tmp_path / "teacher" / "ckpt-1")),
            distill_alpha=0.5,
            linear_head_learning_rate=None,
        )
    process = processes.start(tmp_path / "killed", environment, **flags)
    processes.wait_for_checkpoint(tmp_path / "killed", process)
    process.kill()
    process.wait()
    flags["seed"] = read_json(tmp_path / "killed" / "flags.json")["seed"]
    processes.finish(tmp_path / "uninterrupted", environment, **flags)
    log = processes.finish(tmp_path / "killed", environment, **{**flags, "seed": seed})
    assert "resumed at step" in log
    processes.assert_same_run(tmp_path / "uninterrupted", tmp_path / "killed", 60)


def start_workers(model_dir):
    return processes.start_workers(model_dir, worker_environments(2), train_steps=60)


@pytest.fixture(scope="module")
def uninterrupted_workers(tmp_path_factory):
    """Returns the directory of an uninterrupted two-worker run."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "workers"
    assert [process.wait(200) for process in start_workers(directory)] == [0, 0]
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("victim, signal_number", [(1, signal.SIGTERM), (0, signal.SIGKILL)])
def test_losing_one_worker_stops_both_and_both_can_resume(
    victim, signal_number, uninterrupted_workers, tmp_path
):
    workers = start_workers(tmp_path / "run")
    processes.wait_until((tmp_path / "run" / "checkpoint").exists, tmp_path / "run_0", workers[0])
    workers[victim].send_signal(signal_number)
    statuses = {victim: 75 if signal_number == signal.SIGTERM else -signal_number, 1 - victim: 75}
    assert {index: process.wait(150) for index, process in enumerate(workers)} == statuses
    logs = {index: processes.log_of(tmp_path / f"run_{index}") for index in range(2)}
    if signal_number == signal.SIGTERM:
        assert (
            "stopped by SIGTERM: saved" in logs[victim]
            and "stopped by another worker: saved" in logs[1 - victim]
        )
    else:
        assert "another worker has stopped or is unreachable" in logs[1 - victim]
    assert [process.wait(200) for process in start_workers(tmp_path / "run")] == [0, 0]
    logs = [processes.log_of(tmp_path / f"run_{index}") for index in range(2)]
    resumed = {log.split("resumed at step ")[1].split()[0] for log in logs}
    assert len(resumed) == 1 and resumed != {"60"}
    processes.assert_same_run(uninterrupted_workers, tmp_path / "run", 60)
