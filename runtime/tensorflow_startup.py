"""Imports TensorFlow with oneDNN kernels enabled and log messages disabled."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import absl.logging

_LOADED = b"loaded"
# Copies standard input to standard error, unless it ends with `_LOADED`.
_KEEPER = f"""
import sys
text = sys.stdin.buffer.read()
if not text.endswith({_LOADED!r}):
    sys.stderr.buffer.write(b"TensorFlow was not loaded. It printed:\\n" + (text or b"nothing\\n"))
"""


def start() -> None:
    """Imports TensorFlow and disables its log messages, and warnings of other libraries that users cannot act on.

    Call this function before the first import of a module that imports TensorFlow.
    """
    set_environment()
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # names the signal if TensorFlow kills the process
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
    its log level. A child process keeps them, because this process may be killed by a signal, such
    as SIGABRT after a failed check in a library. The child ends when this process closes the pipe.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    # In its own session, the child does not receive the Ctrl-C of a terminal.
    command = [sys.executable, "-I", "-S", "-c", _KEEPER]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.dup2(keeper.stdin.fileno(), 2)
    outcome = _LOADED
    try:
        yield
    except Exception:
        outcome = b""
        raise
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        keeper.communicate(outcome)


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
