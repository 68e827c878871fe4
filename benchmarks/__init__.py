"""Measurements of the project beside a yardstick: each prints JSON lines; see README.md."""

from runtime import tensorflow_startup

tensorflow_startup.set_environment()
