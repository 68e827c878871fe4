"""The yardstick of the training step: the same network and losses, written with Keras's own layers and no more."""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

_LARGE = 1e9


def _norm_relu(inputs, relu=True):
    outputs = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(inputs)
    return keras.layers.ReLU()(outputs) if relu else outputs


def _convolution(inputs, filters, size, strides=1):
    return keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(inputs)


def _block(inputs, filters, strides, project):
    shortcut = _norm_relu(_convolution(inputs, filters, 1, strides), relu=False) if project else inputs
    outputs = _norm_relu(_convolution(inputs, filters, 3, strides))
    outputs = _norm_relu(_convolution(outputs, filters, 3), relu=False)
    return keras.layers.ReLU()(keras.layers.Add()([outputs, shortcut]))


def resnet18(size, out_dim=128, num_layers=3, classes=10):
    """images -> (projections, logits): ResNet-18 with the small stem, projection head and linear head."""
    images = keras.Input([size, size, 3])
    outputs = _norm_relu(_convolution(images, 64, 3))
    for group, filters in enumerate((64, 128, 256, 512)):
        outputs = _block(outputs, filters, 1 if group == 0 else 2, True)
        outputs = _block(outputs, filters, 1, False)
    hidden = keras.layers.GlobalAveragePooling2D()(outputs)
    logits = keras.layers.Dense(classes)(tf.stop_gradient(hidden))
    for _ in range(num_layers - 1):
        hidden = _norm_relu(keras.layers.Dense(hidden.shape[-1], use_bias=False)(hidden))
    projections = _norm_relu(keras.layers.Dense(out_dim, use_bias=False)(hidden), relu=False)
    return keras.Model(images, [projections, logits])


def nt_xent(hidden, temperature):
    """The loss by the original's formula: four matrices of logits, and one-hot masks times a large number."""
    view_1, view_2 = tf.split(tf.math.l2_normalize(tf.cast(hidden, tf.float32), -1), 2, 0)
    batch = tf.shape(view_1)[0]
    labels, mask = tf.one_hot(tf.range(batch), 2 * batch), tf.one_hot(tf.range(batch), batch) * _LARGE
    aa, bb = (tf.matmul(view, view, transpose_b=True) / temperature - mask for view in (view_1, view_2))
    ab = tf.matmul(view_1, view_2, transpose_b=True) / temperature
    ba = tf.matmul(view_2, view_1, transpose_b=True) / temperature
    losses = [tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat(logits, 1)) for logits in ((ab, aa), (ba, bb))]
    return tf.reduce_mean(losses[0] + losses[1]), ab, labels


def make_step(model, optimizer, temperature=0.1):
    """A function that takes one step on (views [n, h, w, 6], labels [n]) and returns the total loss."""
    @tf.function(autograph=False)
    def step(views, labels):
        with tf.GradientTape() as tape:
            projections, logits = model(tf.concat(tf.split(views, 2, -1), 0), training=True)
            contrast, logits_ab, targets = nt_xent(projections, temperature)
            supervised = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.concat([labels, labels], 0), tf.cast(logits, tf.float32)))
            total = contrast + supervised
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(total, variables), variables))
        probabilities = tf.nn.softmax(logits_ab)
        entropy = -tf.reduce_mean(tf.reduce_sum(probabilities * tf.math.log(probabilities + 1e-8), -1))
        accuracy = tf.reduce_mean(tf.cast(tf.argmax(targets, 1) == tf.argmax(logits_ab, 1), tf.float32))
        return tf.stack([total, entropy, accuracy])

    return step
