"""Processes: side by side, stopped together, and what is told of those that fail."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from runtime import child_processes, signals
from runtime.errors import JobFailed, Stopped, UserError
from support import ROOT


def job(directory, code, *arguments):
    return child_processes.Job((sys.executable, "-c", code, *arguments), str(directory))


WAIT = """
import pathlib, signal, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: (print("stopped"), sys.exit(75)))
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""


def test_jobs_run_side_by_side(tmp_path):
    """Each waits for the other; one after the other they would never end."""
    marks = [str(tmp_path / name) for name in "ab"]
    jobs = [job(tmp_path / "0", WAIT, *marks), job(tmp_path / "1", WAIT, *reversed(marks))]
    with child_processes.Launcher() as launcher:
        ended = list(launcher.run_all(jobs, 2))
    assert {each for each, _ in ended} == set(jobs) and {error for _, error in ended} == {None}


def test_no_more_than_so_many_at_once(tmp_path):
    code = """
import pathlib, sys, time
marks = pathlib.Path(sys.argv[1])
mark = marks / sys.argv[2]
mark.touch()
print(len(list(marks.iterdir())))
time.sleep(0.2)
mark.unlink()
"""
    (tmp_path / "marks").mkdir()
    jobs = [job(tmp_path / str(number), code, str(tmp_path / "marks"), str(number)) for number in range(6)]
    with child_processes.Launcher() as launcher:
        assert len(list(launcher.run_all(jobs, 2))) == 6
    counts = [int((tmp_path / str(number) / "run.log").read_text()) for number in range(6)]
    assert max(counts) <= 2


def test_a_job_that_fails_is_told_by_its_last_line(tmp_path):
    jobs = [job(tmp_path / "0", "print('first'); raise SystemExit('no disk')"), job(tmp_path / "1", "")]
    with child_processes.Launcher() as launcher:
        errors = {each.directory: error for each, error in launcher.run_all(jobs, 1)}
        with pytest.raises(UserError, match=r"status 1 \(no disk\): see .*run\.log"):
            launcher.run(jobs[0])
    assert errors[jobs[1].directory] is None and "no disk" in str(errors[jobs[0].directory])


def test_a_failure_has_its_status_and_the_last_line_of_its_own_start(tmp_path):
    """The log of an earlier start says otherwise."""
    ends = [("print('diverged'); raise SystemExit(3)", 3, r"ended with status 3 \(diverged\)"),
            ("import os; os.kill(os.getpid(), 9)", -9, r"was killed by signal 9 \(nothing was printed\)")]
    for code, status, words in ends:
        with child_processes.Launcher() as launcher, pytest.raises(JobFailed, match=words) as error:
            launcher.run(job(tmp_path, code))
        assert error.value.job_status == status
    assert (tmp_path / "run.log").read_text() == "diverged\n"


def test_an_ignored_sighup_stays_ignored(tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with child_processes.Launcher() as launcher:
            os.kill(os.getpid(), signal.SIGHUP)
            launcher.run(job(tmp_path, "print('done')"))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "run.log").read_text() == "done\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_and_begins_no_other(number, tmp_path):
    marks = [str(tmp_path / name) for name in ("a", "b", "never")]
    jobs = [job(tmp_path / "0", WAIT, marks[0], marks[2]), job(tmp_path / "1", WAIT, marks[1], marks[2]),
            job(tmp_path / "2", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(tmp_path / "begun"))]

    def stop():
        while not all(map(os.path.exists, marks[:2])):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Stopped, match="the same command goes on from there"), child_processes.Launcher() as launcher:
        list(launcher.run_all(jobs, 2))
    for each in jobs[:2]:
        assert pathlib.Path(each.directory, "run.log").read_text() == "stopped\n"
    assert not (tmp_path / "begun").exists()


def test_a_signal_that_came_before_or_between_counts(tmp_path):
    begun = job(tmp_path / "0", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(tmp_path / "begun"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with signals.StopSignals(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        with child_processes.Launcher() as launcher:
            launcher.run(begun)
    assert not (tmp_path / "begun").exists()
    with pytest.raises(Stopped), child_processes.Launcher() as launcher:
        launcher.run(begun)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (tmp_path / "begun").exists()
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_a_second_signal_ends_all_at_once(tmp_path):
    """Also a job that takes its time to save."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from runtime import child_processes, signals
slow = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); " \
    "time.sleep(60)"
with signals.StopSignals(), child_processes.Launcher() as launcher:
    launcher.run(child_processes.Job((sys.executable, "-c", slow), {str(tmp_path)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        log = tmp_path / "run.log"
        while not (log.exists() and log.read_text().strip()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * signals._SAME_SIGNAL_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    child, deadline = int(log.read_text()), time.monotonic() + 20
    while pathlib.Path(f"/proc/{child}").exists() and "Z" not in pathlib.Path(
            f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_whoever_leaves_early_stops_the_rest(tmp_path):
    jobs = [job(tmp_path / "0", WAIT, str(tmp_path / "a"), str(tmp_path / "never")),
            job(tmp_path / "1", WAIT, str(tmp_path / "b"), str(tmp_path / "a"))]
    with child_processes.Launcher() as launcher:
        ended = launcher.run_all(jobs, 2)
        assert next(ended)[0] == jobs[1]
        ended.close()
    assert pathlib.Path(jobs[0].directory, "run.log").read_text() == "stopped\n"


@pytest.mark.parametrize("devices, parts, shares", [
    (None, 2, [None, None]), ("", 2, [None, None]), ("3", 2, [None, None]), ("0,1,2,3", 2, ["0,2", "1,3"]),
    ("0,1,2", 2, ["0,2", "1"]), ("4,7", 3, ["4", "7", "4"]), ("0,1", 1, [None])])
def test_devices_are_dealt_out(devices, parts, shares):
    assert [child_processes._share(devices, number, parts) for number in range(parts)] == shares


def test_a_job_sees_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [job(tmp_path / str(number), code) for number in range(4)]
    with child_processes.Launcher() as launcher:
        list(launcher.run_all(jobs, 2))
    seen = [pathlib.Path(each.directory, "run.log").read_text().strip() for each in jobs]
    assert set(seen) == {"0", "1"}
