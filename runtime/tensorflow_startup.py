"""Imports TensorFlow with oneDNN kernels enabled and log messages disabled."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator

import absl.logging

from runtime import console


@contextlib.contextmanager
def loading_tensorflow() -> Iterator[None]:
    """Returns a context manager for importing TensorFlow, whose messages on stderr are shown only if the import fails.

    Without a temporary directory, as in a read-only container, the output is shown immediately.
    """
    console.set_up()
    set_environment()
    captured = None
    with contextlib.suppress(OSError):
        captured = tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
    if captured is None:
        yield
        _silence_libraries()
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            with contextlib.suppress(OSError):
                os.write(saved, captured.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            _silence_libraries()


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


def _silence_libraries():
    """Disables library warnings about deprecations and retracing, which users cannot fix."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets|PIL")


def load(module: str) -> types.ModuleType:
    """Imports a module inside `loading_tensorflow` and returns it. On a terminal, announces this on stderr."""
    if "tensorflow" not in sys.modules and sys.stderr.isatty():
        print("loading TensorFlow", file=sys.stderr, flush=True)
    with loading_tensorflow():
        return importlib.import_module(module)
