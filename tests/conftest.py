"""Shared fixtures and setup: import paths, two logical CPU devices and double precision."""

import gc
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile

# The matrices in the tests are small. With more BLAS threads, concurrent test processes would slow
# each other down.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Results of image checks are kept here, also those of child processes.
_CACHE = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _CACHE.name

from runtime import tensorflow_startup  # noqa: E402

tensorflow_startup.set_environment()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

import resnet  # noqa: E402
from checkpoints import training_log  # noqa: E402
from probing import confusion  # noqa: E402
from runtime import console  # noqa: E402

# Tracing creates many objects. The default thresholds make up a tenth of the processor time of the tests.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)

# By default, Hypothesis tries the same examples in every run. With `--hypothesis-profile=soak`, it
# tries more examples and chooses them at random.
hypothesis.settings.register_profile("suites", derandomize=True, database=None)
hypothesis.settings.register_profile("soak", max_examples=800, print_blob=True)
hypothesis.settings.load_profile("suites")

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)
# Tests execute few steps, so Grappler would take longer than the steps. `optimized_graphs` enables it for one test.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="session")
def two_replicas():
    """Returns the process's only MirroredStrategy. Creating a second one would abort the process."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.fixture(scope="session")
def torch_python():
    """Returns the path of a Python interpreter that can import PyTorch."""
    path = os.environ.get("SIMCLR_TORCH_PYTHON")
    if path is None and not importlib.util.find_spec("torch"):
        pytest.skip("PyTorch is not installed; `make test-torch` runs this test")
    return path or sys.executable


@pytest.fixture
def stub_tensorflow(monkeypatch, tmp_path):
    """Returns a function that replaces TensorFlow in child processes with a module that prints and executes code."""

    def write(code):
        (tmp_path / "tensorflow.py").write_text(
            "import os, sys\nfor number in (1, 2, 2):\n"
            "    print(f'time{number}: x.cc] reason {number}', file=sys.stderr, flush=True)\n"
            + code
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


@pytest.fixture
def jax_python():
    """Skips a test if there is no Python interpreter that can import JAX."""
    if "SIMCLR_JAX_PYTHON" not in os.environ:
        pytest.skip("SIMCLR_JAX_PYTHON is not set; `make test-compiled` runs this test")


@pytest.fixture
def default_sighup():
    """Restores the default SIGHUP handler for one test, because processes started with nohup ignore the signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def fails(capsys):
    """Returns a function that checks the status and the one-line message of a command that fails."""

    def check(words, command, *arguments, status=2):
        with pytest.raises(SystemExit) as error:
            command(*arguments)
        message = capsys.readouterr().err
        assert error.value.code == status and words in message
        assert message.count("\n") == 1 and "\x1b" not in message

    return check


@pytest.fixture
def logged(monkeypatch):
    """Returns a list of all logged lines."""
    lines = []
    monkeypatch.setattr(console, "log", lines.append)
    return lines


@pytest.fixture
def float64():
    """Makes float64 the default dtype of Keras for one test."""
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


@pytest.fixture
def optimized_graphs():
    """Enables Grappler for one test."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="session", autouse=True)
def draw_curves():
    """Replaces the functions that draw figures of runs, because they are slow. Yields that of curves.png."""
    original = training_log.draw_curves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_log, "draw_curves", lambda *_: b"replaced by conftest.py")
        patch.setattr(confusion, "draw", lambda *_: b"replaced by conftest.py")
        yield original


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


def _resnet_10_with_blocks(*blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.DEPTHS, 10, (False, blocks))
        yield


@pytest.fixture(scope="module")
def tiny_resnet():
    """Reduces ResNet-10 from four block groups to two, for tests that spend most of their time tracing."""
    yield from _resnet_10_with_blocks(1, 1)


@pytest.fixture(scope="module")
def one_block_resnet():
    """Reduces ResNet-10 to the stem and one block."""
    yield from _resnet_10_with_blocks(1)


@pytest.fixture(scope="module")
def stem_only_resnet():
    """Removes all blocks from ResNet-10, for tests in which the network does not matter."""
    yield from _resnet_10_with_blocks()
