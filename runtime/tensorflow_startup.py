"""Loading of TensorFlow without its messages, and with the kernels of oneDNN."""

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
    """Returns a context to import TensorFlow in: standard error of native code is shown only if the body fails.

    Without a temporary directory, as in a read-only container, it is shown at once.
    """
    console.set_up()
    set_environment()
    chatter = None
    with contextlib.suppress(OSError):
        chatter = tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
    if chatter is None:
        yield
        _silence_libraries()
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with chatter:
        os.dup2(chatter.fileno(), 2)
        try:
            yield
        except BaseException:
            chatter.seek(0)
            with contextlib.suppress(OSError):
                os.write(saved, chatter.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            _silence_libraries()


def set_environment() -> None:
    """Sets the environment variables that TensorFlow reads when it is imported, unless they are set.

    Without AVX512, TensorFlow does not enable the kernels of oneDNN, with which a step of a ResNet is several times
    faster there, too.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _silence_libraries():
    """Turns off warnings about deprecations and retracing inside the libraries, on which users cannot act."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].get_logger().setLevel("ERROR")
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets")


def load(module: str) -> types.ModuleType:
    """Imports a module by name in `loading_tensorflow`, and returns it."""
    with loading_tensorflow():
        return importlib.import_module(module)
