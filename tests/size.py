"""Counts the code per area of a checkout: lines, lines with code, tokens and statements.

    python tests/size.py [CHECKOUT]

Tokens are names, literals and operators, except for brackets, commas, colons and dots, so the counts
do not depend on the formatting. Docstrings, comments and type annotations are not counted. An
f-string is one token in every version of Python.
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import subprocess
import sys
import tokenize

_TOKENS = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
_PUNCTUATION = {*"()[]{},:.", "->"}
# Python 3.12 and later divide f-strings into several tokens.
_BEGIN, _END = (getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_END"))


def _docstring_lines(tree):
    """Returns the numbers of all lines in docstrings."""
    numbers = set()
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            numbers.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return numbers


def _annotation_ranges(tree, text):
    """Returns the first and the last position (line, column) of all annotations."""
    lines = text.splitlines(keepends=True)

    def column(line, byte):  # The syntax tree counts bytes, but tokens count characters.
        return line, len(lines[line - 1].encode()[:byte].decode())

    nodes = [
        getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")
    ]
    return [
        (column(node.lineno, node.col_offset), column(node.end_lineno, node.end_col_offset))
        for node in nodes
        if node is not None
    ]


def count(text: str) -> tuple[int, int, int, int]:
    """Returns the numbers of lines, lines with code, tokens and statements of a module."""
    tree = ast.parse(text)
    docstrings, annotations = _docstring_lines(tree), _annotation_ranges(tree, text)
    code_lines, num_tokens, depth = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_first = depth == 0  # Tokens within an f-string belong to its first token.
        if token.type in (*_TOKENS, _BEGIN) and token.start[0] not in docstrings:
            code_lines.update(range(token.start[0], token.end[0] + 1))
            num_tokens += (
                is_first
                and not (token.type == tokenize.OP and token.string in _PUNCTUATION)
                and not any(begin <= token.start < end for begin, end in annotations)
            )
        depth += (token.type == _BEGIN) - (token.type == _END)
    num_statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return len(text.splitlines()), len(code_lines), num_tokens, num_statements


def count_areas(root: pathlib.Path) -> dict[str, list[int]]:
    """Returns `count`, summed per top-level module or folder and over everything outside tests."""
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "*.py"], capture_output=True, text=True, check=True
    )
    sums = collections.defaultdict(lambda: [0, 0, 0, 0])
    for name in listing.stdout.split():
        counts = count((root / name).read_text(encoding="utf-8"))
        area = name.split("/")[0]
        for key in (area,) if area == "tests" else (area, "OUTSIDE TESTS"):
            sums[key] = [total + value for total, value in zip(sums[key], counts)]
    return dict(sums)


if __name__ == "__main__":
    print(f"{'area':20s} {'lines':>6s} {'code':>6s} {'tokens':>7s} {'statements':>10s}")
    for area, row in sorted(count_areas(pathlib.Path(*sys.argv[1:] or ["."])).items()):
        print("{:20s} {:6d} {:6d} {:7d} {:10d}".format(area, *row))
