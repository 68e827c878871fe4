"""Helpers for the programs that plot the paper's figures and run its probes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import model as model_lib
from checkpoints import loading
from config import Config, parse_settings, settings_with
from probing import features
from runtime.errors import UserError
from sources import datasets, image_checks
from sources.source import Source


def parse_flags(text: str, **defaults: Any) -> Config:
    """Returns the `Config` for a string of run.py flags, which override `defaults`.

    Raises:
      UserError: a flag or its value is invalid.
    """
    return Config(**{**defaults, **parse_settings(text)})


def open_source(config: Config) -> Source:
    """Opens a `Config`'s data set and, if it is an image folder, checks its images.

    Raises:
      UserError: the data set cannot be opened, or its images are unusable.
    """
    source = datasets.open_configured(config)
    if config.white_level == "auto":
        white_level = image_checks.find_white_level(source, config.train_split)
        source.conversion = config.replace(white_level=white_level).conversion
    image_checks.check_images(config, source)
    return source


def load(path: str, dataset: str, flags: str) -> tuple[model_lib.Model, Config]:
    """Loads a network with a projection head from a checkpoint or SavedModel. The network computes in float32.

    Args:
      path: path of the weights.
      dataset: data set, specified as for run.py.
      flags: flags of run.py that override the network's image size (224 if unknown) and the
        recorded decoding of images.

    Returns:
      The model, and the settings for the data set.

    Raises:
      UserError: the weights cannot be loaded (see `weight_files.open_weights`), the network has no
        projection head, or a flag is invalid.
    """
    model, info = loading.open_network(path)
    if not model.num_proj_layers:
        raise UserError(
            "--checkpoint: the network has no projection head. Use a network with a projection"
            " head."
        )
    names = ("image_size", *settings_with("pixels"))
    recorded = {name: getattr(info.config, name) for name in names}
    return model, parse_flags(flags, dataset=dataset, **recorded)


def extract_h_and_z(
    model: model_lib.Model, batches: Iterable, description: str
) -> tuple[np.ndarray, ...]:
    """Returns h [examples, d], z = g(h) [examples, d'] and the labels [examples] of a data set.

    The vectors are stored in a memory map.

    Args:
      model: network with a projection head.
      batches: data set of (images, labels, weights, positions) (see `features.collect`).
      description: label for the progress bar.

    Raises:
      UserError: the vectors contain NaN or Inf.
    """

    def h_and_z(images):
        endpoints = model(images, training=False)
        return tf.concat([endpoints["final_avg_pool"], endpoints["proj_head_output"]], 1)

    vectors, labels = features.extract(tf.distribute.get_strategy(), h_and_z, batches, description)
    return *np.split(vectors, [model.resnet_model.num_features], 1), labels
