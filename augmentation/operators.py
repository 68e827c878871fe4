"""Image operators of the paper's studies and of AutoAugment, without chance: what is drawn comes as an argument.

Images are planes: red, green and blue, three float tensors [n, height, width] in [0, 1]; results are, too. Arithmetic
on whole planes is faster than on interleaved colours, and n images share the cost of starting an operation, which at 32
pixels is most of it. Amounts are one an image, [n]. Operators that follow PIL round as it does up to two levels of 256.

What tensorflow-addons has is taken from there, where it is installed (up to TensorFlow 2.15), and else done by core
TensorFlow, equally.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings

import tensorflow as tf

import data_util
from runtime import rng

# -------------------------------------------------------------------------------- the other operators of the studies

# The paper names them (Figure 4; B.2) without their ranges, which are ours.


def random_rot90(planes, seeds, turns=(1, 2, 3)):
    """Rotation of square images by 90 degrees times one of `turns`, counter-clockwise."""
    kinds = tf.cast(rng.uniforms(seeds, 1)[:, 0] * len(turns), tf.int32)
    rotations = [lambda planes, _, count=count: rot90(planes, count) for count in turns]
    return data_util.switch_per_image(kinds, rotations, planes, seeds)


def random_cutout(planes, seeds, share=0.5):
    """A grey square anywhere, its centre in the image, its sides `share` of the image's height."""
    height, width = planes[0].shape[1:]
    draws = rng.uniforms(seeds, 2)
    return cutout(planes, draws[:, 0] * height, draws[:, 1] * width, round(share * height))


def random_noise(planes, seeds, deviations=(0.05, 0.25)):
    """Gaussian noise on every value, of a standard deviation drawn for each image from the range `deviations`."""
    shape = planes[0].shape[1:]
    draws = rng.normals(seeds, 3 * shape.num_elements())
    low, high = deviations
    deviation = (low + (high - low) * rng.uniforms(rng.nth_seed(seeds, 1, rng.PART), 1))[:, :, tf.newaxis]
    noise = tf.split(draws, 3, 1)
    return data_util.clip([plane + deviation * tf.reshape(part, [-1, *shape]) for plane, part in zip(planes, noise)])


