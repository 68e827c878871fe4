"""Command-line behavior: `--help` (without importing TensorFlow) and `make help`."""

import re
import subprocess
import sys

import pytest

from support import ROOT

COMMANDS = [
    "run",
    "export",
    "inference",
    "inference embed",
    "checkpoints",
    "transfer",
    "transfer finetune",
    "paper.tables",
    "paper.figures",
    "paper.probes",
]


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


HELP = """
import runpy, sys
for command in sys.argv[1:]:
    program, *sys.argv[1:] = *command.split(), "--help"
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        loaded = {"tensorflow", "tf_keras"} & set(sys.modules)
        print(f"{command}: status {end.code or 0}, loaded {loaded or None}", end="<end>")
"""


def test_help_is_printed_without_loading_tensorflow():
    process = run(sys.executable, "-c", HELP, *COMMANDS)
    *printed, rest = process.stdout.split("<end>")
    assert process.returncode == 0 and not process.stderr + rest
    for command, text in zip(COMMANDS, printed, strict=True):
        *lines, last = text.splitlines()
        assert len(lines) > 5 and last == f"{command}: status 0, loaded None"
    assert "--linear_head_learning_rate" in printed[0]


def test_make_help_lists_all_commands_and_targets():
    lines = run("make", "help").stdout.splitlines()
    programs = {path.parent.name for path in ROOT.glob("*/__main__.py")} - {"paper"}
    programs |= {
        f"paper.{path.stem}"
        for path in ROOT.glob("paper/[!_]*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    listed = [line.split("  ") for line in lines if line.startswith("  ")]
    assert {words[1].strip() for words in listed} == {
        "python run.py",
        *(f"python -m {program}" for program in programs),
        *(f"make {target}" for target in targets),
    }
    assert all(words[-1].strip() for words in listed)


@pytest.mark.parametrize(
    "program", ["run.py", "-m export", "-m inference", "-m benchmarks", "-m paper.tables"]
)
def test_missing_packages_give_one_line(program):
    process = run(sys.executable, "-S", *program.split())  # -S hides the installed packages.
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert ".venv/bin/activate" in process.stderr and process.stdout == ""
