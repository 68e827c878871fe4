"""Locks for training in a directory, for exporting to it, and for runs of the paper's tables.

Only one process at a time can hold a lock. This module uses `fcntl.flock` instead of the filelock
library, because filelock truncates the lock file before it acquires the lock. A process that cannot
acquire the lock would thus erase the owner's name or another program's data. In addition, filelock
does not support checks between opening and locking, and deletes the file on release.
"""

from __future__ import annotations

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
    path = os.path.join(directory, TRAIN)
    if "://" in directory or not os.path.isfile(path) or os.path.islink(path):
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Closing the file releases the lock.
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


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
    """

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
          UserError: the lock file cannot be used.
          Stopped: a signal was received while waiting.
        """
        self._path, self._directory, self._flag = os.path.join(directory, name), directory, flag
        self._name, self._wait = name, wait
        self._file = None if "://" in directory else self._open()

    def _open(self):
        try:
            # O_NOFOLLOW is set because a link could point to another program's file, which would be
            # truncated below.
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
            file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(
                f"{self._flag}={self._directory}: {self._name} cannot be opened"
                f" ({error.strerror or error}). Remove the file if it is not a regular file, or"
                " choose another directory."
            ) from error
        try:
            self._lock(file)
        except BlockingIOError as error:
            owner = file.read(_MAX_OWNER_CHARACTERS).strip() or "another process"
            file.close()
            raise InUse(
                f"{self._flag}={self._directory}: the directory is in use by {owner}. Wait for that"
                " run to end, stop it, or choose another directory.",
                owner,
            ) from error
        except OSError:
            file.close()
            return None
        content = file.read(_MAX_OWNER_CHARACTERS)
        if content and not content.startswith("process "):
            file.close()
            raise UserError(
                f"{self._flag}={self._directory}: {self._name} was not written by this program."
                " Choose another directory."
            )
        file.seek(0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def _lock(self, file):
        """Locks an open file. Raises `BlockingIOError` if another process holds the lock and `wait` is False."""
        is_logged = False
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self._wait:
                    raise
            if not is_logged:
                console.log(f"waiting for another process to release {self._path}")
                is_logged = True
            signals.safe_point()
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Lock:
        if self._file is None and self._name != EXPORT:
            console.log(
                f"warning: {self._flag}={self._directory}: the file system does not support locks."
                " Do not start a second run in this directory."
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that hold the lock. A child process that inherits them holds the lock until it ends, too."""
        return () if self._file is None else (self._file.fileno(),)

    def check(self) -> None:
        """Raises `UserError` if the directory was removed or replaced, since another process may use the new one."""
        if self._file is None:
            return
        try:
            file_stat = os.stat(self._path, follow_symlinks=False)
        except OSError:
            file_stat = None
        if file_stat is None or not os.path.samestat(file_stat, os.fstat(self._file.fileno())):
            raise UserError(
                f"{self._flag}={self._directory}: the directory was removed or replaced during the"
                f" run ({self._name} is not the file that was locked). No further files were"
                " written. Restore the directory, or run the same command again."
            )
