"""Exceptions that end a program with a one-line message, and their exit statuses."""

from __future__ import annotations

import re


class UserError(Exception):
    """An error that the user can fix. The message is one line with the flag, the problem and a remedy."""

    status = 2  # exit status of the program

    def __init__(self, text: object):
        super().__init__(" ".join(str(text).splitlines()))


class TrainingDiverged(UserError):
    """Raised if a loss, gradient or weight is NaN or Inf.

    Programs that launch training runs recognize this error by its exit status.
    """

    status = 3


# Matches lines of a TensorFlow error message that describe the location of the error in the graph,
# not the cause.
_LOCATION = re.compile(
    r"\s|Graph execution error:|Detected at node |<stack traces unavailable>|Node: |Hint: |"
    r"\d+ root error\(s\) found\.|$"
)
_ROOT_ERROR = re.compile(r"^ *\(\d+\) [A-Z_]+: *", re.MULTILINE)
_MAX_CHARACTERS = 400
_LOCATION_IN_LINE = re.compile(
    r"\{\{\w+ .*?\}\} *| *\[Op:.*$|"
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+: "
)


def first_line(error: BaseException) -> str:
    """Returns one line that states the cause of an error.

    For most errors, the result is the first line of the message. For TensorFlow errors, the
    location in the graph is omitted, and only the first root error is used. For chained errors
    (`raise ... from`), the last cause is appended unless the line already contains it. Long lines
    are shortened in the middle, because nested messages end with the cause.
    """
    line, cause = _cause_line(error), error
    if len(line) > _MAX_CHARACTERS:
        line = f"{line[: _MAX_CHARACTERS // 2]} ... {line[-_MAX_CHARACTERS // 2 :]}"
    while cause.__cause__ is not None:
        cause = cause.__cause__
    last_line = _cause_line(cause)
    return line if last_line in line or cause is error else f"{line}: {last_line}"


def _cause_line(error: BaseException) -> str:
    lines = _ROOT_ERROR.sub("", str(error).strip()).splitlines()
    lines = [
        _LOCATION_IN_LINE.sub("", line.strip()) for line in lines if not _LOCATION.match(line)
    ] + lines
    return next(filter(None, lines), type(error).__name__)


class JobFailed(UserError):
    """Raised if a job ends with an error. `job_status` is the exit status, or -n if signal n killed the job."""

    def __init__(self, text: str, job_status: int):
        super().__init__(text)
        self.job_status = job_status


STOPPED_STATUS = 75  # exit status of a stopped run that can be resumed: EX_TEMPFAIL from sysexits.h


class Stopped(BaseException):
    """A request to stop the program. The message reports what was saved.

    Like KeyboardInterrupt, this class is not an `Exception`, because Keras and AutoGraph would wrap
    an `Exception` that is raised inside them.

    Attributes:
      abandons_threads: whether to exit without waiting for library threads, such as download
        threads.
    """

    abandons_threads = False
