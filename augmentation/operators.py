"""Image operators for the paper's augmentation studies and for AutoAugment.

Operators map channels in [0, 1] (see `data_util`) to channels in [0, 1]. The operators in the first
part of the module are deterministic. Most of them take amounts [n], one per image. The operators in
the second part sample random amounts. The results of operators modeled on PIL differ from those of
PIL by at most two of 256 levels.

Operators that need no amount ignore their second argument. `affine` uses tensorflow-addons if it is
installed, which is possible only with TensorFlow 2.15 or earlier. Otherwise, core TensorFlow
computes the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import tensorflow as tf

import data_util
from runtime import rng

_LEVELS, _GRAY = 256, 0.5
_SOBEL = ((-1, 1), (0, 2), (1, 1))  # offset and weight along an edge
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # PIL's smoothing filter, multiplied by 13


def addons() -> ModuleType | None:
    """Imports tensorflow_addons.image on first use, since the import is slow. Returns None if tfa is not installed."""
    try:
        import tensorflow_addons
    except ImportError:
        return None
    return tensorflow_addons.image


def _apply_to_batch(
    function: Callable, channels: list[tf.Tensor], *amounts: tf.Tensor
) -> list[tf.Tensor]:
    """Calls `function` with all channels as a batch of single-channel images [3n, h, w, 1], and with amounts [3n]."""
    images = tf.concat(channels, 0)[..., tf.newaxis]
    results = function(images, *(tf.concat([amount] * len(channels), 0) for amount in amounts))
    return tf.split(tf.squeeze(tf.ensure_shape(results, images.shape), -1), len(channels), 0)


def _per_image(amounts: tf.Tensor) -> tf.Tensor:
    """Reshapes [n] to [n, 1, 1] for broadcasting over pixels."""
    return amounts[:, tf.newaxis, tf.newaxis]


def _quantized(channel: tf.Tensor) -> tf.Tensor:
    return tf.round(tf.clip_by_value(channel, 0.0, 1.0) * (_LEVELS - 1))


# ---------------------------------------------------------------------------------------- geometric transformations


def rot90(channels: list[tf.Tensor], turns: int) -> list[tf.Tensor]:
    """Rotates images counterclockwise by 90 degrees, `turns` times. If `turns` is odd, height and width are swapped."""
    for _ in range(turns % 4):
        channels = [tf.reverse(tf.transpose(channel, [0, 2, 1]), [1]) for channel in channels]
    return channels


def affine(channels: list[tf.Tensor], matrices: tf.Tensor) -> list[tf.Tensor]:
    """Applies affine transformations: output pixel (x, y) is the input pixel nearest to (ax + by + c, dx + ey + f).

    Args:
      channels: three tensors [n, h, w].
      matrices: [n, 6], the parameters (a, b, c, d, e, f) of each image, in pixels.

    Returns:
      Three tensors [n, h, w], which are gray where the input pixel is outside the image.
    """
    transforms = tf.pad(matrices, [[0, 0], [0, 2]])

    def transform(images, transforms):
        if addons():
            return addons().transform(images, transforms, "nearest", "constant", fill_value=_GRAY)
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=transforms,
            output_shape=tf.shape(images)[1:3],
            fill_value=_GRAY,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )

    return _apply_to_batch(transform, channels, transforms)


def shear_x(channels: list[tf.Tensor], amounts: tf.Tensor) -> list[tf.Tensor]:
    """Shears images horizontally by `amounts`, in pixels per row."""
    zeros, ones = tf.zeros_like(amounts), tf.ones_like(amounts)
    return affine(channels, tf.stack([ones, amounts, zeros, zeros, ones, zeros], 1))


def rotate(channels: list[tf.Tensor], degrees: tf.Tensor) -> list[tf.Tensor]:
    """Rotates images counterclockwise about their centers by `degrees`."""
    angle = degrees * (math.pi / 180)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    y, x = ((length - 1) / 2 for length in channels[0].shape[1:])
    left, top = x - x * cosine + y * sine, y - x * sine - y * cosine
    return affine(channels, tf.stack([cosine, -sine, left, sine, cosine, top], 1))


# ---------------------------------------------------------------------------------------------- regions and filters


def cutout(
    channels: list[tf.Tensor], rows: tf.Tensor, columns: tf.Tensor, side: int, fill: float = _GRAY
) -> list[tf.Tensor]:
    """Fills a square centered at (row, column) with the value `fill` (DeVries and Taylor 2017).

    Args:
      channels: three tensors [n, h, w].
      rows: float [n], rows of the centers.
      columns: float [n], columns of the centers.
      side: side length of the square in pixels.
      fill: value of the pixels in the square.
    """

    def is_inside(centers, length):
        distance = tf.range(length, dtype=tf.float32) - tf.floor(centers)[:, tf.newaxis]
        return (distance >= -(side // 2)) & (distance < side - side // 2)

    height, width = channels[0].shape[1:]
    mask = is_inside(rows, height)[:, :, tf.newaxis] & is_inside(columns, width)[:, tf.newaxis]
    return [tf.where(mask, tf.cast(fill, channel.dtype), channel) for channel in channels]


def _make_shift(channel: tf.Tensor) -> Callable[[int, int], tf.Tensor]:
    """Returns a function that shifts `channel` by (dy, dx), each from -1 to 1, with symmetric padding."""
    padded = tf.pad(channel, [[0, 0], [1, 1], [1, 1]], "SYMMETRIC")
    height, width = channel.shape[1:]
    return lambda dy, dx: padded[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]


def sobel(channels: list[tf.Tensor], _: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Computes each channel's Sobel gradient magnitude, scaled so that a vertical edge from 0 to 1 yields 1."""

    def gradient_magnitude(channel):
        shift = _make_shift(channel)
        gradient_x = sum(weight * (shift(dy, 1) - shift(dy, -1)) for dy, weight in _SOBEL)
        gradient_y = sum(weight * (shift(1, dx) - shift(-1, dx)) for dx, weight in _SOBEL)
        return tf.sqrt(tf.square(gradient_x) + tf.square(gradient_y)) / 4

    return data_util.clip([gradient_magnitude(channel) for channel in data_util.clip(channels)])


