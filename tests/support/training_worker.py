"""Program that acts as one worker in `workers_test.py` and computes in double precision.

TF_CONFIG=... python tests/support/training_worker.py SETTINGS_JSON
"""

import contextlib
import json
import os
import sys
import unittest.mock

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

import run as run_lib  # noqa: E402
from config import Config
from runtime.errors import UserError


def run(settings):
    """Calls `run.main` with the given settings. With mode="train", skips the slow export."""
    config = Config(**settings)
    with contextlib.ExitStack() as stack:
        if config.mode == "train":
            stack.enter_context(unittest.mock.patch.object(run_lib.saving, "export_to_model_dir"))
        run_lib.main(config, given=["eval_split"])


if __name__ == "__main__":
    keras.backend.set_floatx("float64")
    # Graph optimization takes more time than it saves.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        run(json.loads(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}")
        sys.exit(2)
