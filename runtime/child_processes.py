"""Child processes that run in parallel, each with its own log, and are stopped together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import platform
import queue
import re
import subprocess
from collections.abc import Generator, Iterable

from runtime import signals
from runtime.errors import STOPPED_STATUS, JobFailed, Stopped

_STOPPED_STATUSES = {
    STOPPED_STATUS,
    *(status for signum in signals.SIGNALS for status in (128 + signum, -signum)),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A command to run in a child process.

    Attributes:
      command: the program and its arguments.
      directory: directory of run.log, to which the output of the command is appended.
      cwd: working directory of the command, or None for the working directory of this process.
      inherited: file descriptors that the command inherits.
    """

    command: tuple[str, ...]
    directory: str
    cwd: str | None = None
    inherited: tuple[int, ...] = ()


class Launcher:
    """A context manager that runs jobs, which receive all signals that this process receives.

    After a signal, no further jobs are started. The context raises `errors.Stopped` if a signal
    arrived before the context was entered or while no job was running. In a terminal, Ctrl-C also
    sends SIGINT directly to the jobs, which treat this signal and the forwarded one as a single
    signal. Use the context only in the main thread.
    """

    def __enter__(self) -> Launcher:
        self._closed, self._exit = False, contextlib.ExitStack()
        self._signals = signals.active() or self._exit.enter_context(signals.StopSignals())
        signals.safe_point()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        with self._exit:
            if exception_type is None:
                signals.safe_point()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._signals.requested

    def run(self, job: Job, devices: str | None = None) -> None:
        """Runs a job and waits until it ends.

        Args:
          job: the command.
          devices: value of CUDA_VISIBLE_DEVICES for the job, or None for this process's value.

        Raises:
          JobFailed: the job failed; the message contains the last line of its output.
          errors.Stopped: the job was stopped by a signal; running the same command again resumes
            it.
        """
        stopped = Stopped(f"stopped in {job.directory}: run the same command again to resume")
        if self._stopped:
            raise stopped
        os.makedirs(job.directory, exist_ok=True)
        log = os.path.join(job.directory, "run.log")
        visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        running = self._signals.child_processes
        with open(log, "ab") as file:
            start = file.tell()  # Earlier attempts may have written to the same log.
            process = subprocess.Popen(
                job.command,
                cwd=job.cwd,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **visible},
                pass_fds=job.inherited,
            )
            running.add(process)
            try:
                if self._stopped:  # The signal arrived while the process was starting.
                    process.terminate()
                status = process.wait()
            finally:
                running.discard(process)
        if status in _STOPPED_STATUSES or self._stopped:
            # A run may exit with status 0 despite the signal.
            raise stopped
        if status:
            outcome = (
                f"exited with status {status}" if status > 0 else f"was killed by signal {-status}"
            )
            raise JobFailed(
                f"{job.directory}: the run {outcome} ({_last_line(log, start)}). See {log}.", status
            )

    def run_all(
        self, jobs: Iterable[Job], num_parallel: int
    ) -> Generator[tuple[Job, JobFailed | None], None, None]:
        """Runs jobs, `num_parallel` at a time. When a job ends, yields (job, None), or (job, `JobFailed`) if it failed.

        The devices in CUDA_VISIBLE_DEVICES are divided among the parallel jobs. If the caller
        closes the iterator early, running jobs receive SIGTERM, and the iterator waits until they
        end.

        Raises:
          errors.Stopped: a job was stopped by a signal (see `run`).
        """
        free_devices = queue.SimpleQueue()
        for index in range(num_parallel):
            free_devices.put(
                device_share(os.environ.get("CUDA_VISIBLE_DEVICES"), index, num_parallel)
            )

        def run(job):
            devices = free_devices.get()
            try:
                self.run(job, devices)
            except JobFailed as error:
                return job, error
            finally:
                free_devices.put(devices)
            return job, None

        with concurrent.futures.ThreadPoolExecutor(num_parallel) as pool:
            futures = [pool.submit(run, job) for job in jobs]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            finally:
                # Do not signal jobs that have already been signaled, because a second signal would
                # kill them.
                if not (self._stopped or all(future.done() for future in futures)):
                    self._closed = True
                    for process in tuple(self._signals.child_processes):
                        process.terminate()
                for future in futures:
                    future.cancel()


def _last_line(log: str, start: int) -> str:
    """Returns the last line of a log file, ignoring the first `start` bytes of the file."""
    text = pathlib.Path(log).read_bytes()[start:].decode(errors="replace").strip()
    return text.splitlines()[-1] if text else "nothing was printed"


def cpu_info() -> tuple[str, int]:
    """Returns the name of the CPU and the number of cores that this process may use."""
    info = pathlib.Path("/proc/cpuinfo")  # macOS does not have this file.
    name = re.search(
        r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE
    )
    # `os.sched_getaffinity` exists only on Linux.
    return name[1] if name else platform.processor() or platform.machine(), (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def device_share(devices: str | None, index: int, num_shares: int) -> str | None:
    """Returns one share of a list of devices, or None if there are fewer than two devices or shares.

    The two shares of "0,1,2,3" are "0,2" and "1,3".
    """
    names = (devices or "").split(",")
    if len(names) < 2 or num_shares < 2:
        return None
    return ",".join(names[index % len(names) :: num_shares])
