"""Runs `make quickstart` and compares its table with docs/install.md.

    .venv/bin/python tests/quickstart.py

The rows must be the same. Accuracies may differ by `_TOLERANCE`, because they depend on the
processor and the TensorFlow version. In addition, the frozen encoder must be better than the
untrained encoder and raw pixels in every row. Exits with status 1 if a comparison fails.
"""

import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TOLERANCE = 0.05
_ROW = re.compile(r"^ *(\w.*?) {2,}(\d[\d.]*)(?: \[.*\])?$", re.MULTILINE)
_ENCODER = "frozen encoder"


def read_rows(text: str) -> dict[str, float]:
    """Returns the numeric rows of the quickstart's table as a dict that maps descriptions to values."""
    rows = {name: float(value) for name, value in _ROW.findall(text)}
    rows.pop("images/s", None)
    return rows


def find_differences(rows: dict[str, float], documented: dict[str, float]) -> list[str]:
    """Returns one line for each difference, and for each baseline that the encoder does not exceed."""
    lines = [
        f"{name}: {rows.get(name)} instead of {documented.get(name)}"
        for name in {**documented, **rows}
        if name not in rows
        or name not in documented
        or abs(rows[name] - documented[name]) > _TOLERANCE
    ]
    encoder_rows = [name for name in rows if name.endswith(_ENCODER)]
    if not encoder_rows:
        lines.append(f"no row for the {_ENCODER}")
    return lines + [
        f"{name}: {rows[name]} is not better than {baseline}: {rows[baseline]}"
        for name in encoder_rows
        for baseline in (
            name.replace(_ENCODER, other) for other in ("untrained encoder", "raw pixels")
        )
        if rows[name] <= rows[baseline]
    ]


def main():
    """Runs the quickstart and exits with status 1 if its table differs from the documentation."""
    process = subprocess.Popen(["make", "quickstart"], cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    output = []
    for line in process.stdout:
        print(line, end="", flush=True)
        output.append(line)
    if process.wait():
        sys.exit(process.returncode)
    if any(line.startswith("resumed at step") for line in output):
        sys.exit(
            "The quickstart was executed before. Remove its run directory, and run this program"
            " again."
        )
    differences = find_differences(
        read_rows("".join(output)), read_rows((_ROOT / "docs/install.md").read_text())
    )
    print(
        "\n".join(["differences from docs/install.md:", *differences])
        if differences
        else "the table matches docs/install.md"
    )
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
