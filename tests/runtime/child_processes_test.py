"""Child processes: parallel jobs, signals, and error messages for failed jobs."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from runtime import child_processes, signals
from runtime.errors import JobFailed, Stopped
from support import ROOT


def job(directory, code, *arguments):
    return child_processes.Job((sys.executable, "-c", code, *arguments), str(directory))


def touch(directory, path):
    return job(directory, "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(path))


def log_of(started):
    return pathlib.Path(started.directory, "run.log").read_text()


WAIT = """
import pathlib, signal, sys, time
own_marker, other_marker = map(pathlib.Path, sys.argv[1:])
for signum in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, lambda *_: (print("stopped"), sys.exit(75)))
own_marker.touch()
while not other_marker.exists():
    time.sleep(0.01)
"""


def test_jobs_run_in_parallel(tmp_path):
    """Runs two jobs that wait for each other. If they ran one after the other, neither would finish."""
    markers = [str(tmp_path / name) for name in "ab"]
    jobs = [job(tmp_path / "0", WAIT, *markers), job(tmp_path / "1", WAIT, *reversed(markers))]
    with child_processes.Launcher() as launcher:
        ended = list(launcher.run_all(jobs, 2))
    assert {ended_job for ended_job, _ in ended} == set(jobs) and {error for _, error in ended} == {
        None
    }


def test_number_of_parallel_jobs_is_limited(tmp_path):
    code = """
import pathlib, sys, time
markers = pathlib.Path(sys.argv[1])
marker = markers / sys.argv[2]
marker.touch()
print(len(list(markers.iterdir())))
time.sleep(0.2)
marker.unlink()
"""
    (tmp_path / "markers").mkdir()
    jobs = [
        job(tmp_path / str(index), code, str(tmp_path / "markers"), str(index))
        for index in range(6)
    ]
    with child_processes.Launcher() as launcher:
        assert len(list(launcher.run_all(jobs, 2))) == 6
    assert max(map(int, map(log_of, jobs))) <= 2


def test_error_for_a_failed_job_contains_the_last_output_line_of_this_attempt(tmp_path):
    failures = [
        (
            "print('first'); raise SystemExit('no disk')",
            1,
            r"with status 1 \(no disk\)\. See .*log\.",
        ),
        ("print('diverged'); raise SystemExit(3)", 3, r"exited with status 3 \(diverged\)"),
        ("import os; os.kill(os.getpid(), 9)", -9, r"by signal 9 \(nothing was printed\)"),
    ]
    for code, status, message in failures:
        with (
            child_processes.Launcher() as launcher,
            pytest.raises(JobFailed, match=message) as error,
        ):
            launcher.run(job(tmp_path, code))
        assert error.value.job_status == status
    jobs = [job(tmp_path, failures[0][0]), job(tmp_path / "1", "")]
    with child_processes.Launcher() as launcher:
        errors = dict(launcher.run_all(jobs, 1))
    assert errors[jobs[1]] is None and "no disk" in str(errors[jobs[0]])


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_running_jobs_and_prevents_new_ones(signum, tmp_path):
    markers = [str(tmp_path / name) for name in ("a", "b", "never")]
    jobs = [
        job(tmp_path / "0", WAIT, markers[0], markers[2]),
        job(tmp_path / "1", WAIT, markers[1], markers[2]),
        touch(tmp_path / "2", tmp_path / "started"),
    ]

    def stop():
        while not all(map(os.path.exists, markers[:2])):
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    threading.Thread(target=stop, daemon=True).start()
    with (
        pytest.raises(Stopped, match="run the same command again to resume"),
        child_processes.Launcher() as launcher,
    ):
        list(launcher.run_all(jobs, 2))
    assert [log_of(running) for running in jobs[:2]] == ["stopped\n"] * 2
    assert not (tmp_path / "started").exists()


def test_a_job_that_exits_with_status_0_after_a_signal_counts_as_stopped(tmp_path):
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    with pytest.raises(Stopped, match="stopped in"), child_processes.Launcher() as launcher:
        launcher.run(job(tmp_path, code))


def test_launcher_stops_on_signals_before_and_after_a_job(tmp_path):
    touching = touch(tmp_path / "0", tmp_path / "started")
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with signals.StopSignals(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        with child_processes.Launcher() as launcher:
            launcher.run(touching)
    assert not (tmp_path / "started").exists()
    with pytest.raises(Stopped), child_processes.Launcher() as launcher:
        launcher.run(touching)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (tmp_path / "started").exists()
    assert handlers == {signum: signal.getsignal(signum) for signum in handlers}


def test_a_second_signal_kills_jobs_that_ignore_the_first(tmp_path):
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
    while (
        pathlib.Path(f"/proc/{child}").exists()
        and "Z" not in pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closing_the_iterator_stops_running_jobs(tmp_path):
    jobs = [
        job(tmp_path / "0", WAIT, str(tmp_path / "a"), str(tmp_path / "never")),
        job(tmp_path / "1", WAIT, str(tmp_path / "b"), str(tmp_path / "a")),
    ]
    with child_processes.Launcher() as launcher:
        ended = launcher.run_all(jobs, 2)
        assert next(ended)[0] == jobs[1]
        ended.close()
    assert log_of(jobs[0]) == "stopped\n"


@pytest.mark.parametrize(
    "devices, num_shares, shares",
    [
        (None, 2, [None, None]),
        ("", 2, [None, None]),
        ("3", 2, [None, None]),
        ("0,1,2,3", 2, ["0,2", "1,3"]),
        ("0,1,2", 2, ["0,2", "1"]),
        ("4,7", 3, ["4", "7", "4"]),
        ("0,1", 1, [None]),
    ],
)
def test_devices_are_divided_among_jobs(devices, num_shares, shares):
    assert [
        child_processes.device_share(devices, index, num_shares) for index in range(num_shares)
    ] == shares


def test_parallel_jobs_see_different_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [job(tmp_path / str(index), code) for index in range(4)]
    with child_processes.Launcher() as launcher:
        list(launcher.run_all(jobs, 2))
    assert set(map(log_of, jobs)) == {"0\n", "1\n"}
