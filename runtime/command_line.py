"""Code shared by all commands: argument parsing, error messages and exit statuses."""

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
# TensorFlow's file, memory and connection errors. All other TensorFlow errors indicate bugs in the
# program.
_ENVIRONMENT_ERRORS = (
    "ResourceExhaustedError",
    "PermissionDeniedError",
    "NotFoundError",
    "AlreadyExistsError",
    "FailedPreconditionError",
    "UnavailableError",
    "DataLossError",
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_with_error(program: str, message: object, status: int = UserError.status) -> NoReturn:
    """Prints a one-line error to standard error and exits with `status`."""
    print(console.printable(f"{program}: error: {' '.join(str(message).split())}"), file=sys.stderr)
    sys.exit(status)


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that prints errors on a single line."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        exit_with_error(self.prog, f"{message}. See --help.")


def parse_image_size(text: str) -> int:
    """Parses an image size of at least 8 pixels, for use as `type` in argparse."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) < 8:
        raise argparse.ArgumentTypeError(f"must be an integer >= 8; got {text}")
    return int(text)


@contextlib.contextmanager
def reporting_errors(program: str) -> Iterator[None]:
    """Returns a context manager that converts errors and signals to a one-line message and an exit status.

    The exit status is the error's own status for a `UserError`, 2 for file, memory and connection
    errors, and `errors.STOPPED_STATUS` for `errors.Stopped`. Any other exception indicates a bug in
    the program, and its traceback is printed.
    """
    console.set_up()
    try:
        yield
    except UserError as error:
        exit_with_error(program, error, error.status)
    except Stopped as stopped:
        console.log(str(stopped))
        if stopped.abandons_threads:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STOPPED_STATUS)
        sys.exit(STOPPED_STATUS)
    except KeyboardInterrupt:
        # Raised outside `signals.StopSignals`, when there is nothing to save.
        sys.exit(130)
    except Exception as error:
        message = describe_environment_error(error)
        if message is None:
            raise
        exit_with_error(program, message)


def run_command(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` inside `reporting_errors` and returns its result."""
    with reporting_errors(program):
        return function()


def run_stoppable(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` inside `reporting_errors` and `signals.StopSignals`, so that signals stop it at a safe point."""
    with reporting_errors(program), signals.StopSignals():
        return function()


def describe_environment_error(error: Exception) -> str | None:
    """Returns a message with a remedy for file, memory and connection errors, or None for any other error."""
    # Do not import TensorFlow here: that takes several seconds.
    tensorflow = sys.modules.get("tensorflow")
    tensorflow_errors = (
        tuple(getattr(tensorflow.errors, name) for name in _ENVIRONMENT_ERRORS)
        if tensorflow
        else ()
    )
    if not isinstance(error, (OSError, MemoryError, *tensorflow_errors)):
        return None
    path = getattr(error, "filename", None)
    # Remove the operation names at the start of TensorFlow's messages.
    line = re.sub(r"^(\{\{.*?\}\} *)+", "", first_line(error))
    reason = f"{path}: {error.strerror}" if path is not None and error.strerror else line
    if getattr(error, "errno", None) in _NO_SPACE or "No space left" in str(error):
        reason = reason if "No space left" in reason else f"No space left on device ({reason})"
        return f"{reason}. Free some space, then run the same command again."
    if (
        isinstance(error, FileNotFoundError)
        and path is None
        and "temporary directory" in str(error)
    ):
        return "TMPDIR: no temporary directory is writable. Set TMPDIR to a writable directory."
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        return (
            f"out of memory or disk space ({reason}). Free memory or disk space, then run the same"
            " command again."
        )
    return f"{reason}. Fix the cause, then run the same command again."
