"""Runs `python -m inference` (see `inference.cli`)."""

from inference import cli

if __name__ == "__main__":
    cli.main()
