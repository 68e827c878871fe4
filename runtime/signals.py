"""Handles SIGTERM, SIGINT and SIGHUP. The first signal stops the program at a safe point, a second one immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from runtime.errors import Stopped

_SAME_SIGNAL_SECONDS = 0.2  # Terminals, shells and schedulers may send a signal twice.
_KEPT = "finished work is kept; run the same command again to resume"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def active() -> StopSignals | None:
    """Returns the `StopSignals` whose handler is installed, or None."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, StopSignals) else None


def safe_point(saved: str = _KEPT) -> None:
    """Raises `Stopped` if a signal was received. Call this function wherever the program can safely stop.

    The error message contains `saved`, a description of what was saved.
    """
    if (stop := active()) is not None and stop.requested:
        stop.stop(saved)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Returns the active instance's `StopSignals.interruptible`, or a no-op context if no instance is active."""
    return contextlib.nullcontext() if (stop := active()) is None else stop.interruptible()


class StopSignals:
    """A context manager that records signals until the next `safe_point`, which raises `Stopped`.

    Signals raise `Stopped` immediately only inside `interruptible`. Elsewhere, an exception raised
    during TensorFlow's multi-threaded tracing might be lost or replaced by another exception. If
    SIGHUP is ignored, as under nohup, it remains ignored. Use the context only in the main thread.

    Attributes:
      requested: whether a signal was received.
      child_processes: set of `subprocess.Popen` objects that receive the same signals. A second
        signal kills them together with this process.
    """

    def __init__(self):
        self.requested = False
        self.child_processes = set()
        self._name = ""
        self._interruptible = False

    def __enter__(self) -> StopSignals:
        signal_reader, self._signal_writer = socket.socketpair()
        self._signal_writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        self._old = {
            signum: signal.signal(signum, self._handle)
            for signum in SIGNALS
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }
        threading.Thread(target=self._watch, args=(signal_reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._signal_writer.close()  # Ends the `_watch` thread.

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Returns a context manager in which a signal raises `Stopped` immediately. Use it for downloads."""
        safe_point()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def stop(self, saved: str) -> NoReturn:
        """Raises `Stopped`. The error message contains `saved`, a description of what was saved."""
        stopped = Stopped(f"stopped by {self._name or 'another worker'}: {saved}")
        stopped.abandons_threads = self._interruptible
        raise stopped

    def _handle(self, signum: int, _: object) -> None:
        """Records a signal. Python calls this handler in the main thread, possibly only after native code returns."""
        self.requested, self._name = True, signal.Signals(signum).name
        for process in tuple(self.child_processes):
            process.send_signal(signum)
        if self._interruptible:
            self.stop(_KEPT)

    def _watch(self, signal_reader: socket.socket) -> None:
        """Acknowledges the first signal and exits on the second. Runs in a separate thread to react immediately."""
        first_time = None
        while data := signal_reader.recv(1):
            if (signum := data[0]) not in SIGNALS:
                continue
            if first_time is None:
                first_time = time.monotonic()
                # `print` is not reentrant. `os.write` raises OSError if standard error is closed.
                with contextlib.suppress(OSError):
                    os.write(
                        2,
                        f"\n{signal.Signals(signum).name}: finishing the current work, then saving;"
                        " a second signal stops the program immediately\n".encode(),
                    )
            # SIGHUP is exempt, because closing a terminal sends it several times (directly and
            # through the shell).
            elif signum != signal.SIGHUP and time.monotonic() - first_time > _SAME_SIGNAL_SECONDS:
                for process in tuple(self.child_processes):
                    process.kill()
                os._exit(128 + signum)
