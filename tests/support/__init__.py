"""Functions and data shared by test modules."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
