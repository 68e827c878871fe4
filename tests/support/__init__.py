"""Functions and data shared by several test modules."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
