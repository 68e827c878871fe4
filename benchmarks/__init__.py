"""Benchmarks against baselines. One program, `python -m benchmarks NAME`, prints JSON lines; see README.md.

This module imports nothing, because the baselines in PyTorch run in environments without the
required packages.
"""
