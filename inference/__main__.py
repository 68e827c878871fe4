"""Runs `python -m inference` (see `inference.cli`)."""

from inference import cli

cli.main()
