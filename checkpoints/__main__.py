"""Runs `python -m checkpoints` (see `checkpoints.cli`)."""

from checkpoints import cli

if __name__ == "__main__":
    cli.main()
