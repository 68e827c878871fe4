"""Inference with trained networks: encoders for Python, embeddings, class predictions and galleries."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Importing `runtime` checks that the dependencies are installed.
from runtime import tensorflow_startup

if TYPE_CHECKING:  # This import loads TensorFlow, which `--help` does not need.
    from inference.encoder import Encoder


def load(path: str, trainable: bool = False) -> Encoder:
    """Loads the encoder of a network as a Keras model.

    Args:
      path: a run directory, a checkpoint, a SavedModel, a PyTorch file or a TF Hub handle.
      trainable: whether the weights can be trained, and batch norm uses batch statistics in
        training.

    Raises:
      UserError: there is no network at `path`, or it cannot be read.
    """
    tensorflow_startup.set_environment()  # has an effect if TensorFlow is not loaded yet
    from inference.encoder import Encoder

    return Encoder(path, trainable)
