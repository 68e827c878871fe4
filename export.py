"""SavedModels for TF Hub: the original's ten outputs, both call spellings, signatures, and fine-tuning."""

from __future__ import annotations

import os

import tensorflow as tf

import checkpoint
import data_util
import model as model_lib


def _forward(model):
    """A function of images and a Python bool `training` that returns the endpoints `model` really has."""
    @tf.function(autograph=False)
    def forward(inputs, training):
        endpoints = model(inputs, training=training)
        return {name: endpoints[name] for name in model.endpoint_names}

    return forward


def _variable_tree(model):
    """The variables under their checkpoint keys, without Keras: it would trace and save every layer's call."""
    root = tf.__internal__.tracking.AutoTrackable()
    for key, variable in checkpoint.variables_by_key(model=model).items():
        *parents, leaf = key.split("/")[1:]
        node = root
        for name in parents:
            if not hasattr(node, name):
                setattr(node, name, tf.__internal__.tracking.AutoTrackable())
            node = getattr(node, name)
        setattr(node, leaf, variable)
    return root


def build_module(model, config):
    """The object to save: a Reusable SavedModel (TF Hub).

    Args:
      model: a built `model.Model`, made outside any strategy.
      config: its settings.

    Returns:
      (module, signatures). The module is called as `module(images, trainable=False)`, the original's way, or as
      `module(images, training=False)`; images are float32 [n, h, w, 3] in [0, 1], without mean subtraction. Either
      argument, set True, makes batch norm use and average the batch's statistics.
    """
    # AutoTrackable, not tf.Module, whose trainable_variables cannot be set.
    module = tf.__internal__.tracking.AutoTrackable()
    forward = _forward(model)
    images = tf.TensorSpec([None, None, None, 3], tf.float32, name="inputs")

    @tf.function(autograph=False)
    def call(inputs, training=False, trainable=False):
        return forward(inputs, bool(training or trainable))

    for training in (False, True):
        for trainable in (False, True):
            call.get_concrete_function(images, training=training, trainable=trainable)

    @tf.function(autograph=False, input_signature=[images])
    def serving_default(inputs):
        return forward(inputs, False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="inputs")])
    def serving_uint8(inputs):
        size = config.image_size
        cropped = data_util.preprocess_for_eval(
            tf.image.convert_image_dtype(inputs, tf.float32), size, crop=size > 32)
        return forward(cropped, False)

    @tf.function(autograph=False, input_signature=[])
    def regularization_loss():
        return model_lib.add_weight_decay(model, config.weight_decay, "momentum")

    module.__call__ = call
    module.model = _variable_tree(model)
    module.variables = model.variables
    module.trainable_variables = model.trainable_variables
    module.regularization_losses = [regularization_loss] if config.weight_decay else []
    return module, {"serving_default": serving_default, "serving_uint8": serving_uint8}


def export(config, num_classes, checkpoint_path, export_dir):
    """Writes the model of a checkpoint as a SavedModel to `export_dir`.

    The model is built anew, in float32, so that neither a strategy nor frozen blocks nor half precision of the
    training are carried along.
    """
    model = model_lib.build_model(config.replace(precision="float32"), num_classes)
    checkpoint.load_model(model, checkpoint_path)
    module, signatures = build_module(model, config)
    tf.saved_model.save(module, export_dir, signatures=signatures)


def export_to_model_dir(config, num_classes, checkpoint_path):
    """Writes model_dir/saved_model/<step>/ and drops all but the newest `keep_hub_module_max`; returns its path."""
    root = os.path.join(config.model_dir, "saved_model")
    path = os.path.join(root, str(checkpoint.step_of(checkpoint_path)))
    export(config, num_classes, checkpoint_path, path)
    steps = sorted(int(name.rstrip("/")) for name in tf.io.gfile.listdir(root) if name.rstrip("/").isdigit())
    for step in steps[:-config.keep_hub_module_max] if config.keep_hub_module_max else []:
        tf.io.gfile.rmtree(os.path.join(root, str(step)))
    return path
