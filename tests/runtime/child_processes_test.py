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


def run_all(jobs, parallel=2):
    """Runs jobs. Returns a dict that maps them, in the order in which they ended, to their errors."""
    with child_processes.Launcher() as launcher:
        return dict(launcher.run_all(jobs, parallel))


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
    assert run_all(jobs) == dict.fromkeys(jobs)


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
    markers = tmp_path / "markers"
    markers.mkdir()
    jobs = [job(tmp_path / name, code, str(markers), name) for name in "abcdef"]
    assert len(run_all(jobs)) == 6
    assert max(map(int, map(log_of, jobs))) <= 2


def test_error_for_a_failed_job_contains_the_last_output_line_of_this_attempt(tmp_path):
    no_disk = "print('first'); raise SystemExit('no disk')"
    for code, status, message in (
        (no_disk, 1, r"with status 1 \(no disk\)\. See .*log\."),
        ("print('diverged'); raise SystemExit(3)", 3, r"exited with status 3 \(diverged\)"),
        ("import os; os.kill(os.getpid(), 9)", -9, r"by signal 9 \(nothing was printed\)"),
    ):
        with (
            child_processes.Launcher() as launcher,
            pytest.raises(JobFailed, match=message) as error,
        ):
            launcher.run(job(tmp_path, code))
        assert error.value.job_status == status
    failing, succeeding = run_all([job(tmp_path, no_disk), job(tmp_path / "1", "")], 1).values()
    assert succeeding is None and "no disk" in str(failing)


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_running_jobs_and_prevents_new_ones(signum, tmp_path):
    markers = [str(tmp_path / name) for name in "ab"]
    jobs = [job(f"{marker} log", WAIT, marker, f"{tmp_path}/never") for marker in markers]
    jobs.append(touch(tmp_path / "2", tmp_path / "started"))

    def stop():
        while not all(map(os.path.exists, markers)):
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Stopped, match="run the same command again to resume"):
        run_all(jobs)
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
        job(tmp_path / "0", WAIT, f"{tmp_path}/a", f"{tmp_path}/never"),
        job(tmp_path / "1", WAIT, f"{tmp_path}/b", f"{tmp_path}/a"),
    ]
    with child_processes.Launcher() as launcher:
        ended = launcher.run_all(jobs, 2)
        assert next(ended)[0] == jobs[1]
        ended.close()
    assert log_of(jobs[0]) == "stopped\n"


@pytest.mark.parametrize(
    "devices, shares",
    [
        (None, [None, None]),
        ("", [None, None]),
        ("3", [None, None]),
        ("0,1,2,3", ["0,2", "1,3"]),
        ("0,1,2", ["0,2", "1"]),
        ("4,7", ["4", "7", "4"]),
        ("0,1", [None]),
    ],
)
def test_devices_are_divided_among_jobs(devices, shares):
    for index, share in enumerate(shares):
        assert child_processes.device_share(devices, index, len(shares)) == share


def test_parallel_jobs_see_different_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [job(tmp_path / name, code) for name in "abcd"]
    run_all(jobs)
    assert {*map(log_of, jobs)} == {"0\n", "1\n"}
