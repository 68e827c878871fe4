"""Runs `python -m transfer` (see `transfer.cli`)."""

from transfer import cli

cli.main()
