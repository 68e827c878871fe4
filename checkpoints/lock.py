"""Locks for training in a directory, for exporting to it, and for runs of the paper's tables.

This module uses `fcntl.flock` instead of the filelock library, because filelock truncates the file
before it acquires the lock, and thus erases the owner's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time

from runtime import console, signals
from runtime.errors import UserError

# held while training in a directory, and while exporting to it
TRAIN, EXPORT = "train.lock", "export.lock"
_MAX_OWNER_CHARACTERS = 300
_POLL_SECONDS = 0.2


def is_held(directory: str) -> bool:
    """Returns whether a process holds the lock for training in `directory`, or False if locks are not supported."""
    try:
        with open(os.path.join(directory, TRAIN), opener=_open_regular_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Closing the file releases the lock.
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _open_regular_file(path: str, flags: int) -> int:
    # The target of a link could be truncated, and a FIFO could block.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class InUse(UserError):
    """Raised if another process holds a lock. `owner` describes that process."""

    def __init__(self, text: str, owner: str):
        super().__init__(text)
        self.owner = owner


class Lock:
    """A directory lock, held by the process that trains in the directory or exports to it.

    The operating system releases the lock when the process ends, even if it crashes. If the storage
    does not support locks (gs://, some network file systems), the directory is not locked, and
    training logs a warning.

    Attributes:
      descriptors: file descriptors that hold the lock. A child process that inherits them holds the
        lock until it ends, too. Empty if the storage does not support locks.
    """

    descriptors: tuple[int, ...]

    def __init__(
        self, directory: str, flag: str = "--model_dir", name: str = TRAIN, wait: bool = False
    ):
        """Locks `directory`.

        Args:
          directory: the directory to lock.
          flag: the flag whose value is `directory`, for error messages.
          name: file name of the lock, relative to `directory`. Locks with different names are
            independent.
          wait: whether to wait if another process holds the lock.

        Raises:
          InUse: another process holds the lock and `wait` is False.
          UserError: the lock file cannot be opened.
          Stopped: a signal was received while waiting.
        """
        self._path, self._argument = os.path.join(directory, name), f"{flag}={directory}"
        self._file, self.descriptors = None, ()
        if "://" in directory:
            return
        try:
            self._file = open(  # noqa: SIM115  (closed by `__exit__`)
                self._path, "a+", errors="replace", opener=_open_regular_file
            )
        except OSError as error:
            raise UserError(
                f"{self._argument}: {name} cannot be opened ({error.strerror or error}). Remove the"
                " file if it is not a regular file, or choose another directory."
            ) from error
        try:
            self._acquire(wait)
        except OSError:
            self._file.close()
            return
        self.descriptors = (self._file.fileno(),)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _acquire(self, wait: bool) -> None:
        is_first = True
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if not wait and not is_first:  # `is_held` also holds the lock, but only for a moment.
                self._file.seek(0)
                owner = self._file.read(_MAX_OWNER_CHARACTERS).strip() or "another process"
                raise InUse(
                    f"{self._argument}: the directory is in use by {owner}. Wait for that run to"
                    " end, stop it, or choose another directory.",
                    owner,
                )
            if wait and is_first:
                console.log(f"waiting for another process to release {self._path}")
            is_first = False
            signals.safe_point()
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Lock:
        if not self.descriptors and not self._path.endswith(EXPORT):
            console.log(
                f"warning: {self._argument}: the file system does not support locks. Do not start"
                " a second run in this directory."
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def check(self) -> None:
        """Raises `UserError` if the directory was removed or replaced, since another process may use the new one."""
        with contextlib.suppress(OSError):
            if not self.descriptors or os.path.samestat(
                os.stat(self._path, follow_symlinks=False), os.fstat(*self.descriptors)
            ):
                return
        raise UserError(
            f"{self._argument}: the directory was removed or replaced during the run"
            f" ({self._path} is not the file that was locked). No further files were written."
            " Restore the directory, or run the same command again."
        )
