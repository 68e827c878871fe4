"""Checks that all arguments of public functions and methods have type hints. Return types are checked by ruff."""

import ast
import pathlib

import pytest

from support import ROOT

PACKAGES = (
    "augmentation",
    "checkpoints",
    "export",
    "inference",
    "large_batch",
    "paper",
    "probing",
    "runtime",
    "sources",
    "transfer",
)
MODULES = [*ROOT.glob("*.py"), *(path for name in PACKAGES for path in (ROOT / name).glob("*.py"))]


def public_functions(body):
    """Yields the public functions in a module and the methods of its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef) and (
            not node.name.startswith("_") or node.name == "__init__"
        ):
            yield node


@pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(pathlib.Path(path).relative_to(ROOT))
)
def test_arguments_of_public_functions_have_type_hints(path):
    for function in public_functions(ast.parse(path.read_text()).body):
        arguments = function.args
        missing = [
            argument.arg
            for argument in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *filter(None, (arguments.vararg, arguments.kwarg)),
            )
            if argument.annotation is None and argument.arg not in ("self", "cls")
        ]
        assert not missing, f"{function.name} (line {function.lineno}): {missing}"
