"""Baseline for `benchmarks.train_step`: the same network and losses, built only from standard Keras layers."""

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
    shortcut = _norm_relu(_convolution(inputs, filters, 1, strides), relu=False) if project else inputs
    outputs = _norm_relu(_convolution(inputs, filters, 3, strides))
    outputs = _norm_relu(_convolution(outputs, filters, 3), relu=False)
    return keras.layers.ReLU()(keras.layers.Add()([outputs, shortcut]))


def resnet18(size, out_dim=128, num_layers=3, classes=10):
    """Builds a ResNet-18 with the CIFAR stem, which returns projections and logits of the linear head."""
    images = keras.Input([size, size, 3])
    outputs = _norm_relu(_convolution(images, 64, 3))
    for group, filters in enumerate((64, 128, 256, 512)):
        outputs = _block(outputs, filters, 1 if group == 0 else 2, True)
        outputs = _block(outputs, filters, 1, False)
    hidden = keras.layers.GlobalAveragePooling2D()(outputs)
    logits = keras.layers.Dense(classes)(tf.stop_gradient(hidden))
    for _ in range(num_layers - 1):
        hidden = _norm_relu(keras.layers.Dense(hidden.shape[-1], use_bias=False)(hidden))
    projections = _norm_relu(keras.layers.Dense(out_dim, use_bias=False)(hidden), relu=False, center=False)
    return keras.Model(images, [projections, logits])


def make_step(model):
    """Returns a function that runs a LARS step on (views [n, h, w, 6], labels [n]) and returns the loss and metrics."""
    update = optimizer.make_plain_update(
        model.trainable_variables, [v.shape.rank <= 1 for v in model.trainable_variables], learning_rate=0.1,
        momentum=0.9, weight_decay=1e-6)

    @tf.function(autograph=False)
    def step(views, labels):
        with tf.GradientTape() as tape:
            projections, logits = model(tf.concat(tf.split(views, 2, -1), 0), training=True)
            contrastive_loss, accuracy, entropy = loss.plain(tf.cast(projections, tf.float32))
            linear_head_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.concat([labels, labels], 0), tf.cast(logits, tf.float32)))
            total_loss = contrastive_loss + linear_head_loss
        update(tape.gradient(total_loss, model.trainable_variables))
        return tf.stack([total_loss, accuracy, entropy])

    return step
