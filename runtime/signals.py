"""SIGTERM, SIGINT and SIGHUP: work is saved at a safe point, then the program ends; a second signal ends it at once."""

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

_SAME_SIGNAL_SECONDS = 0.2  # Terminals, shells and schedulers may send the same one twice.
_KEPT = "what was done so far is kept; the same command goes on from there"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def active() -> StopSignals | None:
    """Returns the `StopSignals` that handles signals now, or None: the owner of the installed handler."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, StopSignals) else None


def safe_point(saved: str = _KEPT) -> None:
    """Raises `Stopped`, which reports what was `saved`, if a signal was received. Call it where work can be left."""
    if (stop := active()) is not None and stop.requested:
        stop.stop(saved)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Returns `StopSignals.interruptible` of the active instance; without one, a context without effect."""
    return contextlib.nullcontext() if (stop := active()) is None else stop.interruptible()


class StopSignals:
    """A context in which signals are recorded until `safe_point`, or raise `Stopped` if `interruptible`.

    They do not raise elsewhere: an exception in the middle of TensorFlow's tracing, which has its own threads, may
    appear as another one, or not at all. SIGHUP, which a terminal sends when it is closed, stays ignored if it was, as
    under nohup. Use it in the main thread.

    Attributes:
      requested: True after a signal.
      child_processes: set of `subprocess.Popen` that a second signal kills together with this process.
    """

    def __init__(self):
        self.requested = False
        self.child_processes = set()
        self._name = ""
        self._interruptible = False

    def __enter__(self) -> StopSignals:
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        handled = [number for number in _SIGNALS
                   if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._old = {number: signal.signal(number, self._handle) for number in handled}
        threading.Thread(target=self._watch, args=(self._wake,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._woken.close()  # Which ends the thread.

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Returns a context in which a signal raises `Stopped` wherever the main thread is: for downloads."""
        safe_point()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def stop(self, saved: str = _KEPT) -> NoReturn:
        """Raises `Stopped`, which reports what was `saved`."""
        raise Stopped(f"stopped by {self._name or 'another host'}: {saved}")

    def _handle(self, number, _):
        """Records a signal. Runs in the main thread, which may be in native code for some seconds first."""
        self.requested, self._name = True, signal.Signals(number).name
        if self._interruptible:
            self.stop()

    def _watch(self, wake):
        """Answers signals at once, in its own thread, which the system wakes through a socket."""
        first = None
        while number := wake.recv(1):
            if number[0] not in _SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                # Not by print, which the main thread may be in the middle of. The reader may have gone.
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{signal.Signals(number[0]).name}: finishing what runs, then saving; a second "
                             "signal ends it at once\n".encode())
            # A terminal that is closed sends SIGHUP several times: itself, through its shell, and when that ends.
            elif number[0] != signal.SIGHUP and time.monotonic() - first > _SAME_SIGNAL_SECONDS:
                for process in tuple(self.child_processes):
                    process.kill()
                os._exit(128 + number[0])
