"""Helpers for the programs that plot the paper's figures and run its probes."""

from __future__ import annotations

from typing import Any

import config as config_lib
import model as model_lib
from checkpoints import restoring
from runtime.errors import UserError
from sources import datasets, image_checks
from sources.source import Source


def parse_flags(text: str, **defaults: Any) -> config_lib.Config:
    """Returns the `Config` for a string of run.py flags, which override `defaults`.

    Raises:
      UserError: a flag or its value is invalid.
    """
    return config_lib.from_arguments(
        config_lib.as_flags({**defaults, **config_lib.parse_settings(text)})
    )


def open_source(config: config_lib.Config) -> Source:
    """Opens a `Config`'s data set and, if it is an image folder, checks its images.

    Raises:
      UserError: the data set cannot be opened, or its images are unusable.
    """
    source = datasets.open_configured(config)
    if config.white_level == "auto":
        white_level = image_checks.find_white_level(config, source)
        source.conversion = config.replace(white_level=white_level).conversion
    image_checks.check_images(config, source)
    return source


def check_has_projection_head(model: model_lib.Model) -> None:
    """Raises `UserError` if a model has no projection head."""
    if not model.num_proj_layers:
        raise UserError(
            "--checkpoint: the network has no projection head. Use a network with a projection"
            " head."
        )


def load(path: str) -> tuple[model_lib.Model, int]:
    """Loads a network from a checkpoint or SavedModel. The network computes in float32.

    Returns:
      The model, and the training image size in pixels (224 if unknown).

    Raises:
      UserError: the weights cannot be loaded (see `weight_files.open_weights`).
    """
    model, info = restoring.open_network(path)
    return model, info.config.image_size
