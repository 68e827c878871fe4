"""run.py with a network that is fast to trace: `python tests/support/worker.py FLAGS...`.

If the environment variable REPLICAS is set, two logical devices share each batch. If EXACT is set,
the program computes in double precision, and nothing is replaced.
"""

import os
import pathlib
import sys

_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

from runtime import tensorflow_startup  # noqa: E402

tensorflow_startup.set_environment()

import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

import config as config_lib  # noqa: E402
import resnet  # noqa: E402
import run  # noqa: E402
from export import saving  # noqa: E402
from runtime import command_line, devices  # noqa: E402
from support import networks  # noqa: E402

if __name__ == "__main__":
    resnet.DEPTHS[10] = (False, (1, 1))
    if os.environ.get("EXACT"):
        keras.backend.set_floatx("float64")
    else:
        saving.export_to_model_dir = lambda *_: "not made"  # The export takes several seconds.
        networks.replace_untrained_network()
    # Graph optimization takes more time than it saves.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if os.environ.get("REPLICAS"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        devices.make_strategy = lambda *_: tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    command_line.run_command(
        "run.py", lambda: run.main(*config_lib.read_command_line(__doc__, sys.argv[1:]))
    )
