"""Image operators of the paper's studies and of AutoAugment.

Images are channels, as in `data_util`, in [0, 1]; results are, too. The first part is deterministic: amounts, one per
image [n], are arguments. Operators that follow PIL agree with it within two of 256 levels. The second part draws the
amounts.

tensorflow-addons is used for what it has, where it is installed (up to TensorFlow 2.15); otherwise core TensorFlow
computes the same.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from types import ModuleType

import tensorflow as tf

import data_util
from runtime import rng

_LEVELS = 256
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # PIL's, over 13


@functools.cache
def addons() -> ModuleType | None:
    """tensorflow_addons.image, or None where it is not installed. It takes a while to load, and warns of its end."""
    if importlib.util.find_spec("tensorflow_addons") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow_addons as tfa
    return tfa.image


def _each(function, channels, *amounts):
    """`function` of all channels as one-channel images [3 n, h, w, 1], and of amounts [3 n]."""
    stacked = tf.concat(channels, 0)[..., tf.newaxis]
    done = function(stacked, *(tf.concat([amount] * len(channels), 0) for amount in amounts))
    return tf.split(tf.squeeze(tf.ensure_shape(done, stacked.shape), -1), len(channels), 0)


def _column(amounts):
    """[n] -> [n, 1, 1]."""
    return amounts[:, tf.newaxis, tf.newaxis]


def _quantized(channel):
    return tf.round(tf.clip_by_value(channel, 0.0, 1.0) * (_LEVELS - 1))


# ------------------------------------------------------------------------------------------------------ positions


def rot90(channels: list[tf.Tensor], turns: int) -> list[tf.Tensor]:
    """Rotation by `turns` (an int) times 90 degrees, counter-clockwise; for an odd number the sides change places."""
    for _ in range(turns % 4):
        channels = [tf.reverse(tf.transpose(channel, [0, 2, 1]), [1]) for channel in channels]
    return channels


def affine(channels: list[tf.Tensor], matrices: tf.Tensor, fill: float = 0.5) -> list[tf.Tensor]:
    """Every output pixel (x, y) is the pixel of the input that is nearest to (a x + b y + c, d x + e y + f).

    Args:
      channels: three tensors [n, h, w].
      matrices: [n, 6], rows a, b, c, d, e, f, in pixels.
      fill: value of what lies outside.
    """
    transforms = tf.concat([matrices, tf.zeros_like(matrices[:, :2])], 1)

    def core(images, transforms):
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images, transforms=transforms, output_shape=tf.shape(images)[1:3], fill_value=fill,
            interpolation="NEAREST", fill_mode="CONSTANT")

    def of_addons(images, transforms):
        return addons().transform(images, transforms, "nearest", "constant", fill_value=fill)

    return _each(of_addons if addons() else core, channels, transforms)


def shear_x(channels: list[tf.Tensor], amounts: tf.Tensor, fill: float = 0.5) -> list[tf.Tensor]:
    """Shear along the rows by `amounts`, in pixels a row."""
    return affine(channels, _matrices(amounts, b=amounts), fill)


def rotate(channels: list[tf.Tensor], degrees: tf.Tensor, fill: float = 0.5) -> list[tf.Tensor]:
    """Rotation about the centre by `degrees`, counter-clockwise."""
    angle = degrees * (math.pi / 180)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    x, y = (channels[0].shape[2] - 1) / 2, (channels[0].shape[1] - 1) / 2
    return affine(channels, _matrices(degrees, a=cosine, b=-sine, c=x - x * cosine + y * sine,
                                    d=sine, e=cosine, f=y - x * sine - y * cosine), fill)


def _matrices(amounts, **entries):
    """[n, 6] with the given entries (a to f), [n] each, and else the identity's."""
    return tf.stack([entries.get(name, tf.fill(tf.shape(amounts), float(name in "ae"))) for name in "abcdef"], 1)


# -------------------------------------------------------------------------------------------- parts and neighbours


