"""Versions of the program and of its environment."""

import contextlib
import importlib.metadata
import platform
import subprocess

from runtime.paths import ROOT

VERSION = "1.0.0"


def revision() -> str:
    """Returns the Git revision. A trailing + indicates uncommitted changes. Empty outside a repository."""
    with contextlib.suppress(OSError):  # Git is not installed.
        # A repository that contains the directory does not count.
        return subprocess.run(
            ["git", "--git-dir=.git", "describe", "--always", "--abbrev=10", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.strip()
    return ""


def describe() -> str:
    """Returns the versions of the program, tf-keras (the same as that of TensorFlow) and Python in one line."""
    return ", ".join(
        [
            f"simclr-tf2 {VERSION} {revision()}".strip(),
            f"tf-keras {importlib.metadata.version('tf-keras')}",
            f"Python {platform.python_version()}",
        ]
    )
