"""Shared fixtures and set-up: import paths, two logical CPU devices, float64."""

import os
import pathlib
import sys

# Matrices are small, and the BLAS threads of two test processes would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runtime import tensorflow_startup  # noqa: E402

tensorflow_startup.set_environment()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

import resnet  # noqa: E402

# The suites always try the same examples; `--hypothesis-profile=soak` tries new and more examples.
hypothesis.settings.register_profile("suites", derandomize=True, database=None)
hypothesis.settings.register_profile("soak", max_examples=800, print_blob=True)
hypothesis.settings.load_profile("suites")

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def two_replicas():
    """The only MirroredStrategy of the process: a second one would abort it."""
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.fixture
def float64():
    """Keras in double precision for one test."""
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


@pytest.fixture
def unoptimized_graphs():
    """Graphs without Grappler, for tests of a few steps, in which optimizing takes longer than running."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


@pytest.fixture(scope="module")
def tiny_resnet():
    """ResNet-10 with two block groups instead of four, for tests that spend their time on tracing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.DEPTHS, 10, (False, (1, 1)))
        yield
