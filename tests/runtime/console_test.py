"""Console output, and reports of errors and signals by all commands."""

import datetime
import errno
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import tensorflow as tf
from tensorflow.errors import DataLossError, ResourceExhaustedError, UnavailableError

from config import read_command_line
from runtime import command_line, console, progress
from runtime.errors import Stopped, TrainingDiverged, UserError
from support import ROOT
from support.addresses import tf_config


class Terminal(io.StringIO):
    """Terminal that records its output."""

    def isatty(self):
        return True


# With 0 columns, the width is unknown.
@pytest.mark.parametrize("columns, width", [("0", 80), ("120", 120), ("40", 40)])
def test_progress_bar_fits_into_the_terminal(columns, width, monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", columns)
    bar = progress.Progress(start=0, total=4000, batch_size=32)
    bar.update(400, 399 / 4, {"loss": 5.25, "contrast_acc": 0.5, "head_acc": 0.75})
    bar.close()
    last = re.split(r"[\r\n]", terminal.getvalue().strip())[-1]
    assert "400/4000" in last and len(last) <= width
    assert ("loss=5.25, contrast_acc=0.5" in last) == (width > 40)


@pytest.mark.parametrize("seconds_between_lines, expected", [(10.0, []), (0.0, ["4", "6"])])
def test_progress_lines_are_printed_at_intervals_and_at_the_end(
    seconds_between_lines, expected, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "_LINE_SECONDS", seconds_between_lines)
    bar = progress.Progress(start=2, total=10, batch_size=32)
    bar.update(4, 5.0, {"loss": 5.25}, timed=False)  # This time includes compilation.
    bar.update(6, 2.0, {"loss": 5.25})
    bar.update(10, 4.0, {"loss": 5.25})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines] == [f"step {step}" for step in [*expected, "10"]]
    assert lines[-1] == "step 10/10  100%  0:00:00 left  32 images/s  loss 5.250"
    assert not expected or "? left" in lines[0] and "0:00:04 left" in lines[1]


@pytest.mark.parametrize("seconds_per_step, is_long", [(1, False), (10, True)])
def test_the_end_of_a_long_training_is_announced_once(seconds_per_step, is_long, capsys):
    bar = progress.Progress(start=0, total=100, batch_size=32)
    for step in (10, 20, 30):
        bar.update(step, 10 * seconds_per_step, {}, timed=step > 10)
    lines = re.findall(r"expected end of training: (.*) \(in (.*)\)\n", capsys.readouterr().out)
    if is_long:
        ((end, duration),) = lines
        left = datetime.datetime.fromisoformat(end) - datetime.datetime.now()
        assert duration == "0:13:20" and abs(left.total_seconds() - 800) < 90
    else:
        assert lines == []


HOSTILE, ESCAPED = "\x1b[31m\x07\x9b\u202e\udcff\r\t", r"\x1b[31m\x07\x9b\u202e\udcff\r\t"


def test_printed_control_characters_are_escaped(monkeypatch, capsys, fails):
    console.log(f"{HOSTILE}\nnext é")
    assert capsys.readouterr().out == f"{ESCAPED}\nnext é\n"
    assert console.printable_name("a\nb") == r"a\nb"
    message = r"x.py: error: \x1b[31m\x07\x9b\u202e\udcff next é" + "\n"
    fails(message, command_line.exit_with_error, "x.py", f"{HOSTILE}\nnext é")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert list(progress.track([1], f"split {HOSTILE}\n")) == [1]
    assert rf"split {ESCAPED}\n" in terminal.getvalue()


def raises(error):
    def function():
        raise error

    return function


def exit_status(error):
    """Returns the status with which a command exits that raises an error."""
    with pytest.raises(SystemExit) as stop:
        command_line.run_command("x.py", raises(error))
    return stop.value.code


