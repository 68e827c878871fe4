"""Baseline for training steps: the same networks and losses, built only from standard Keras layers."""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from benchmarks import loss, optimizer


def _norm_relu(inputs, relu=True, center=True):
    outputs = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, center=center)(inputs)
    return keras.layers.ReLU()(outputs) if relu else outputs


def _convolution(inputs, filters, size, strides=1):
    return keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(inputs)


def _block(inputs, filters, strides, project):
    shortcut = (
        _norm_relu(_convolution(inputs, filters, 1, strides), relu=False) if project else inputs
    )
    outputs = _norm_relu(_convolution(inputs, filters, 3, strides))
    outputs = _norm_relu(_convolution(outputs, filters, 3), relu=False)
    return keras.layers.ReLU()(keras.layers.Add()([outputs, shortcut]))


def _bottleneck_block(inputs, filters, strides, project):
    shortcut = (
        _norm_relu(_convolution(inputs, 4 * filters, 1, strides), relu=False) if project else inputs
    )
    outputs = _norm_relu(_convolution(inputs, filters, 1))
    outputs = _norm_relu(_convolution(outputs, filters, 3, strides))
    outputs = _norm_relu(_convolution(outputs, 4 * filters, 1), relu=False)
    return keras.layers.ReLU()(keras.layers.Add()([outputs, shortcut]))


_NETWORKS = {
    10: (_block, (1, 1, 1, 1)),
    18: (_block, (2, 2, 2, 2)),
    50: (_bottleneck_block, (3, 4, 6, 3)),
}


def resnet(
    depth, size, out_dim=128, num_layers=3, classes=10, cifar_stem=True, precision="float32"
):
    """Builds a ResNet that returns projections and the logits of the linear head, both in float32.

    Args:
      depth: 10, 18 or 50.
      size: height and width of the images, in pixels.
      out_dim: size of the projections.
      num_layers: number of layers in the projection head.
      classes: number of classes.
      cifar_stem: whether the first layer is a 3x3 convolution, rather than a 7x7 convolution with
        max pooling.
      precision: name of a Keras policy: float32, mixed_float16 or mixed_bfloat16.
    """
    keras.mixed_precision.set_global_policy(precision)
    try:
        return _build(*_NETWORKS[depth], size, out_dim, num_layers, classes, cifar_stem)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def _build(block, blocks, size, out_dim, num_layers, classes, cifar_stem):
    images = keras.Input([size, size, 3])
    if cifar_stem:
        outputs = _norm_relu(_convolution(images, 64, 3))
    else:
        outputs = keras.layers.MaxPooling2D(3, 2, padding="same")(
            _norm_relu(_convolution(images, 64, 7, 2))
        )
    for group, count in enumerate(blocks):
        for index in range(count):
            outputs = block(outputs, 64 * 2**group, 2 if group and not index else 1, not index)
    hidden = keras.layers.GlobalAveragePooling2D(dtype="float32")(outputs)
    logits = keras.layers.Dense(classes, dtype="float32")(tf.stop_gradient(hidden))
    for _ in range(num_layers - 1):
        hidden = _norm_relu(keras.layers.Dense(hidden.shape[-1], use_bias=False)(hidden))
    hidden = keras.layers.Dense(out_dim, use_bias=False, dtype="float32")(hidden)
    projections = keras.layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, center=False, dtype="float32"
    )(hidden)
    return keras.Model(images, [projections, logits])


def make_step(model, jit_compile=False):
    """Returns a function that runs a LARS step on (two views [n, h, w, 3], labels [n]) and returns loss and metrics.

    With float16, the loss is not scaled. With `jit_compile`, XLA compiles the step.
    """
    update = optimizer.make_plain_update(
        model.trainable_variables,
        [v.shape.rank <= 1 for v in model.trainable_variables],
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=1e-6,
    )

    @tf.function(autograph=False, jit_compile=jit_compile)
    def step(views, labels):
        with tf.GradientTape() as tape:
            projections, logits = model(tf.concat(views, 0), training=True)
            contrastive_loss, accuracy, entropy = loss.plain(projections)
            linear_head_loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.concat([labels, labels], 0), logits
                )
            )
            total_loss = contrastive_loss + linear_head_loss
        update(tape.gradient(total_loss, model.trainable_variables))
        return tf.stack([total_loss, accuracy, entropy])

    return step
