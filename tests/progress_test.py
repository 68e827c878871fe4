"""What people see, on a terminal and elsewhere."""

import io
import subprocess
import sys

import progress
from conftest import ROOT


class Terminal(io.StringIO):
    """A terminal that keeps what it shows."""

    def isatty(self):
        return True


METRICS = {"train/contrast_loss": 5.25, "train/contrast_acc": 0.5, "learning_rate": 0.1}


def test_a_terminal_gets_a_bar_even_without_columns(monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "0")
    bar = progress.Progress(start=0, total=4, batch_size=32, log_seconds=1.0)
    bar.update(2, 2.0, METRICS)
    bar.update(4, 2.0, METRICS)
    bar.close()
    shown = terminal.getvalue()
    assert "4/4" in shown and "loss=5.250" in shown and "img/s=32" in shown


def test_elsewhere_there_are_lines_at_intervals_and_at_the_end(capsys):
    bar = progress.Progress(start=2, total=10, batch_size=32, log_seconds=1000.0)
    bar.update(4, 5.0, METRICS, timed=False)
    bar.update(6, 2.0, METRICS)
    assert capsys.readouterr().out == ""
    bar.update(10, 4.0, METRICS)
    line = capsys.readouterr().out
    assert line.startswith("step 10/10  100%") and "32 images/s" in line and "loss 5.250" in line
    assert bar.images_per_second == 32  # the call that compiled does not count


def test_time_left_is_that_of_the_remaining_steps(capsys):
    bar = progress.Progress(start=0, total=100, batch_size=8, log_seconds=1e-9)
    bar.update(10, 20.0, METRICS)
    assert "left 0:03:00" in capsys.readouterr().out


def test_table_lines_up():
    text = progress.table("title", [("a", 1), None, ("longer", "x")])
    assert text.splitlines() == ["-" * 9, "title", "-" * 9, "a       1", "-" * 9, "longer  x", "-" * 9]


def test_work_goes_on_when_nobody_reads():
    code = "import progress, sys\nfor n in range(2000): progress.say('x' * 99)\nsys.stderr.write('all done')"
    done = subprocess.run(f"{sys.executable} -c \"{code}\" | head -n 1", shell=True, cwd=ROOT, text=True,
                          capture_output=True)
    assert done.stdout == "x" * 99 + "\n" and done.stderr == "all done"
