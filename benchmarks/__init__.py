"""Benchmarks against baselines. One program, `python -m benchmarks NAME`, prints JSON lines; see README.md."""
