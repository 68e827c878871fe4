"""Runs `python -m benchmarks` (see `benchmarks.cli`)."""

import runtime as runtime  # Checks that the dependencies are installed.
from benchmarks import cli

if __name__ == "__main__":
    cli.main()
