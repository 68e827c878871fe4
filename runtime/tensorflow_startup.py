"""Loading of TensorFlow without its messages, and with the kernels of oneDNN."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile

from runtime import command_line, console


@contextlib.contextmanager
def loading_tensorflow():
    """A context to import TensorFlow in: what native code writes to standard error is shown only if the body fails.

    Without a temporary directory, as in a read-only container, it is shown at once.

    Sets TF_ENABLE_ONEDNN_OPTS unless it is set: without AVX512 TensorFlow leaves out the kernels of oneDNN, with which
    a ResNet's step is several times faster there, too.
    """
    console.set_up()
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chatter = None
    with contextlib.suppress(OSError):
        chatter = tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
    if chatter is None:
        yield
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


def load_quietly(module):
    """Imports a module by name in `loading_tensorflow`; errors end the program as in `run_command`."""
    def load():
        with loading_tensorflow():
            importlib.import_module(module)  # TensorFlow's needs a temporary directory, for one.

    command_line.run_command(os.path.basename(sys.argv[0]), load)