@pytest.mark.parametrize(
    "error, status, message",
    [
        (UserError("--x=1: too small"), 2, "error: --x=1: too small\n"),
        (TrainingDiverged("the loss is NaN"), 3, "error: the loss is NaN\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device. Free disk"),
        (
            OSError(errno.EROFS, "Read-only", "a/\x1b"),
            2,
            r"error: a/\x1b: Read-only. Fix the cause",
        ),
        (MemoryError(), 2, "MemoryError. Use smaller batches; the same command resumes."),
        (
            ResourceExhaustedError(None, None, "{{node X}} a/b; No space left on device\nmore"),
            2,
            "error: a/b; No space left on device. Free disk space or use smaller batches (on",
        ),
        (DataLossError(None, None, "corrupted record at 0"), 2, "at 0. Restore the file"),
        (tf.errors.PermissionDeniedError(None, None, "a/b; Denied"), 2, "a/b; Denied. Fix the"),
        (tf.errors.UnknownError(None, None, "x"), 2, "error: x. Fix the cause; the same command"),
        (Stopped("stopped by SIGTERM: saved"), 75, "stopped by SIGTERM: saved"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_that_users_can_fix_and_signals_are_reported_in_one_line(
    error, status, message, capsys
):
    assert exit_status(error) == status
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert (printed.out.count("\n"), printed.err.count("\n")) == (status == 75, status < 4)


@pytest.mark.parametrize("error_class", [UnavailableError, tf.errors.AbortedError])
@pytest.mark.parametrize("addresses, status", [(["a:1"], 2), (["a:1", "b:1"], 75)])
def test_losing_one_of_several_workers_exits_with_status_75(
    error_class, addresses, status, monkeypatch, capsys
):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": addresses}))
    assert exit_status(error_class(None, None, "lost connection")) == status
    assert ("another worker has stopped" in capsys.readouterr().err) == (status == 75)


@pytest.mark.parametrize("error_class", [tf.errors.InvalidArgumentError, tf.errors.InternalError])
def test_errors_that_may_be_bugs_print_a_traceback_above_the_message(error_class, capsys):
    assert exit_status(error_class(None, None, "x")) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last.startswith("x.py: error: x. Fix the cause;")


def test_other_errors_keep_their_traceback():
    for error_class in (ValueError, AttributeError):
        with pytest.raises(error_class):
            command_line.run_command("x.py", raises(error_class))


def test_loading_tensorflow_prints_nothing():
    program = "import os; from runtime import tensorflow_startup as startup; startup.start(); os.write(2, b'x')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"x")


@pytest.mark.parametrize(
    "code, status, last_words",
    [
        ("os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("raise ImportError('no lib')", 1, "ImportError: no lib"),
    ],
)
def test_failures_to_load_tensorflow_show_what_it_printed(
    code, status, last_words, stub_tensorflow
):
    stub_tensorflow(code)
    command = [sys.executable, ROOT / "run.py", "--dataset=digits"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status and done.stdout == "loading TensorFlow\n"
    assert last_words in done.stderr
    if status == 1:
        title, first, *_ = done.stderr.splitlines()
        assert title.startswith("TensorFlow was not loaded") and first.endswith("reason 1")


# ------------------------------------------------------------------------------------------------- run.py's flags


def test_invalid_flag_files_are_reported_on_one_line(tmp_path, fails):
    def read(argument):
        with command_line.reporting_errors("run.py"):
            read_command_line("", [argument])

    path = tmp_path / "a.cfg"
    for content, message in (
        (b"--image_size=8\n\xff\xfe", "cannot be read as text"),
        (b"--flagfile=none.cfg\n", "No such file"),
        (b"--mode=\x1b[31m\n", r"\x1b[31m"),
    ):
        path.write_bytes(content)
        fails(message, read, f"--flagfile={path}")


# ------------------------------------------------------------------------------------------------- closed streams


PROGRAM = """
import os, sys
from runtime import console
console.set_up()
first = os.open({path!r}, os.O_WRONLY | os.O_CREAT)
os.system("echo from a child; echo from a child >&2")
for _ in range(2000):
    console.log("é" * 99)
print("error " * 2000, file=sys.stderr)
os.write(first, b"work")
sys.exit(3)
"""


def run_program(path, redirection):
    """Runs PROGRAM in a shell with `redirection`. PROGRAM writes to `path`, prints text, and exits with status 3."""
    command = f'"$0" -c "$1" {redirection}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command, sys.executable, PROGRAM.format(path=str(path))],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_program_continues_when_its_output_is_closed(redirection, tmp_path):
    done = run_program(tmp_path / "file", redirection)
    assert done.returncode == 3 and not re.search(b"Traceback|Exception ignored", done.stderr)
    assert (tmp_path / "file").read_bytes() == b"work"  # The file contains no printed output.


def test_characters_missing_from_the_encoding_are_escaped(tmp_path):
    done = run_program(tmp_path / "file", "")
    assert done.returncode == 3 and done.stdout.splitlines()[1] == rb"\xe9" * 99
