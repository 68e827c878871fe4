"""Imports TensorFlow with oneDNN kernels enabled and log messages disabled."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator

import absl.logging


def start() -> None:
    """Imports TensorFlow and disables its log messages, and warnings of other libraries that users cannot act on.

    Call this function before the first import of a module that imports TensorFlow.
    """
    set_environment()
    if "tensorflow" not in sys.modules:
        with _showing_output_of_failures():
            import tensorflow  # noqa: F401
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets|PIL")


@contextlib.contextmanager
def _showing_output_of_failures() -> Iterator[None]:
    """Returns a context manager that prints what TensorFlow writes to standard error only if it cannot be loaded.

    TensorFlow 2.21 prints five lines while its libraries are loaded, before it reads any setting of
    its log level.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    faulthandler.enable(stderr)  # names the signal if a library kills the process
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except Exception:
            printed.seek(0)
            os.write(stderr, b"TensorFlow was not loaded. It printed:\n" + printed.read())
            raise
        finally:
            os.dup2(stderr, 2)
            faulthandler.enable(2)
            os.close(stderr)


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
    # Otherwise, the input pipeline delays the threads that start kernels on a GPU.
    os.environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")


def load(module: str) -> types.ModuleType:
    """Calls `start`, imports a module and returns it. On a terminal, announces this on stderr."""
    if "tensorflow" not in sys.modules and sys.stderr.isatty():
        print("loading TensorFlow", file=sys.stderr, flush=True)
    start()
    return importlib.import_module(module)
