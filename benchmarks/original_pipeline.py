"""The yardstick of `benchmarks.input_pipeline`: the original's training views, written anew from their formulas.

What makes the original's cost is kept: stateful random operators, the whole decoded image converted to float for each
view, and four positions of colour jitter that each choose one step by nested conditions.
"""

from __future__ import annotations

import tensorflow as tf


def decode(item):
    """An encoded image as uint8 [h, w, 3], as TFDS decodes it."""
    return tf.io.decode_image(item, channels=3, expand_animations=False)


def random_crop(image, size):
    """The Inception crop, resized bicubically."""
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image), tf.constant([[[0.0, 0.0, 1.0, 1.0]]]), min_object_covered=0.1,
        aspect_ratio_range=(3 / 4, 4 / 3), area_range=(0.08, 1.0), max_attempts=100,
        use_image_if_no_bounding_boxes=True)
    crop = tf.image.crop_to_bounding_box(image, begin[0], begin[1], extent[0], extent[1])
    return tf.image.resize([crop], [size, size], tf.image.ResizeMethod.BICUBIC)[0]


def with_probability(probability, function, image):
    """`function(image)` with `probability`, else `image`."""
    return tf.cond(tf.random.uniform([]) < probability, lambda: function(image), lambda: image)


def random_brightness(image, strength):
    """Multiplied by a uniform draw, as in SimCLR v2."""
    return image * tf.random.uniform([], max(1.0 - strength, 0.0), 1.0 + strength)


def jitter_step(image, kind, strength):
    """The step numbered `kind`: brightness, contrast, saturation, hue; clipped."""
    amount = 0.8 * strength
    low, high = max(1.0 - amount, 0.0), 1.0 + amount
    image = tf.cond(
        kind < 2,
        lambda: tf.cond(kind < 1, lambda: random_brightness(image, amount),
                        lambda: tf.image.random_contrast(image, low, high)),
        lambda: tf.cond(kind < 3, lambda: tf.image.random_saturation(image, low, high),
                        lambda: tf.image.random_hue(image, 0.2 * strength)))
    return tf.clip_by_value(image, 0.0, 1.0)


def color_jitter(image, strength):
    """The four steps in random order."""
    order = tf.random.shuffle(tf.range(4))
    for position in range(4):
        image = jitter_step(image, order[position], strength)
    return image


def to_grayscale(image):
    """Luminance on three channels."""
    return tf.tile(tf.image.rgb_to_grayscale(image), [1, 1, 3])


def view(image, size, strength):
    """One view [size, size, 3] of a decoded uint8 image; colour is left alone where `strength` is 0."""
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = tf.image.random_flip_left_right(random_crop(image, size))
    if strength > 0:
        image = with_probability(0.8, lambda x: color_jitter(x, strength), image)
        image = with_probability(0.2, to_grayscale, image)
    return tf.clip_by_value(tf.reshape(image, [size, size, 3]), 0.0, 1.0)


def build(records, size, strength, batch_size):
    """Batches (views [batch_size, size, size, 6], labels) of a dataset of (key, encoded image, label)."""
    @tf.autograph.experimental.do_not_convert
    def two_views(key, item, label):
        image = decode(item)
        return tf.concat([view(image, size, strength), view(image, size, strength)], -1), label

    dataset = records.map(two_views, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
