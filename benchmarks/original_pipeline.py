"""Baseline for `benchmarks.input_pipeline`: a reimplementation of the original's view generation.

The module reproduces the properties that determine the original's cost: stateful random operators,
conversion of the whole decoded image to float for each view, and color jitter that selects each of
its four steps with nested conditions.
"""

from __future__ import annotations

import tensorflow as tf


def decode(item):
    """Decodes an image to uint8 [h, w, 3], as TFDS does."""
    return tf.io.decode_image(item, channels=3, expand_animations=False)


def random_crop(image, size):
    """Applies an Inception-style crop and resizes the result with bicubic interpolation."""
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    crop = tf.image.crop_to_bounding_box(image, begin[0], begin[1], extent[0], extent[1])
    return tf.image.resize([crop], [size, size], tf.image.ResizeMethod.BICUBIC)[0]


def with_probability(probability, function, image):
    """Returns `function(image)` with the given probability, otherwise `image`."""
    return tf.cond(tf.random.uniform([]) < probability, lambda: function(image), lambda: image)


def random_brightness(image, strength):
    """Multiplies the image by a uniform random factor, as in SimCLR v2."""
    return image * tf.random.uniform([], max(1.0 - strength, 0.0), 1.0 + strength)


def jitter_step(image, index, strength):
    """Applies step `index` of (brightness, contrast, saturation, hue), and clips the result."""
    amount = 0.8 * strength
    low, high = max(1.0 - amount, 0.0), 1.0 + amount
    image = tf.cond(
        index < 2,
        lambda: tf.cond(
            index < 1,
            lambda: random_brightness(image, amount),
            lambda: tf.image.random_contrast(image, low, high),
        ),
        lambda: tf.cond(
            index < 3,
            lambda: tf.image.random_saturation(image, low, high),
            lambda: tf.image.random_hue(image, 0.2 * strength),
        ),
    )
    return tf.clip_by_value(image, 0.0, 1.0)


def color_jitter(image, strength):
    """Applies the four jitter steps in random order."""
    order = tf.random.shuffle(tf.range(4))
    for position in range(4):
        image = jitter_step(image, order[position], strength)
    return image


def to_grayscale(image):
    """Replaces the three channels with the luminance."""
    return tf.tile(tf.image.rgb_to_grayscale(image), [1, 1, 3])


def view(image, size, strength):
    """Returns one view [size, size, 3] of a decoded uint8 image. `strength=0` disables color distortion."""
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = tf.image.random_flip_left_right(random_crop(image, size))
    if strength > 0:
        image = with_probability(0.8, lambda x: color_jitter(x, strength), image)
        image = with_probability(0.2, to_grayscale, image)
    return tf.clip_by_value(tf.reshape(image, [size, size, 3]), 0.0, 1.0)


def build(records, size, strength, batch_size):
    """Maps a dataset of (key, encoded image, label) to batches (two views [batch_size, size, size, 3], labels)."""

    @tf.autograph.experimental.do_not_convert
    def two_views(key, item, label):
        image = decode(item)
        return (view(image, size, strength), view(image, size, strength)), label

    dataset = records.map(two_views, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
