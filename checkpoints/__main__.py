"""Runs `python -m checkpoints` (see `checkpoints.cli`)."""

from checkpoints import cli

cli.main()