def sharpness(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """Adjusts sharpness as PIL does. Border pixels are unchanged.

    A factor of 0 smooths the image, a factor of 1 has no effect, and larger factors sharpen the
    image.
    """

    def blend(channel):
        shift = _make_shift(channel)
        smooth = (
            sum(_SMOOTH[dy][dx] * shift(dy - 1, dx - 1) for dy in range(3) for dx in range(3)) / 13
        )
        height, width = channel.shape[1:]
        inner = tf.pad(tf.ones([height - 2, width - 2], tf.bool), [[1, 1], [1, 1]])
        smooth = tf.where(inner, smooth, channel)
        return smooth + _per_image(factors) * (channel - smooth)

    return data_util.clip([blend(channel) for channel in channels])


def motion_blur(
    channels: list[tf.Tensor], degrees: tf.Tensor, lengths: tf.Tensor, size: int
) -> list[tf.Tensor]:
    """Applies motion blur: the mean along a line through each pixel, with symmetric padding.

    Args:
      channels: three tensors [n, h, w].
      degrees: [n], counterclockwise angles of the lines from the horizontal.
      lengths: [n], lengths of the lines in pixels, from 1 to `size`.
      size: odd filter size in pixels. Images must be larger than `size` / 2.
    """
    radius, angle = size // 2, degrees * (math.pi / 180)
    offsets = tf.range(-radius, radius + 1, dtype=tf.float32)
    x, y = offsets, -offsets[:, tf.newaxis]
    cosine, sine = _per_image(tf.cos(angle)), _per_image(tf.sin(angle))
    along, across = x * cosine + y * sine, y * cosine - x * sine
    weights = tf.clip_by_value(1 - tf.abs(across), 0.0, 1.0) * tf.clip_by_value(
        (_per_image(lengths) + 1) / 2 - tf.abs(along), 0.0, 1.0
    )
    weights /= tf.reduce_sum(weights, [1, 2], keepdims=True)

    def filter_images(images, weights):
        # Append a blank image, since oneDNN's kernel fails for empty batches.
        images, weights = (
            tf.pad(values, [[0, 1], [0, 0], [0, 0]]) for values in (images[..., 0], weights)
        )
        padded = tf.pad(images, [[0, 0], [radius, radius], [radius, radius]], "SYMMETRIC")
        # Depthwise convolution of a transposed batch applies a separate filter to each image.
        result = tf.nn.depthwise_conv2d(
            tf.transpose(padded, [1, 2, 0])[tf.newaxis],
            tf.transpose(weights, [1, 2, 0])[..., tf.newaxis],
            [1, 1, 1, 1],
            "VALID",
        )
        return tf.transpose(result[0], [2, 0, 1])[:-1, ..., tf.newaxis]

    return _apply_to_batch(filter_images, channels, weights)


# ---------------------------------------------------------------------------------------------------- pixel values


def invert(channels: list[tf.Tensor], _: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Inverts all values."""
    return [1 - channel for channel in channels]


def solarize(channels: list[tf.Tensor], thresholds: tf.Tensor) -> list[tf.Tensor]:
    """Inverts values greater than or equal to `thresholds`."""
    return [
        tf.where(channel < _per_image(thresholds), channel, 1 - channel) for channel in channels
    ]


def posterize(channels: list[tf.Tensor], bits: tf.Tensor) -> list[tf.Tensor]:
    """Posterizes images.

    Each value is converted to 8 bits, and only its `bits` most significant bits are kept. `bits` is
    [n], with values from 0 to 8, and is rounded.
    """
    step = _per_image(2.0 ** (8 - tf.round(bits)))
    return [tf.floor(_quantized(channel) / step) * step / (_LEVELS - 1) for channel in channels]


def contrast(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """Adjusts contrast as PIL does: the differences from the mean gray value are multiplied by `factors`."""
    mean = _per_image(
        tf.round(tf.reduce_mean(_gray(channels), [1, 2]) * (_LEVELS - 1)) / (_LEVELS - 1)
    )
    return data_util.clip([mean + _per_image(factors) * (channel - mean) for channel in channels])


def color(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """Adjusts saturation as PIL does: the differences from the grayscale image are multiplied by `factors`."""
    gray = _gray(channels)
    return data_util.clip([gray + _per_image(factors) * (channel - gray) for channel in channels])


def _gray(channels: list[tf.Tensor]) -> tf.Tensor:
    red, green, blue = channels
    return 0.299 * red + 0.587 * green + 0.114 * blue


def autocontrast(channels: list[tf.Tensor], _: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Stretches each color channel of an image to the range [0, 1]. Constant channels are unchanged."""

    def stretch(channel):
        low, high = (
            reduce(channel, [1, 2], keepdims=True) for reduce in (tf.reduce_min, tf.reduce_max)
        )
        return tf.where(high > low, (channel - low) / tf.maximum(high - low, 1 / _LEVELS), channel)

    return [stretch(channel) for channel in channels]


def equalize(channels: list[tf.Tensor], _: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Equalizes each color's 256-level histogram, as PIL does."""

    def equalize_images(images):
        levels = tf.cast(_quantized(images), tf.int32)
        flat = tf.reshape(levels, [tf.shape(levels)[0], -1])
        counts = tf.math.bincount(flat, minlength=_LEVELS, maxlength=_LEVELS, axis=-1)
        highest = tf.reduce_max(flat, 1)
        step = (tf.reduce_sum(counts, 1) - tf.gather(counts, highest, batch_dims=1))[
            :, tf.newaxis
        ] // (_LEVELS - 1)
        table = (tf.cumsum(counts, 1, exclusive=True) + step // 2) // tf.maximum(step, 1)
        table = tf.where(step > 0, tf.clip_by_value(table, 0, _LEVELS - 1), tf.range(_LEVELS))
        return tf.cast(tf.gather(table, levels, batch_dims=1), images.dtype) / (_LEVELS - 1)

    return _apply_to_batch(equalize_images, channels)


# ------------------------------------------------------------------------------------------------ random operators

# The paper lists these operators (Figure 4; B.2) but does not specify their parameter ranges. The
# default ranges are our choice.


def random_rot90(
    channels: list[tf.Tensor], seeds: tf.Tensor, turns: tuple[int, ...] = (1, 2, 3)
) -> list[tf.Tensor]:
    """Rotates each square image counterclockwise by a number of quarter turns sampled from `turns`."""
    indices = tf.cast(rng.uniforms(seeds, 1)[:, 0] * len(turns), tf.int32)
    rotations = [lambda channels, _, turn=turn: rot90(channels, turn) for turn in turns]
    return data_util.switch_per_image(indices, rotations, channels, seeds)


def random_cutout(
    channels: list[tf.Tensor], seeds: tf.Tensor, fraction: float = 0.5
) -> list[tf.Tensor]:
    """Fills a randomly placed square with gray. The square's side is `fraction` times the image height."""
    height, width = channels[0].shape[1:]
    draws = rng.uniforms(seeds, 2)
    return cutout(channels, draws[:, 0] * height, draws[:, 1] * width, round(fraction * height))


def random_noise(
    channels: list[tf.Tensor], seeds: tf.Tensor, deviations: tuple[float, float] = (0.05, 0.25)
) -> list[tf.Tensor]:
    """Adds Gaussian noise, with a standard deviation drawn from the range `deviations` for each image."""
    shape = channels[0].shape[1:]
    draws = rng.normals(seeds, 3 * shape.num_elements())
    low, high = deviations
    deviation = (low + (high - low) * rng.uniforms(rng.nth_seed(seeds, 1, rng.DRAW), 1))[
        :, :, tf.newaxis
    ]
    return data_util.clip(
        [
            channel + deviation * tf.reshape(channel_draws, [-1, *shape])
            for channel, channel_draws in zip(channels, tf.split(draws, 3, 1))
        ]
    )


def random_blur(channels: list[tf.Tensor], seeds: tf.Tensor) -> list[tf.Tensor]:
    """Blurs each image with a random sigma, as `data_util.batch_random_blur` does on the device.

    The kernel size is a tenth of the image height, but at least three pixels.
    """
    sigma = data_util.blur_sigma(rng.uniforms(seeds, 1)[:, 0])
    blurred = data_util.gaussian_blur(
        tf.stack(channels, -1), max(channels[0].shape[1] // 10, 2), sigma
    )
    return data_util.clip(data_util.to_channels(blurred))


def random_motion_blur(
    channels: list[tf.Tensor], seeds: tf.Tensor, fraction: float = 0.1
) -> list[tf.Tensor]:
    """Applies motion blur with a random angle and a random length from 1 to max(`fraction` * height, 3) pixels."""
    max_length = max(round(fraction * channels[0].shape[1]), 3)
    draws = rng.uniforms(seeds, 2)
    return motion_blur(
        channels, 180 * draws[:, 0], 1 + (max_length - 1) * draws[:, 1], max_length // 2 * 2 + 1
    )


def random_resized_crop(
    channels: list[tf.Tensor],
    seeds: tf.Tensor,
    area_range: tuple[float, float] = (0.08, 1.0),
    flip_probability: float = 0.5,
) -> list[tf.Tensor]:
    """Applies a second random crop, resize and flip to images that are already cropped ("crop" in Figure 5)."""
    height, width = channels[0].shape[1:]

    def crop(image_and_seed):
        image, seed = image_and_seed
        window = data_util.random_window(tf.shape(image), seed, area_range)
        return data_util.resize_window(image, *window, height, width)

    images = tf.map_fn(crop, (tf.stack(channels, -1), seeds), fn_output_signature=channels[0].dtype)
    channels = data_util.clip(data_util.to_channels(images))
    is_flipped = tf.cast(
        rng.uniforms(rng.nth_seed(seeds, 1, rng.DRAW), 1)[:, 0] < flip_probability, tf.int32
    )
    return data_util.switch_per_image(
        is_flipped, (data_util.identity, data_util.flip_horizontally), channels, seeds
    )