def cutout(channels: list[tf.Tensor], rows: tf.Tensor, columns: tf.Tensor, side: int, fill: float = 0.5
          ) -> list[tf.Tensor]:
    """A grey square of `side` pixels around (row, column), as far as it lies inside (DeVries and Taylor 2017)."""
    def near(centers, length):
        distance = tf.range(length, dtype=tf.float32)[tf.newaxis] - tf.floor(centers)[:, tf.newaxis]
        return (distance >= -(side // 2)) & (distance < side - side // 2)

    height, width = channels[0].shape[1:]
    hidden = near(rows, height)[:, :, tf.newaxis] & near(columns, width)[:, tf.newaxis]
    return [tf.where(hidden, tf.cast(fill, channel.dtype), channel) for channel in channels]


def _neighbours(channel, mode="SYMMETRIC"):
    """A function (dy, dx) of -1 to 1 that gives the channel shifted so far; beyond the edge it is mirrored."""
    padded = tf.pad(channel, [[0, 0], [1, 1], [1, 1]], mode)
    height, width = channel.shape[1:]
    return lambda dy, dx: padded[:, 1 + dy:1 + dy + height, 1 + dx:1 + dx + width]


def sobel(channels: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sobel filtering: the length of each colour's gradient, 1 for an upright edge between 0 and 1, clipped there."""
    def lengths(channel):
        at = _neighbours(channel)
        across = sum(weight * (at(dy, 1) - at(dy, -1)) for dy, weight in ((-1, 1), (0, 2), (1, 1)))
        down = sum(weight * (at(1, dx) - at(-1, dx)) for dx, weight in ((-1, 1), (0, 2), (1, 1)))
        return tf.sqrt(tf.square(across) + tf.square(down)) / 4
    return data_util.clip([lengths(channel) for channel in channels])


def sharpness(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """PIL's: 0 smooths by a 3 x 3 filter, 1 leaves alone, more sharpens; pixels at the edge stay."""
    def blend(channel):
        at = _neighbours(channel)
        smooth = sum(_SMOOTH[dy][dx] * at(dy - 1, dx - 1) for dy in range(3) for dx in range(3)) / 13
        height, width = channel.shape[1:]
        inner = tf.pad(tf.ones([height - 2, width - 2], tf.bool), [[1, 1], [1, 1]])
        smooth = tf.where(inner, smooth, channel)
        return smooth + _column(factors) * (channel - smooth)
    return data_util.clip([blend(channel) for channel in channels])


def motion_blur(channels: list[tf.Tensor], degrees: tf.Tensor, lengths: tf.Tensor, size: int) -> list[tf.Tensor]:
    """The mean along a line through each pixel; beyond the edge the image is mirrored.

    Args:
      channels: three tensors [n, h, w].
      degrees: [n], the line's angle with the rows, counter-clockwise.
      lengths: [n] in pixels, at least 1.
      size: of the filter, odd, in pixels; no line is longer. The image must be larger than half of it.
    """
    radius, angle = size // 2, degrees * (math.pi / 180)
    offsets = tf.range(-radius, radius + 1, dtype=tf.float32)
    x, y = offsets[tf.newaxis, tf.newaxis, :], -offsets[tf.newaxis, :, tf.newaxis]
    cosine, sine = _column(tf.cos(angle)), _column(tf.sin(angle))
    along, across = x * cosine + y * sine, y * cosine - x * sine
    weights = tf.clip_by_value(1 - tf.abs(across), 0.0, 1.0) * tf.clip_by_value(
        (_column(lengths) + 1) / 2 - tf.abs(along), 0.0, 1.0)
    weights /= tf.reduce_sum(weights, [1, 2], keepdims=True)

    def filtered(images, weights):
        # With an empty one more: oneDNN's kernel fails if there are none.
        images, weights = (tf.pad(values, [[0, 1], [0, 0], [0, 0]]) for values in (images[..., 0], weights))
        padded = tf.pad(images, [[0, 0], [radius, radius], [radius, radius]], "SYMMETRIC")
        # Each image is a channel with its own filter.
        result = tf.nn.depthwise_conv2d(
            tf.transpose(padded, [1, 2, 0])[tf.newaxis], tf.transpose(weights, [1, 2, 0])[..., tf.newaxis],
            [1, 1, 1, 1], "VALID")
        return tf.transpose(result[0], [2, 0, 1])[:-1, ..., tf.newaxis]

    return _each(filtered, channels, weights)


# --------------------------------------------------------------------------------------------------------- values


def invert(channels: list[tf.Tensor]) -> list[tf.Tensor]:
    """1 - value."""
    return [1 - channel for channel in channels]


def solarize(channels: list[tf.Tensor], thresholds: tf.Tensor) -> list[tf.Tensor]:
    """Values from `thresholds` on are inverted."""
    return [tf.where(channel < _column(thresholds), channel, 1 - channel) for channel in channels]


def posterize(channels: list[tf.Tensor], bits: tf.Tensor) -> list[tf.Tensor]:
    """Keeps the upper `bits` (0 to 8, int32 [n]) of the 8 of each value."""
    step = _column(tf.cast(tf.bitwise.left_shift(1, 8 - bits), tf.float32))
    return [tf.floor(_quantized(channel) / step) * step / (_LEVELS - 1) for channel in channels]


def contrast(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """PIL's: distance from the mean of the grey image, times `factors`."""
    mean = _column(tf.round(tf.reduce_mean(_grey(channels), [1, 2]) * (_LEVELS - 1)) / (_LEVELS - 1))
    return data_util.clip([mean + _column(factors) * (channel - mean) for channel in channels])


def color(channels: list[tf.Tensor], factors: tf.Tensor) -> list[tf.Tensor]:
    """PIL's: distance from the grey image, times `factors`."""
    grey = _grey(channels)
    return data_util.clip([grey + _column(factors) * (channel - grey) for channel in channels])


def _grey(channels):
    red, green, blue = channels
    return 0.299 * red + 0.587 * green + 0.114 * blue


def autocontrast(channels: list[tf.Tensor]) -> list[tf.Tensor]:
    """Each colour stretched so that its lowest value becomes 0 and its highest 1; one that is flat stays."""
    def stretch(channel):
        low, high = (reduce(channel, [1, 2], keepdims=True) for reduce in (tf.reduce_min, tf.reduce_max))
        return tf.where(high > low, (channel - low) / tf.maximum(high - low, 1 / _LEVELS), channel)
    return [stretch(channel) for channel in channels]


def equalize(channels: list[tf.Tensor]) -> list[tf.Tensor]:
    """PIL's: each colour's 256 levels mapped so that all are about equally frequent."""
    def core(images):
        levels = tf.cast(_quantized(images), tf.int32)
        counts = tf.math.bincount(tf.reshape(levels, [tf.shape(levels)[0], -1]), minlength=_LEVELS, maxlength=_LEVELS,
                                  axis=-1)
        highest = tf.reduce_max(tf.where(counts > 0, tf.range(_LEVELS), 0), 1)
        step = (tf.reduce_sum(counts, 1) - tf.gather(counts, highest, batch_dims=1))[:, tf.newaxis] // (_LEVELS - 1)
        table = (tf.cumsum(counts, 1, exclusive=True) + step // 2) // tf.maximum(step, 1)
        table = tf.where(step > 0, tf.clip_by_value(table, 0, _LEVELS - 1), tf.range(_LEVELS))
        return tf.cast(tf.gather(table, levels, batch_dims=1), images.dtype) / (_LEVELS - 1)

    def of_addons(images):
        return tf.cast(addons().equalize(tf.cast(_quantized(images), tf.uint8)), images.dtype) / (_LEVELS - 1)

    return _each(of_addons if addons() else core, channels)


# ------------------------------------------------------------------------------------------------ random operators

# The paper names them (Figure 4; B.2) without their ranges, which are ours.


def random_rot90(channels: list[tf.Tensor], seeds: tf.Tensor, turns: tuple[int, ...] = (1, 2, 3)) -> list[tf.Tensor]:
    """Rotation of square images by 90 degrees times one of `turns`, counter-clockwise."""
    indices = tf.cast(rng.uniforms(seeds, 1)[:, 0] * len(turns), tf.int32)
    rotations = [lambda channels, _, count=count: rot90(channels, count) for count in turns]
    return data_util.switch_per_image(indices, rotations, channels, seeds)


def random_cutout(channels: list[tf.Tensor], seeds: tf.Tensor, share: float = 0.5) -> list[tf.Tensor]:
    """A grey square anywhere, its centre in the image, its sides `share` of the image's height."""
    height, width = channels[0].shape[1:]
    draws = rng.uniforms(seeds, 2)
    return cutout(channels, draws[:, 0] * height, draws[:, 1] * width, round(share * height))


def random_noise(channels: list[tf.Tensor], seeds: tf.Tensor, deviations: tuple[float, float] = (0.05, 0.25)
                ) -> list[tf.Tensor]:
    """Gaussian noise on every value, of a standard deviation drawn for each image from the range `deviations`."""
    shape = channels[0].shape[1:]
    draws = rng.normals(seeds, 3 * shape.num_elements())
    low, high = deviations
    deviation = (low + (high - low) * rng.uniforms(rng.nth_seed(seeds, 1, rng.DRAW), 1))[:, :, tf.newaxis]
    noise = tf.split(draws, 3, 1)
    noise = [deviation * tf.reshape(part, [-1, *shape]) for part in noise]
    return data_util.clip([channel + part for channel, part in zip(channels, noise)])


def random_blur(channels: list[tf.Tensor], seeds: tf.Tensor, sigmas: tuple[float, float] = (0.1, 2.0)
               ) -> list[tf.Tensor]:
    """Gaussian blur with a sigma drawn for each image; as `batch_random_blur`, which runs on the device.

    The kernel is a tenth of the image's height, and three pixels at least.
    """
    low, high = sigmas
    sigma = low + (high - low) * rng.uniforms(seeds, 1)[:, 0]
    blurred = data_util.gaussian_blur(tf.stack(channels, -1), max(channels[0].shape[1] // 10, 2), sigma)
    return data_util.clip(tf.unstack(blurred, axis=-1))


def random_motion_blur(channels: list[tf.Tensor], seeds: tf.Tensor, share: float = 0.1) -> list[tf.Tensor]:
    """Blur along a line at any angle, of up to `share` of the image's height, and of three pixels at least."""
    longest = max(round(share * channels[0].shape[1]), 3)
    draws = rng.uniforms(seeds, 2)
    return motion_blur(channels, 180 * draws[:, 0], 1 + (longest - 1) * draws[:, 1], longest // 2 * 2 + 1)


def random_resized_crop(channels: list[tf.Tensor], seeds: tf.Tensor, area_range: tuple[float, float] = (0.08, 1.0),
                        flip_probability: float = 0.5) -> list[tf.Tensor]:
    """Random crop, resize and flip of images that are views already (Figure 5, "crop")."""
    height, width = channels[0].shape[1:]

    def crop(row):
        image, seed = row
        return data_util.random_crop_and_resize(image, seed, height, width, area_range=area_range)

    images = tf.map_fn(crop, (tf.stack(channels, -1), seeds), fn_output_signature=channels[0].dtype)
    channels = tf.unstack(tf.ensure_shape(images, [channels[0].shape[0], height, width, 3]), axis=-1)
    chosen = tf.cast(rng.uniforms(rng.nth_seed(seeds, 1, rng.DRAW), 1)[:, 0] < flip_probability, tf.int32)
    functions = data_util.identity, data_util.flip_horizontally
    return data_util.switch_per_image(chosen, functions, data_util.clip(channels), seeds)
