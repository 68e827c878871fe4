"""Imports TensorFlow with oneDNN kernels enabled and log messages disabled."""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings

import absl.logging


def start() -> None:
    """Imports TensorFlow and disables its log messages, and warnings of other libraries that users cannot act on.

    Call this function before the first import of a module that imports TensorFlow.
    """
    set_environment()
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null_device:
        os.dup2(null_device.fileno(), 2)
    try:
        # No environment variable disables what TensorFlow 2.21 prints while its libraries are loaded.
        import tensorflow as tf
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    tf.get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets|PIL")


def set_environment() -> None:
    """Sets the environment variables that TensorFlow reads during import, unless they are already set.

    TensorFlow does not enable oneDNN kernels by default on CPUs without AVX512, although they make
    a ResNet's training step several times faster on these CPUs.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Otherwise, the first process would reserve all memory of a GPU, and evaluation alongside
    # training would fail.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def load(module: str) -> types.ModuleType:
    """Calls `start`, imports a module and returns it. On a terminal, announces this on stderr."""
    if "tensorflow" not in sys.modules and sys.stderr.isatty():
        print("loading TensorFlow", file=sys.stderr, flush=True)
    start()
    return importlib.import_module(module)
