"""Checks that all arguments of functions have type hints. Ruff checks public return types, and mypy all hints."""

import ast
import subprocess

from support import ROOT


def test_arguments_have_type_hints():
    command = ["git", "ls-files", "*.py", ":!tests"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    missing = []
    for path in listing.stdout.split():
        nodes = ast.parse((ROOT / path).read_text()).body
        nodes += [item for node in nodes if isinstance(node, ast.ClassDef) for item in node.body]
        for node in nodes:
            arguments = node.args.args + node.args.kwonlyargs if hasattr(node, "args") else []
            missing += [
                f"{path}:{argument.lineno}: {argument.arg}"
                for argument in arguments
                if argument.annotation is None and argument.arg not in ("self", "cls")
            ]
    assert "run.py" in listing.stdout and not missing
