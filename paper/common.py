"""What the programs of this folder share."""

from __future__ import annotations

import shlex

import absl.logging
import tensorflow as tf
from absl import flags

import checkpoint
import config as config_lib
import export
import model as model_lib
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
    """The whole network of a file, in float32, and the size of its images: that of its training, if known, or 224.

    Raises:
      UserError: see `weights.open_weights`.
    """
    known = export.known_of(path)
    model = model_lib.build_model(known.config.replace(precision="float32"),
                                  None if known.class_names is None else len(known.class_names))
    checkpoint.load_model(model, path, "--checkpoint")
    return model, known.config.image_size
