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
    "checkpoints",
    "transfer",
    "paper.tables",
    "paper.figures",
    "paper.probes",
]

HELP = """
import runpy, sys
command, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_module(command, run_name="__main__", alter_sys=True)
finally:
    loaded = {"tensorflow", "tf_keras"} & set(sys.modules)
    print(f"loaded: {loaded or None}")
"""


@pytest.mark.parametrize(
    "arguments",
    [*([name] for name in COMMANDS), ["inference", "embed"], ["transfer", "finetune"]],
    ids=" ".join,
)
def test_help_is_printed_without_loading_tensorflow(arguments):
    process = subprocess.run(
        [sys.executable, "-c", HELP, *arguments, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0 and not process.stderr
    assert len(process.stdout.splitlines()) > 5 and process.stdout.endswith("loaded: None\n")


def test_make_help_lists_all_commands_and_targets():
    lines = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
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
    # -S hides the installed packages.
    command = [sys.executable, "-S", *program.split()]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert ".venv/bin/activate" in process.stderr and process.stdout == ""
