"""Utilities that are not specific to SimCLR: errors, console, devices, workers, signals, processes and files."""

import importlib.util
import sys

# All programs import this package before any package that may be missing.
for _name in ("absl", "numpy", "tensorflow", "tf_keras", "tqdm"):
    if importlib.util.find_spec(_name) is None:
        print(
            f"error: the Python package {_name} is not installed. Activate the environment"
            " (`. .venv/bin/activate`), or create it first (`make install`).",
            file=sys.stderr,
        )
        sys.exit(2)
