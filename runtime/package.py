"""The installed package `simclr_tf2`: the project's directory, with its commands and `load`.

In the installed package, this file is `simclr_tf2/__init__.py`. The project's modules keep their
names, such as `model` and `evaluate`. They are on `sys.path` only in the processes of its commands
and while `load` imports them, so that packages with the same names can be used with this one.
"""

import importlib
import os
import runpy
import sys
from typing import Any

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
_MODULES = {}  # the project's modules that `load` has imported


def main() -> None:
    """Runs the command that is named after the script: simclr, simclr-embed, simclr-paper-tables and others."""
    name = os.path.basename(sys.argv[0]).removeprefix("simclr").removeprefix("-")
    inference = name in ("embed", "predict", "gallery")
    module = "inference" if inference else name.replace("-", ".") or "run"
    sys.argv[1:1] = [name] * inference
    sys.path.insert(0, _DIRECTORY)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def load(path: str, trainable: bool = False) -> Any:
    """Loads an encoder; see `inference.load`."""
    names = {entry.partition(".")[0] for entry in os.listdir(_DIRECTORY)}

    def take_modules():
        keys = [key for key in sys.modules if key.partition(".")[0] in names]
        return {key: sys.modules.pop(key) for key in keys}

    others = take_modules()
    sys.modules.update(_MODULES)
    sys.path.insert(0, _DIRECTORY)
    try:
        return importlib.import_module("inference").load(path, trainable)
    finally:
        sys.path.remove(_DIRECTORY)
        _MODULES.update(take_modules())
        sys.modules.update(others)
