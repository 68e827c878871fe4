"""Functions and data that several tests share."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
