"""Lists the programs of this package."""

import ast
import pathlib

if __name__ == "__main__":
    for name in ("tables", "figures", "probes"):
        text = pathlib.Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        summary = ast.get_docstring(ast.parse(text)).partition("\n")[0]
        print(f"python -m paper.{name:8} {summary}")
