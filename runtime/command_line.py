"""Code shared by all commands: argument parsing, error messages and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from runtime import console, signals, version
from runtime.errors import STOPPED_STATUS, Stopped, UserError, first_line

_T = TypeVar("_T")
# Exception class -> remedy. Classes are compared by name, because importing TensorFlow takes several
# seconds. TensorFlow raises ResourceExhaustedError for a full disk, too.
_REMEDIES = {
    "MemoryError": "Use smaller batches",
    "ResourceExhaustedError": "Free disk space or use smaller batches (on GPUs, setting"
    " TF_GPU_ALLOCATOR=cuda_malloc_async may also help)",
    "DataLossError": "Restore the file from a copy",
    "OSError": "Fix the cause",
    "OpError": "Fix the cause",
}
_POSSIBLE_BUGS = {"InvalidArgumentError", "InternalError"}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_with_error(program: str, message: object, status: int = UserError.status) -> NoReturn:
    """Prints a one-line error to standard error and exits with `status`."""
    print(console.printable(f"{program}: error: {' '.join(str(message).split())}"), file=sys.stderr)
    sys.exit(status)


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser with --version, which prints errors on a single line."""

    def __init__(self, **kwargs: Any):
        # Descriptions contain example commands.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        # Git is called only if its revision is printed.
        text = version.describe() if "--version" in sys.argv else ""
        self.add_argument("--version", action="version", version=text, help="print the versions")

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        exit_with_error(self.prog, f"{message}. See --help.")


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Returns a function that parses a number of type `kind` in [low, high], for use as `type` in argparse."""

    def parse(text):
        # A text that is not a number gives the same error as a number outside the range.
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        name = "an integer" if kind is int else "a number"
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"must be {name} {limits}; got {text}")

    return parse


def add_network_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for settings of a network that its weights may not record."""
    parser.add_argument(
        "--image_size",
        type=int,
        help="image size in pixels (default: the image size of the run, or 224 if it is unknown)",
    )
    parser.add_argument(
        "--ft_proj_selector",
        type=int,
        help=(
            "input of the classifier: 0 for the encoder's output, N for the output of the Nth layer"
            " of the projection head (default: as recorded or found in the weights, or 0)"
        ),
    )


def network_settings(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the settings from `add_network_settings` that are given."""
    names = ("image_size", "ft_proj_selector")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


@contextlib.contextmanager
def reporting_errors(program: str) -> Iterator[None]:
    """Returns a context manager that converts errors and signals to a one-line message and an exit status.

    See `describe` for the exit status of an error. Errors that may be bugs in the program also print
    a traceback. `errors.Stopped` exits with `errors.STOPPED_STATUS`.
    """
    console.set_up()
    try:
        yield
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
        status, message = describe(error)
        if status == 1:
            raise
        if type(error).__name__ in _POSSIBLE_BUGS:
            traceback.print_exc()
        exit_with_error(program, message, status)


def describe(error: Exception) -> tuple[int, str]:
    """Maps an exception to an exit status and a one-line message.

    The status is the error's own status for a `UserError`; `errors.STOPPED_STATUS` if another worker
    was lost; 2 for all other errors of the operating system or TensorFlow; and 1 for any other
    exception, which indicates a bug in the program.
    """
    if isinstance(error, UserError):
        return error.status, str(error)
    classes = [error_class.__name__ for error_class in type(error).__mro__]
    remedy = next(filter(None, map(_REMEDIES.get, classes)), None)
    if isinstance(error, OSError) and error.filename and error.strerror:
        reason = f"{error.filename}: {error.strerror}"
    else:
        reason = first_line(error)
    if remedy is None:
        return 1, reason
    if "OpError" in classes:
        from runtime import workers  # Requires TensorFlow, which has raised the error.

        if workers.is_lost_worker(error):
            return STOPPED_STATUS, (
                f"another worker has stopped or is unreachable ({reason}). Check its output; the"
                " same command on all workers resumes."
            )
    if getattr(error, "errno", None) in _NO_SPACE:
        remedy = "Free disk space"
    return 2, f"{reason}. {remedy}; the same command resumes."


def run_command(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` inside `reporting_errors` and returns its result."""
    with reporting_errors(program):
        return function()


def run_stoppable(program: str, function: Callable[[], _T]) -> _T:
    """Calls `function` inside `reporting_errors` and `signals.StopSignals`, so that signals stop it at a safe point."""
    with reporting_errors(program), signals.StopSignals():
        return function()