def random_blur(planes, seeds, sigmas=(0.1, 2.0)):
    """Gaussian blur with a sigma drawn for each image; as `batch_random_blur`, which runs on the device.

    The kernel is a tenth of the image's height, and three pixels at least.
    """
    low, high = sigmas
    sigma = low + (high - low) * rng.uniforms(seeds, 1)[:, 0]
    blurred = data_util.gaussian_blur(tf.stack(planes, -1), max(planes[0].shape[1] // 10, 2), sigma)
    return data_util.clip(tf.unstack(blurred, axis=-1))


def random_motion_blur(planes, seeds, share=0.1):
    """Blur along a line at any angle, of up to `share` of the image's height, and of three pixels at least."""
    longest = max(round(share * planes[0].shape[1]), 3)
    draws = rng.uniforms(seeds, 2)
    return motion_blur(planes, 180 * draws[:, 0], 1 + (longest - 1) * draws[:, 1], longest // 2 * 2 + 1)


def random_resized_crop(planes, seeds, area_range=(0.08, 1.0), flip_probability=0.5):
    """Random crop, resize and flip of images that are views already (Figure 5, "crop")."""
    height, width = planes[0].shape[1:]

    def crop(row):
        image, seed = row
        return data_util.random_crop_and_resize(image, seed, height, width, area_range=area_range)

    images = tf.map_fn(crop, (tf.stack(planes, -1), seeds), fn_output_signature=planes[0].dtype)
    planes = tf.unstack(tf.ensure_shape(images, [planes[0].shape[0], height, width, 3]), axis=-1)
    chosen = tf.cast(rng.uniforms(rng.nth_seed(seeds, 1, rng.PART), 1)[:, 0] < flip_probability, tf.int32)
    return data_util.switch_per_image(chosen, (data_util._identity, lambda planes, _: data_util.flip(planes)), data_util.clip(planes), seeds)


_LEVELS = 256
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # PIL's, over 13


@functools.cache
def addons():
    """tensorflow_addons.image, or None where it is not installed. It takes a while to load, and warns of its end."""
    if importlib.util.find_spec("tensorflow_addons") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow_addons as tfa
    return tfa.image


def _each(function, planes, *amounts):
    """`function` of all planes as one-channel images [3 n, h, w, 1], and of amounts [3 n]."""
    stacked = tf.concat(planes, 0)[..., tf.newaxis]
    done = function(stacked, *(tf.concat([amount] * len(planes), 0) for amount in amounts))
    return tf.split(tf.squeeze(tf.ensure_shape(done, stacked.shape), -1), len(planes), 0)


def _column(amounts):
    """[n] -> [n, 1, 1]."""
    return amounts[:, tf.newaxis, tf.newaxis]


def _quantized(plane):
    return tf.round(tf.clip_by_value(plane, 0.0, 1.0) * (_LEVELS - 1))


def _clip(planes):
    return [tf.clip_by_value(plane, 0.0, 1.0) for plane in planes]


# ------------------------------------------------------------------------------------------------------ positions


def rot90(planes, turns):
    """Rotation by `turns` (an int) times 90 degrees, counter-clockwise; for an odd number the sides change places."""
    for _ in range(turns % 4):
        planes = [tf.reverse(tf.transpose(plane, [0, 2, 1]), [1]) for plane in planes]
    return planes


def affine(planes, matrices, fill=0.5):
    """Every output pixel (x, y) is the pixel of the input that is nearest to (a x + b y + c, d x + e y + f).

    Args:
      planes: three tensors [n, h, w].
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

    return _each(of_addons if addons() else core, planes, transforms)


def shear_x(planes, amounts, fill=0.5):
    """Shear along the rows by `amounts`, in pixels a row."""
    return affine(planes, _matrices(amounts, b=amounts), fill)


def rotate(planes, degrees, fill=0.5):
    """Rotation about the centre by `degrees`, counter-clockwise."""
    angle = degrees * (math.pi / 180)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    x, y = (planes[0].shape[2] - 1) / 2, (planes[0].shape[1] - 1) / 2
    return affine(planes, _matrices(degrees, a=cosine, b=-sine, c=x - x * cosine + y * sine,
                                    d=sine, e=cosine, f=y - x * sine - y * cosine), fill)


def _matrices(amounts, **entries):
    """[n, 6] with the given entries (a to f), [n] each, and else the identity's."""
    return tf.stack([entries.get(name, tf.fill(tf.shape(amounts), float(name in "ae"))) for name in "abcdef"], 1)


# -------------------------------------------------------------------------------------------- parts and neighbours


def cutout(planes, rows, columns, side, fill=0.5):
    """A grey square of `side` pixels around (row, column), as far as it lies inside (DeVries and Taylor 2017)."""
    def near(centers, length):
        distance = tf.range(length, dtype=tf.float32)[tf.newaxis] - tf.floor(centers)[:, tf.newaxis]
        return (distance >= -(side // 2)) & (distance < side - side // 2)

    height, width = planes[0].shape[1:]
    hidden = near(rows, height)[:, :, tf.newaxis] & near(columns, width)[:, tf.newaxis]
    return [tf.where(hidden, tf.cast(fill, plane.dtype), plane) for plane in planes]


def _neighbours(plane, mode="SYMMETRIC"):
    """A function (dy, dx) of -1 to 1 that gives the plane shifted so far; beyond the edge it is mirrored."""
    padded = tf.pad(plane, [[0, 0], [1, 1], [1, 1]], mode)
    height, width = plane.shape[1:]
    return lambda dy, dx: padded[:, 1 + dy:1 + dy + height, 1 + dx:1 + dx + width]


def sobel(planes):
    """Sobel filtering: the length of each colour's gradient, 1 for an upright edge between 0 and 1, clipped there."""
    def lengths(plane):
        at = _neighbours(plane)
        across = sum(weight * (at(dy, 1) - at(dy, -1)) for dy, weight in ((-1, 1), (0, 2), (1, 1)))
        down = sum(weight * (at(1, dx) - at(-1, dx)) for dx, weight in ((-1, 1), (0, 2), (1, 1)))
        return tf.sqrt(tf.square(across) + tf.square(down)) / 4
    return _clip([lengths(plane) for plane in planes])


def sharpness(planes, factors):
    """PIL's: 0 smooths by a 3 x 3 filter, 1 leaves alone, more sharpens; pixels at the edge stay."""
    def blend(plane):
        at = _neighbours(plane)
        smooth = sum(_SMOOTH[dy][dx] * at(dy - 1, dx - 1) for dy in range(3) for dx in range(3)) / 13
        height, width = plane.shape[1:]
        inner = tf.pad(tf.ones([height - 2, width - 2], tf.bool), [[1, 1], [1, 1]])
        smooth = tf.where(inner, smooth, plane)
        return smooth + _column(factors) * (plane - smooth)
    return _clip([blend(plane) for plane in planes])


def motion_blur(planes, degrees, lengths, size):
    """The mean along a line through each pixel; beyond the edge the image is mirrored.

    Args:
      planes: three tensors [n, h, w].
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
        # Every image is a channel with a filter of its own.
        result = tf.nn.depthwise_conv2d(
            tf.transpose(padded, [1, 2, 0])[tf.newaxis], tf.transpose(weights, [1, 2, 0])[..., tf.newaxis],
            [1, 1, 1, 1], "VALID")
        return tf.transpose(result[0], [2, 0, 1])[:-1, ..., tf.newaxis]

    return _each(filtered, planes, weights)


# --------------------------------------------------------------------------------------------------------- values


def invert(planes):
    """1 - value."""
    return [1 - plane for plane in planes]


def solarize(planes, thresholds):
    """Values from `thresholds` on are inverted."""
    return [tf.where(plane < _column(thresholds), plane, 1 - plane) for plane in planes]


def posterize(planes, bits):
    """Keeps the upper `bits` (0 to 8, int32 [n]) of the 8 of each value."""
    step = _column(tf.cast(tf.bitwise.left_shift(1, 8 - bits), tf.float32))
    return [tf.floor(_quantized(plane) / step) * step / (_LEVELS - 1) for plane in planes]


def contrast(planes, factors):
    """PIL's: distance from the mean of the grey image, times `factors`."""
    mean = _column(tf.round(tf.reduce_mean(_grey(planes), [1, 2]) * (_LEVELS - 1)) / (_LEVELS - 1))
    return _clip([mean + _column(factors) * (plane - mean) for plane in planes])


def color(planes, factors):
    """PIL's: distance from the grey image, times `factors`."""
    grey = _grey(planes)
    return _clip([grey + _column(factors) * (plane - grey) for plane in planes])


def _grey(planes):
    red, green, blue = planes
    return 0.299 * red + 0.587 * green + 0.114 * blue


def autocontrast(planes):
    """Each colour stretched so that its lowest value becomes 0 and its highest 1; one that is flat stays."""
    def stretch(plane):
        low, high = (reduce(plane, [1, 2], keepdims=True) for reduce in (tf.reduce_min, tf.reduce_max))
        return tf.where(high > low, (plane - low) / tf.maximum(high - low, 1 / _LEVELS), plane)
    return [stretch(plane) for plane in planes]


def equalize(planes):
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

    return _each(of_addons if addons() else core, planes)
