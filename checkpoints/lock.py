"""The lock of a directory, so that two trainings never write to it.

`fcntl.flock` is called directly, because the library filelock opens the file with O_TRUNC before it has the lock: a
refused process would erase the owner's name, and a file of another program would lose its content. filelock also has no
place for the checks between opening and locking, and removes the file on release.
"""

from __future__ import annotations

import fcntl
import os
import socket

from runtime import console
from runtime.errors import UserError

_LOCK = "train.lock"
_OWNER_CHARACTERS = 300  # of a lock's text, read at most


class Lock:
    """The lock of a directory, held by the process that trains in it.

    The system releases it when the process ends, however that happens. Storage that has no locks (gs://, some network
    file systems) goes without, which is logged.
    """

    def __init__(self, directory: str, flag: str = "--model_dir"):
        """Takes the lock of `directory`, which `flag` names. Raises `UserError` if another process holds it."""
        self._path, self._directory, self._flag = os.path.join(directory, _LOCK), directory, flag
        self._file = None if "://" in directory else self._open()

    def _open(self):
        try:
            # A link could name a file that is not ours to truncate.
            number = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            file = os.fdopen(number, "r+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{self._flag}={self._directory}: {_LOCK} cannot be opened ({error.strerror or error}). "
                            "Remove it if it is not a regular file, or choose another directory.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = file.read(_OWNER_CHARACTERS).strip() or "another process"
            file.close()
            raise UserError(f"{self._flag}={self._directory} is in use by {owner}. Wait for it, stop it, or choose "
                            "another directory.") from error
        except OSError:
            file.close()
            return None
        content = file.read(_OWNER_CHARACTERS)
        if content and not content.startswith("process "):
            file.close()
            raise UserError(f"{self._flag}={self._directory}: {_LOCK} is not a file of this program. Choose another "
                            "directory.")
        file.seek(0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def __enter__(self) -> Lock:
        if self._file is None:
            console.log(f"{self._flag}={self._directory} cannot be locked: start no second training there")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def check(self) -> None:
        """Raises `UserError` if the directory was removed or replaced, so that another process may train in it."""
        if self._file is None:
            return
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._file.fileno())):
            raise UserError(f"{self._flag}={self._directory}: the directory was removed or replaced during the run "
                            f"({_LOCK} is not the file that was locked). Nothing more is written to it. Restore it, or "
                            "run the same command again.")
