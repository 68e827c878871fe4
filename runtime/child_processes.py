"""Child processes: several at once, each with its log, stopped together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import platform
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator

from runtime import signals
from runtime.errors import STOPPED_STATUS, JobFailed, Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED_BETWEEN = "stopped: the same command goes on from there"
_STOPPED = {STOPPED_STATUS, *(status for number in _SIGNALS for status in (128 + number, -number))}
_TAIL_BYTES = 4096  # of a log, searched for its last line


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, and the directory whose run.log gets its output."""

    command: tuple[str, ...]
    directory: str
    cwd: str | None = None  # working directory; None: that of this process


class Launcher:
    """A context in which jobs may be run. SIGINT, SIGTERM and SIGHUP are passed on to all running jobs.

    No job starts after a signal. A SIGHUP that is ignored, as under nohup, stays ignored.

    It raises `errors.Stopped` if a signal was received before it was entered, or while no job ran. Ctrl-C in a terminal
    also reaches the processes directly; they take the two signals for one. Use it in the main thread.
    """

    def __init__(self):
        self._lock, self._stopped, self._signalled = threading.Lock(), False, False

    def __enter__(self) -> Launcher:
        outer = signals.active()
        # Shared with `outer`, which still watches for a second signal, and then kills them.
        self._running = set() if outer is None else outer.child_processes
        self._old = {number: signal.signal(number, self._pass_on) for number in _SIGNALS
                     if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}
        if outer is not None and outer.requested:  # By a signal that was received before.
            self._restore()
            outer.stop()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore()
        if kind is None and self._signalled:  # After the last job had ended.
            raise Stopped(_STOPPED_BETWEEN)

    def _restore(self):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _pass_on(self, number, _):
        self._signalled = True
        self._stop(number)

    def _stop(self, number):
        self._stopped = True
        for process in tuple(self._running):  # Without the lock, which the interrupted thread may hold.
            process.send_signal(number)

    def run(self, job: Job, devices: str | None = None) -> None:
        """Runs a job to its end.

        Args:
          job: what to run.
          devices: value of CUDA_VISIBLE_DEVICES; None: that of this process.

        Raises:
          JobFailed: it failed; the text has the last line of its output.
          errors.Stopped: it was stopped; the same command continues it.
        """
        os.makedirs(job.directory, exist_ok=True)
        log = os.path.join(job.directory, "run.log")
        visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        with open(log, "ab") as file:
            begin = file.tell()  # Earlier starts wrote to the same log.
            with self._started(job, file, visible) as process:
                status = process.wait()
        if status in _STOPPED or self._stopped:  # A run may still exit with status 0 after the signal.
            raise Stopped(f"stopped in {job.directory}: the same command goes on from there")
        if status:
            how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
            raise JobFailed(f"{job.directory}: the run {how} ({_last_line(log, begin)}): see {log}", status)

    @contextlib.contextmanager
    def _started(self, job, file, variables):
        with self._lock:
            if self._stopped:
                raise Stopped(_STOPPED_BETWEEN)
            process = subprocess.Popen(job.command, cwd=job.cwd, stdout=file, stderr=subprocess.STDOUT,
                                       env={**os.environ, **variables})
            self._running.add(process)
        try:
            if self._stopped:  # The signal came while the process was started.
                process.terminate()
            yield process
        finally:
            self._running.discard(process)

    def run_all(self, jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, JobFailed | None]]:
        """Runs jobs, `at_once` of them in parallel; yields (job, None or its `JobFailed`) as each ends.

        If CUDA_VISIBLE_DEVICES names several devices, each of the parallel jobs gets a part of them. If the caller
        closes the iterator early, running jobs are stopped by SIGTERM and waited for.

        Raises:
          errors.Stopped: as `run`.
        """
        slots = queue.SimpleQueue()
        for number in range(at_once):
            slots.put(_share(os.environ.get("CUDA_VISIBLE_DEVICES"), number, at_once))

        def run(job):
            devices = slots.get()
            try:
                self.run(job, devices)
            except JobFailed as error:
                return job, error
            finally:
                slots.put(devices)
            return job, None

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(run, job) for job in jobs]
            try:
                for done in concurrent.futures.as_completed(waiting):
                    yield done.result()
            finally:
                if not (self._stopped or all(each.done() for each in waiting)):  # A second signal would kill them.
                    self._stop(signal.SIGTERM)
                for each in waiting:
                    each.cancel()


def _last_line(log, begin):
    """Returns the last line of a log after its first `begin` bytes."""
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - _TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
    return text.splitlines()[-1] if text else "nothing was printed"


def cpu_info() -> tuple[str, int]:
    """Returns the processor's name, and the number of cores that this process may use."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:  # macOS does not have this file.
        names = []
    return names[0] if names else platform.processor() or platform.machine(), len(os.sched_getaffinity(0)) if hasattr(
        os, "sched_getaffinity") else os.cpu_count()


def _share(devices, number, parts):
    """Returns the devices of one of several parts: "0,1,2,3" in two parts are "0,2" and "1,3". None: all devices."""
    names = devices.split(",") if devices else []
    if len(names) < 2 or parts < 2:
        return None
    return ",".join(names[number % len(names)::parts])
