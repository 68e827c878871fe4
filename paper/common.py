"""What the programs of this folder share."""

from __future__ import annotations

import os
import shlex

import absl.logging
import tensorflow as tf
from absl import flags

import checkpoint
import config as config_lib
import model as model_lib
import model_dir
import weights
from config import UserError

# Deprecations and retracing inside the libraries are not for the user to mend.
tf.get_logger().setLevel("ERROR")
absl.logging.set_verbosity(absl.logging.ERROR)


def parse_flags(text, **defaults):
    """The `Config` of flags written as on the command line of run.py, after `defaults`. Raises `UserError`."""
    values = flags.FlagValues()
    config_lib.define_flags(values)
    try:
        rest = values(["run.py", *(f"--{name}={value}" for name, value in defaults.items()), *shlex.split(text)])
    except (flags.Error, ValueError) as error:
        raise UserError(f"--flags: {config_lib.first_line(error)}") from error
    if rest[1:]:
        raise UserError(f"--flags: {rest[1]} is not a flag: settings are written --name=value")
    return config_lib.from_flags(values)


def load(path):
    """The whole network of a file, and the size of its images: that of the run that wrote it, or 224.

    Raises:
      UserError: see `weights.open_weights`.
    """
    file = weights.open_weights(path)
    size = (model_dir.read_flags(os.path.dirname(file.path)) or {}).get("image_size", 224)
    config, classes = checkpoint.config_of_file(file, size)
    model = model_lib.build_model(config, classes)
    checkpoint.load_model(model, path, "--checkpoint")
    return model, size
