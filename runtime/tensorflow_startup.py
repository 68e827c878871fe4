"""Import of TensorFlow without its messages, and with the oneDNN kernels."""

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
    """Returns a context manager for importing TensorFlow that shows native error output only if the body fails.

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
    """Sets the environment variables that TensorFlow reads when it is imported, unless they are set.

    On CPUs without AVX512, TensorFlow does not enable the oneDNN kernels by default, but a ResNet's training step is
    several times faster with them on such CPUs, too.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _silence_libraries():
    """Turns off the libraries' warnings about deprecations and retracing, which users cannot fix."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets")


def load(module: str) -> types.ModuleType:
    """Imports a module inside `loading_tensorflow`, and returns it."""
    with loading_tensorflow():
        return importlib.import_module(module)
