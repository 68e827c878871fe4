"""Exceptions that end a program with one line, and the exit status of each."""

from __future__ import annotations

import re


class UserError(Exception):
    """An error that the user can fix. Its text is one line that names the flag and the remedy."""

    status = 2  # exit status of the program

    def __init__(self, text: object):
        super().__init__(" ".join(str(text).splitlines()))


class TrainingDiverged(UserError):
    """A loss, a gradient or a weight is NaN or infinite. Programs that start trainings check the exit status."""

    status = 3


# Lines of TensorFlow's errors that say where in the graph an error occurred, rather than which.
_LOCATION = re.compile(r"\s|Graph execution error:|Detected at node |<stack traces unavailable>|Node: |Hint: |"
                       r"\d+ root error\(s\) found\.|$")
_ROOT_ERROR = re.compile(r"^ *\(\d+\) [A-Z_]+: *", re.MULTILINE)
_LOCATION_IN_LINE = re.compile(r"\{\{function_node .*?\}\} *| *\[Op:.*$|"
                               r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")


def first_line(error: BaseException) -> str:
    """Returns the line of an error's text that says what is wrong, at most 160 characters.

    For most errors it is the first line. TensorFlow's errors begin with the place in the graph, which is left out; of
    several root errors the first counts.
    """
    lines = _ROOT_ERROR.sub("", str(error).strip()).splitlines()
    lines = [_LOCATION_IN_LINE.sub("", line.strip()) for line in lines if not _LOCATION.match(line)] + lines
    return next((line for line in lines if line), type(error).__name__)[:160]


class JobFailed(UserError):
    """A job that ended with an error. `job_status` is its exit status; -n: it was killed by signal n."""

    def __init__(self, text: str, job_status: int):
        super().__init__(text)
        self.job_status = job_status


STOPPED_STATUS = 75  # exit status of a run that was stopped and can be continued: EX_TEMPFAIL of sysexits.h


class Stopped(BaseException):
    """A request to stop the program. Its text reports what was saved.

    Like KeyboardInterrupt it is not an `Exception`: it may be raised anywhere, and Keras and autograph wrap exceptions.
    """
