"""The restart loop from docs/reliability.md, run in sh with a fake `python` that exits with the given statuses."""

import pathlib
import subprocess

import pytest

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def documented_loop():
    """Returns the indented block of the document that starts with `trap`."""
    lines = DOCUMENT.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("    trap "))
    last = next(index for index in range(first, len(lines)) if not lines[index].startswith("    "))
    return "\n".join(lines[first:last])


def run_loop(directory, statuses):
    """Runs the loop. Returns the exit status of the loop and the number of times that it started `python`.

    The fake `python` exits with each of `statuses` in turn, and then with status 99.
    """
    (directory / "statuses").write_text("".join(f"{status}\n" for status in [*statuses, 99]))
    (directory / "python").write_text(
        "#!/bin/sh\necho started >> log\nstatus=$(head -n 1 statuses)\n"
        "sed -i 1d statuses\nexit $status\n"
    )
    (directory / "sleep").write_text("#!/bin/sh\n")
    for name in ("python", "sleep"):
        (directory / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", documented_loop()],
        cwd=directory,
        timeout=20,
        env={"PATH": f"{directory}:/usr/bin:/bin"},
    )
    return done.returncode, len((directory / "log").read_text().splitlines())


@pytest.mark.parametrize(
    "statuses",
    [
        *([status, status, 0] for status in (75, 134, 137, 139, 143)),
        *([status] for status in (0, 1, 2, 3, 126, 127, 130)),
    ],
)
def test_loop_restarts_only_after_retryable_statuses(statuses, tmp_path):
    assert run_loop(tmp_path, statuses) == (statuses[-1], len(statuses))


def test_loop_stops_if_python_is_missing(tmp_path):
    done = subprocess.run(
        ["/bin/sh", "-c", documented_loop()],
        cwd=tmp_path,
        timeout=20,
        env={"PATH": str(tmp_path)},
        capture_output=True,
    )
    assert done.returncode == 127
