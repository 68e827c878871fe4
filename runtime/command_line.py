"""The entry point that all commands share: parsing, errors, exit status."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from runtime import console, signals
from runtime.errors import STOPPED_STATUS, Stopped, UserError, first_line

_T = TypeVar("_T")
# Errors of TensorFlow about files, memory and connections. All others are faults of the program.
_ENVIRONMENT_ERRORS = ("ResourceExhaustedError", "PermissionDeniedError", "NotFoundError", "AlreadyExistsError",
                       "FailedPreconditionError", "UnavailableError", "DataLossError")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_with_error(program: str, message: object, status: int = UserError.status) -> NoReturn:
    """Prints an error in one line, and ends the program."""
    print(console.printable(f"{program}: error: {' '.join(str(message).split())}"), file=sys.stderr)
    sys.exit(status)


def exit_not_a_program(path: str, command: str = "python run.py") -> NoReturn:
    """Ends a module, at `path`, that was started as a program, with status 2 and the command to use instead."""
    exit_with_error(os.path.basename(path),
                    f"this module is not a program. Use `{command}`; `make help` lists all commands.")


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        exit_with_error(self.prog, f"{message}; see --help")


def parse_image_size(text: str) -> int:
    """Parses an image size in pixels, at least 8; for argparse's `type`."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) < 8:
        raise argparse.ArgumentTypeError(f"must be an integer >= 8; got {text}")
    return int(text)


@contextlib.contextmanager
def reporting_errors(program: str) -> Iterator[None]:
    """Returns a context in which errors and signals become one line and an exit status.

    A `UserError` ends the program with its status, errors of files, memory and connections with 2, `errors.Stopped`
    with `errors.STOPPED_STATUS`. Any other exception is a fault of the program, and keeps its traceback.
    """
    console.set_up()
    try:
        yield
    except UserError as error:
        exit_with_error(program, error, error.status)
    except Stopped as stopped:
        console.log(str(stopped))
        sys.exit(STOPPED_STATUS)
    except KeyboardInterrupt:  # Outside of `signals.StopSignals`: there is nothing to save yet.
        sys.exit(130)
    except Exception as error:
        message = describe_environment_error(error)
        if message is None:
            raise
        exit_with_error(program, message)


def run_command(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` in `reporting_errors`, and returns its result."""
    with reporting_errors(program):
        return function()


def run_stoppable(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` in `reporting_errors` and `signals.StopSignals`: a signal ends it at a safe point."""
    with reporting_errors(program), signals.StopSignals():
        return function()


def describe_environment_error(error: Exception) -> str | None:
    """Returns one line about an error of files, memory or connections, with the remedy; None for any other error."""
    tensorflow = sys.modules.get("tensorflow")  # Not imported here: that takes seconds.
    kinds = tuple(getattr(tensorflow.errors, name) for name in _ENVIRONMENT_ERRORS) if tensorflow else ()
    if not isinstance(error, (OSError, MemoryError, *kinds)):
        return None
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    text = re.sub(r"^(\{\{.*?\}\} *)+", "", str(error))  # TensorFlow's name of the operation.
    reason = f"{path}: {error.strerror}" if path is not None and error.strerror else first_line(text or error)
    if number in _NO_ROOM or "No space left" in text:
        reason = reason if "No space left" in reason else f"No space left on device ({reason})"
        return f"{reason}. Free some space, then start the same command again."
    if isinstance(error, FileNotFoundError) and path is None and "temporary directory" in str(error):
        return "TMPDIR: there is no temporary directory that can be written to. Set TMPDIR to one."
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        return f"out of memory, or of disk space ({reason}). Free some, then start the same command again."
    return f"{reason}. Correct this, then start the same command again."
