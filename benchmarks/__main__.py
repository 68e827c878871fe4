"""Runs `python -m benchmarks` (see `benchmarks.cli`)."""

from benchmarks import cli

if __name__ == "__main__":
    cli.main()
