"""Baselines: standard Keras, NumPy, SciPy and scikit-learn, and the original's formulas.

Each function returns an implementation for `measure.measure`, which receives a number of calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

import objective
import resnet as resnet_lib
from benchmarks import programs
from benchmarks.measure import repeated
from benchmarks.programs import CLASSES, Implementation
from runtime import devices

_LEARNING_RATE, _MOMENTUM, _WEIGHT_DECAY, _EETA = 0.1, 0.9, 1e-6, 0.001

# ------------------------------------------------------------------------------------------------------------- training


def lars_updates(variables: list[tf.Variable]) -> Callable[[list[tf.Tensor]], None]:
    """Returns a function of gradients that applies the original's formulas of LARS to the variables, one at a time.

    Variables of rank 0 or 1 have no weight decay, and a trust ratio of 1.
    """
    slots = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    def update(gradients):
        for variable, grad, slot in zip(variables, gradients, slots):
            trust_ratio = 1.0
            if variable.shape.rank > 1:
                grad = grad + _WEIGHT_DECAY * variable
                norm, grad_norm = tf.norm(variable), tf.norm(grad)
                positive = (norm > 0) & (grad_norm > 0)
                trust_ratio = tf.where(positive, _EETA * norm / grad_norm, 1.0)
            slot.assign(_MOMENTUM * slot + _LEARNING_RATE * trust_ratio * grad)
            variable.assign_sub(slot)

    return update


_norm = functools.partial(keras.layers.BatchNormalization, momentum=0.9, epsilon=1e-5)


def _conv_norm(
    x: tf.Tensor, filters: int, size: int, strides: int = 1, relu: bool = True
) -> tf.Tensor:
    layers = keras.layers
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    x = _norm()(x)
    return layers.ReLU()(x) if relu else x


def keras_resnet(
    depth: int, size: int, cifar_stem: bool, precision: str = "float32"
) -> keras.Model:
    """Builds a ResNet that returns projections and the logits of the linear head, both in float32.

    Args:
      depth: depth of the ResNet.
      size: height and width of the images, in pixels.
      cifar_stem: whether the first layer is a 3x3 convolution, rather than a 7x7 convolution with
        max pooling.
      precision: name of a Keras policy: float32, mixed_float16 or mixed_bfloat16.
    """
    keras.mixed_precision.set_global_policy(precision)
    layers, (has_bottleneck, counts) = keras.layers, resnet_lib.DEPTHS[depth]
    images = keras.Input([size, size, 3])
    if cifar_stem:
        x = _conv_norm(images, 64, 3)
    else:
        x = layers.MaxPooling2D(3, 2, padding="same")(_conv_norm(images, 64, 7, 2))
    for group, count in enumerate(counts):
        for index in range(count):
            filters, strides = 64 * 2**group, 2 if group and not index else 1
            width = 4 * filters if has_bottleneck else filters
            shortcut = x if index else _conv_norm(x, width, 1, strides, relu=False)
            if has_bottleneck:
                x = _conv_norm(x, filters, 1)
            x = _conv_norm(x, filters, 3, strides)
            x = _conv_norm(x, width, 1 if has_bottleneck else 3, relu=False)
            x = layers.ReLU()(layers.Add()([x, shortcut]))
    keras.mixed_precision.set_global_policy("float32")
    x = layers.GlobalAveragePooling2D()(tf.cast(x, tf.float32))
    logits = layers.Dense(CLASSES)(tf.stop_gradient(x))
    for _ in range(2):
        x = layers.Dense(x.shape[-1], use_bias=False)(x)
        x = layers.ReLU()(_norm()(x))
    x = layers.Dense(128, use_bias=False)(x)
    return keras.Model(images, [_norm(center=False)(x), logits])


def keras_step(batch: int, jit_compile: bool | None, **network: Any) -> Implementation:
    """Training steps of plain Keras with LARS. With float16, the loss is not scaled."""
    model = keras_resnet(**network)
    variables = model.trainable_variables
    update = lars_updates(variables)
    views, labels = programs.random_batch(batch, network["size"])

    is_compiled = devices.compiles_step(jit_compile, tf.distribute.get_strategy())

    @tf.function(autograph=False, jit_compile=is_compiled)
    def step():
        with tf.GradientTape() as tape:
            projections, logits = model(tf.concat(views, 0), training=True)
            contrastive_loss, *_ = objective.add_contrastive_loss(projections, True, 0.1)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.tile(labels, [2]), logits)
            loss = contrastive_loss + tf.reduce_mean(losses)
        update(tape.gradient(loss, variables))
        return loss

    @tf.function
    def run_steps(calls):
        loss = 0.0
        for _ in tf.range(calls):
            loss = step()
        return loss

    return lambda calls: float(run_steps(tf.constant(calls)))


# ----------------------------------------------------------------------------------------------------------- evaluation


def open_folder(count: int) -> Implementation:
    """Keras's function for image folders. Returns the number of images."""
    directory = programs.image_folder(count)

    def opened():
        path = f"{directory.name}/images"
        return len(keras.utils.image_dataset_from_directory(path).file_paths)

    return repeated(opened)
