"""Runs `python -m export` (see `export.cli`)."""

from export import cli

cli.main()
