"""Benchmarks against baselines. One program, `python -m benchmarks NAME`, prints JSON lines; see README.md."""

import runtime as runtime  # Checks that the dependencies are installed.
