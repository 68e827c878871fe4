"""Benchmarks against baselines. Each program prints JSON lines; see README.md."""

from runtime import tensorflow_startup

tensorflow_startup.set_environment()
