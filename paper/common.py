"""What the programs of this folder share."""

from __future__ import annotations

import config as config_lib
import model as model_lib
from checkpoints import inspection, restoring
from runtime.errors import UserError


def parse_flags(text, **defaults):
    """The `Config` of flags written as on the command line of run.py, after `defaults`. Raises `UserError`."""
    return config_lib.from_arguments(config_lib.as_flags({**defaults, **config_lib.settings_within(text)}))


def check_has_head(model):
    """Raises `UserError` if a model has no projection head."""
    if not model.num_proj_layers:
        raise UserError("--checkpoint has no projection head: name one that has")


def load(path):
    """The whole network of a file, in float32, and the size of its images: that of its training, if known, or 224.

    Raises:
      UserError: see `weight_files.open_weights`.
    """
    known = inspection.inspect_checkpoint(path)
    model = model_lib.build_model(known.config.replace(precision="float32"),
                                  None if known.class_names is None else len(known.class_names))
    restoring.load_model(model, path, "--checkpoint")
    return model, known.config.image_size
