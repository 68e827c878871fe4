"""Model descriptions stored in SavedModels (assets.extra/simclr.json)."""

from __future__ import annotations

import os

import tensorflow as tf

from checkpoints import weight_files
from runtime import storage
from runtime.errors import UserError

_DESCRIPTION_TYPES = {  # field -> predicate for values other than None
    "network": lambda value: isinstance(value, str),
    "weights": lambda value: isinstance(value, str),
    "image_size": lambda value: type(value) is int and 8 <= value < 10**5,
    "step": lambda value: type(value) is int,
    "class_names": storage.is_list_of_strings,
    "multi_label": lambda value: isinstance(value, bool),
    "eval_center_crop": lambda value: isinstance(value, bool),
    "results": lambda value: isinstance(value, dict),
    "flags": lambda value: isinstance(value, dict),
}


def _description_path(saved_model):
    return os.path.join(saved_model, weight_files.DESCRIPTION_FILE)


def write_description(saved_model: str, description: dict) -> None:
    """Writes a description to a SavedModel's assets.extra directory, which TensorFlow does not read."""
    tf.io.gfile.makedirs(os.path.dirname(_description_path(saved_model)))
    storage.write_json(_description_path(saved_model), description)


def read_description(saved_model: str) -> dict:
    """Returns a SavedModel's description, or an empty dict if another program exported the SavedModel.

    Raises:
      UserError: the description is not valid JSON, or a value has the wrong type.
    """
    path = _description_path(saved_model)
    if not tf.io.gfile.exists(path):
        return {}
    description = storage.read_json(path)
    malformed = (
        ["the file"]
        if not isinstance(description, dict)
        else [
            name
            for name, is_valid in _DESCRIPTION_TYPES.items()
            if description.get(name) is not None and not is_valid(description[name])
        ]
    )
    if malformed:
        raise UserError(
            f"{path}: {malformed[0]} is malformed. Copy or export the SavedModel again."
        )
    return {name: value for name, value in description.items() if value is not None}
