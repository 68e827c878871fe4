"""Runs `python -m export` (see `export.cli`)."""

from export import cli

if __name__ == "__main__":
    cli.main()
