"""Runs `python -m transfer` (see `transfer.cli`)."""

from transfer import cli

if __name__ == "__main__":
    cli.main()
