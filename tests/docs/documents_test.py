"""Checks the commands and the Python code in the documentation without executing them.

The arguments of each command are parsed with the parser of its program. `make docs-check` executes
all examples except for those that `documents.NOT_EXECUTED` lists with a reason.
"""

import importlib
import re

import pytest
from packaging import requirements

import config as config_lib
from runtime import command_line
from runtime.errors import UserError
from support import ROOT, documents

EXAMPLES = [
    example for document in documents.DOCUMENTS for example in documents.find_examples(document)
]
COMMANDS = [example for example in EXAMPLES if not example.is_python]
TARGETS = re.findall(r"^([a-z][\w.-]*):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


TEXT = """
Text, `python run.py`.

    cd simclr && make quickstart

    training: 2 steps, make test

    python run.py --mode=eval \\
      --seed=1    # evaluates
    for i in 1 2; do A='x y' pip list; done
```python
import run
run.main()
```
```bash
python -m export
grep python
```
"""


def test_commands_and_code_are_found():
    found = documents.find_examples("README.md", TEXT)
    assert [(example.line, example.text, example.is_python) for example in found] == [
        (4, "cd simclr && make quickstart", False),
        (8, "python run.py --mode=eval --seed=1", False),
        (10, "for i in 1 2; do A='x y' pip list; done", False),
        (12, "import run\nrun.main()", True),
        (16, "python -m export", False),
    ]
    assert documents.arguments("A=1 make a b && python c > d") == ["make", "a", "b"]
    assert documents.arguments("python {a,b}/c > d") == ["python", "a/c", "b/c"]
    assert len(COMMANDS) > 60 and len(EXAMPLES) - len(COMMANDS) > 5


def test_tables_of_accuracies_are_computed_from_recorded_rows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, parity, race = documents.find_examples("docs/parity.md")
    for code in (parity, race):
        exec(code.text, {})
        assert f"---|\n{capsys.readouterr().out}\n" in (ROOT / code.document).read_text()


def test_every_example_is_either_executed_or_listed():
    for example in EXAMPLES:
        assert len(example.reasons) <= 1, example
        if not example.reasons and not example.is_python:
            left = documents.placeholders(documents.small_form(example, "model", "data"))
            assert not left, (
                f"{example}: replace {left} in documents.small_form, or list the example in NOT_EXECUTED"
            )
    for document, start in documents.NOT_EXECUTED:
        texts = [example.text for example in EXAMPLES if example.document == document]
        assert any(start in text for text in texts), (document, start)


def parse(words):
    """Parses the arguments of a command with the parser of its program, without executing the program."""
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= set(TARGETS)
    elif words[0] == "pip":
        assert words[1] in ("install", "wheel")
        for flag, word in zip(words[1:], words[2:]):
            if flag in ("-r", "-c"):
                assert (ROOT / word).is_file()
            elif not re.fullmatch(
                "-[rc]|--(upgrade|no-deps|no-index|(find-links|wheel-dir)=wheels)", word
            ):
                requirements.Requirement(word)
    elif words[1] == "-c":
        compile(words[2], "command", "exec")
        config_lib.from_arguments(words[3:])
    elif words[1] == "run.py":
        config_lib.from_arguments(words[2:])
    elif (ROOT / words[2].split(".")[0]).is_dir():
        module = words[2] if "." in words[2] else f"{words[2]}.cli"
        importlib.import_module(module).main(words[3:])
        for word in words:
            if word.startswith("--flags="):
                config_lib.parse_settings(word.removeprefix("--flags="))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_code_and_the_arguments_of_every_command_are_valid(example, monkeypatch):
    if example.is_python:
        compile(example.text, str(example), "exec")
        return
    monkeypatch.chdir(ROOT)  # The paths of recipes are relative.
    for name in ("run_command", "run_stoppable"):
        monkeypatch.setattr(command_line, name, lambda program, work: "")
    text = example.text if example.reasons else documents.small_form(example, "model", "data")
    parse([word for word in documents.arguments(text) if word != "..."])


def test_targets_and_recipes_in_the_text_exist():
    for document in documents.DOCUMENTS:
        text = (ROOT / document).read_text()
        assert "](README.md)" in text or document.endswith("README.md"), document
        assert {*re.findall(r"`make ([\w.-]+)", text)} <= {*TARGETS}, document
        for path in re.findall(r"`(paper/recipes/\w+\.cfg)`", text):
            assert (ROOT / path).is_file()


def test_invalid_arguments_are_detected():
    errors = AssertionError, SystemExit, UserError, requirements.InvalidRequirement
    for command in (
        "python run.py --train_stepz=1",
        "make quickstrat",
        "pip install -r missing.txt",
        "python -m inference embed",
        "python -m paper.tables report --sort",
        "pip install --no-indx numpy",
    ):
        with pytest.raises(errors):
            parse(command.split())
