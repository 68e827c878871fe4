"""Encoders as Keras models."""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from checkpoints import loading
from inference import endpoints
from runtime.errors import UserError
from runtime.paths import check_weights_path


class Encoder(keras.Model):
    """Encoder f that maps images, float32 [n, h, w, 3] in [0, 1], to representations h, float32 [n, d].

    Unless the encoder is trained, the representations are those of `python -m inference embed`.

    Attributes:
      image_size: side length of the images with which the network was trained, in pixels.
      class_names: class names of the network's classifier, or None if it has none.
    """

    def __init__(self, path: str, trainable: bool):
        """Loads the encoder of the network at `path`; see `inference.load`."""
        super().__init__()
        network, info = loading.open_network(check_weights_path("PATH", path), flag="PATH")
        self.resnet_model, self.trainable = network.resnet_model, trainable
        self.image_size, self.class_names = info.config.image_size, info.class_names
        self._load = endpoints.image_loader(info.config)
        # Compiled, so that the results are equal to those of the commands to the bit.
        self._inference = tf.function(
            lambda images: self.resnet_model(images, training=False)["final_avg_pool"],
            input_signature=[tf.TensorSpec([None, None, None, 3])],
            autograph=False,
        )

    def call(self, images: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Returns the representations. If the encoder is not trainable, `training` has no effect."""
        if training and self.trainable:
            return self.resnet_model(images, training=True)["final_avg_pool"]
        return self._inference(images)

    def preprocess(self, path: str) -> tf.Tensor:
        """Returns an image file as input of the encoder, float32 [image_size, image_size, 3].

        Raises:
          UserError: the image cannot be read.
        """
        image = self._load(path)
        if isinstance(image, str):
            raise UserError(f"INPUT={path}: the image cannot be read ({image}).")
        return image
