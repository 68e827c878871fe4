"""SimCLR's image operators and its augmentation policy (paper, Appendix A).

Images are float, nominally in [0, 1]: one image is [height, width, 3]. Operators that change many images at once, each
in its own way, take channels: red, green and blue, three tensors [n, height, width]. Arithmetic on whole channels is
faster than on interleaved colors, and n images share the cost of starting an operation.

Random operators take `seed`, an integer tensor [2] for one image or [n, 2] for many, and are functions of it alone: the
same seed gives the same result, eager or inside `tf.data`, whatever the other images of the batch are. The operators of
the paper's other studies are in `augmentation`.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from runtime import rng

CROP_PROPORTION = 0.875  # evaluation crops this share of the shorter side (224 of 256)
_TINY = 1e-12  # far below any difference between colours; in place of a division by 0


# ------------------------------------------------------------------------------------------------- crop and flip


def resize_bicubic(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Bicubic resize of one image or a batch, without antialiasing; may overshoot [0, 1]."""
    resized = tf.image.resize(image, [height, width], tf.image.ResizeMethod.BICUBIC)
    return tf.cast(resized, image.dtype)


def random_crop_window(image_shape: tf.Tensor, seed: tf.Tensor, area_range: tuple[float, float] = (0.08, 1.0),
                       aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3)
                      ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """A random window (Inception crop; paper, Appendix A).

    As in the original, a window covers at least a tenth of the image, so that areas between 8 % and 10 % are drawn
    again; after 100 draws that do not fit, it is the whole image.

    Args:
      image_shape: int tensor [3], height, width, channels.
      seed: int tensor [2].
      area_range: share of the image's area.
      aspect_ratio_range: width / height of the window, in pixels.

    Returns:
      offset_y, offset_x, height, width: int32 scalars, in pixels.
    """
    begin, size = random_window(image_shape, seed, area_range, aspect_ratio_range)
    return begin[0], begin[1], size[0], size[1]


def random_window(image_shape: tf.Tensor, seed: tf.Tensor, area_range: tuple[float, float] = (0.08, 1.0),
                  aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3)) -> tuple[tf.Tensor, tf.Tensor]:
    """The same as what `tf.slice` takes: begin [3] and size [3], all channels."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        image_shape, tf.constant([[[0.0, 0.0, 1.0, 1.0]]]), seed=seed, min_object_covered=0.1,
        aspect_ratio_range=aspect_ratio_range, area_range=area_range, max_attempts=100,
        use_image_if_no_bounding_boxes=True)
    return begin, size


def resize_window(image: tf.Tensor, begin: tf.Tensor, size: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """`tf.slice(image, begin, size)`, resized bicubically.

    Only the window is converted to float: a photograph is several times as large as its view.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      begin: int32 [3].
      size: int32 [3].
      height: of the result.
      width: of the result.

    Returns:
      [height, width, 3] float32; may overshoot [0, 1].
    """
    window = tf.cast(tf.slice(image, begin, size), tf.float32)
    resized = tf.raw_ops.ResizeBicubic(images=window[tf.newaxis], size=[height, width], half_pixel_centers=True)
    resized = tf.ensure_shape(tf.squeeze(resized, 0), [height, width, 3])
    return resized * (1 / 255) if image.dtype == tf.uint8 else resized


def random_crop_and_resize(image: tf.Tensor, seed: tf.Tensor, height: int, width: int, **window: Any) -> tf.Tensor:
    """Random crop (`random_crop_window`, which takes `window`), resized as by `resize_window`."""
    return resize_window(image, *random_window(tf.shape(image), seed, **window), height, width)


def flip_horizontally(channels: list[tf.Tensor], seeds: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Exchanges left and right; `seeds` are not used."""
    del seeds
    return [tf.reverse(channel, [2]) for channel in channels]


def center_crop(image: tf.Tensor, height: int, width: int, crop_proportion: float) -> tf.Tensor:
    """The central window of aspect `width` / `height` that spans `crop_proportion` of the image, resized bicubically.

    Args:
      image: [h, w, 3], or a batch of one size [n, h, w, 3].
      height: output height in pixels.
      width: output width in pixels.
      crop_proportion: in (0, 1], share of the limiting side.

    Returns:
      [height, width, 3], or [n, height, width, 3].
    """
    size = tf.shape(image)[-3:-1]
    image_height, image_width = tf.unstack(tf.cast(size, tf.float32))
    aspect = width / height
    # The limiting side is the one that a window of this aspect fills first.
    window_height = tf.minimum(image_height, image_width / aspect)
    crop_height = tf.cast(tf.math.rint(crop_proportion * window_height), tf.int32)
    crop_width = tf.cast(tf.math.rint(crop_proportion * aspect * window_height), tf.int32)
    top, left = (size[0] - crop_height + 1) // 2, (size[1] - crop_width + 1) // 2
    crop = tf.image.crop_to_bounding_box(image, top, left, crop_height, crop_width)
    return resize_bicubic(crop, height, width)


# ------------------------------------------------------------------------------------------------------- channels


def to_channels(images: tf.Tensor) -> list[tf.Tensor]:
    """[n, h, w, c] -> c tensors [n, h, w]."""
    return tf.unstack(images, axis=-1)


def from_channels(channels: list[tf.Tensor]) -> tf.Tensor:
    """c tensors [n, h, w] -> [n, h, w, c]."""
    # In two steps: to stack along the last axis is to copy single numbers. As matrices, which are transposed fastest.
    height, width = channels[0].shape[1:]
    rows = tf.reshape(tf.stack(channels, axis=1), [-1, len(channels), height * width])
    return tf.reshape(tf.linalg.matrix_transpose(rows), [-1, height, width, len(channels)])


def clip(channels: list[tf.Tensor]) -> list[tf.Tensor]:
    """Clips all channels to [0, 1]."""
    return [tf.clip_by_value(channel, 0.0, 1.0) for channel in channels]


def switch_per_image(indices: tf.Tensor, functions: list[Callable], channels: list[tf.Tensor], arguments: tf.Tensor
                    ) -> list[tf.Tensor]:
    """Applies `functions[indices[i]]` to image i: a batched `tf.switch_case`.

    Args:
      indices: int32 [n].
      functions: functions of (channels, arguments); each is called once, with the images that have its index.
      channels: three tensors [n, h, w]. If n is statically 1, the batch is not partitioned.
      arguments: tensor [n, ...] of values that belong to the images, such as seeds or amounts.

    Returns:
      Three tensors [n, h, w].
    """
    shape = channels[0].shape
    if shape[0] == 1:
        return tf.switch_case(indices[0], [lambda f=function: list(f(channels, arguments)) for function in functions])
    columns = (*channels, arguments, tf.range(tf.shape(channels[0])[0]))
    *parts, places = (tf.dynamic_partition(column, indices, len(functions)) for column in columns)
    results = [function(part, part_rows) for function, *part, part_rows in zip(functions, *parts)]
    return [tf.ensure_shape(tf.dynamic_stitch(places, channel), shape) for channel in zip(*results)]


# --------------------------------------------------------------------------------------------------------- colour


# Every `adjust_*` takes channels and one amount an image, [n, 1, 1] or a scalar, and returns channels, not clipped.


def adjust_brightness(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Brightness multiplied by `factor` (SimCLR v2)."""
    return [channel * factor for channel in channels]


def shift_brightness(channels: list[tf.Tensor], shift: tf.Tensor) -> list[tf.Tensor]:
    """Brightness increased by `shift` (the paper, SimCLR v1)."""
    return [channel + shift for channel in channels]


def adjust_contrast(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Distance from each channel's mean multiplied by `factor`."""
    return [channel * factor + tf.reduce_mean(channel, [1, 2], keepdims=True) * (1 - factor) for channel in channels]


def _extremes(red, green, blue):
    """The highest and the lowest of the three colours of each pixel."""
    return tf.maximum(tf.maximum(red, green), blue), tf.minimum(tf.minimum(red, green), blue)


def adjust_saturation(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """HSV saturation s multiplied by `factor` >= 0, to s' <= 1: distances from the highest colour, times s' / s."""
    highest, lowest = _extremes(*channels)
    ratio = tf.minimum(factor, highest / tf.maximum(highest - lowest, _TINY))
    return [highest - (highest - channel) * ratio for channel in channels]


def adjust_hue(channels: list[tf.Tensor], turns: tf.Tensor) -> list[tf.Tensor]:
    """HSV hue turned by `turns` of the colour circle.

    The circle is a hexagon with sides of length 1. A pixel's distance from red along it is
    1 + (g + b - r - min) / (max - min), in one direction or the other as g >= b; each new colour is a function of the
    distance from its own corner.
    """
    red, green, blue = channels
    highest, lowest = _extremes(red, green, blue)
    chroma = highest - lowest
    distance = (green + blue - red - lowest) / tf.maximum(chroma, _TINY) + 1
    side = tf.sign(green - blue + _TINY)  # 1 also for a tie: opposite to red, it must not become 0.
    hue = side * distance + 6 * turns
    hue -= 6 * tf.floor(hue * (1 / 6))
    shares = tf.abs(hue - 3) - 1, 2 - tf.abs(hue - 2), 2 - tf.abs(hue - 4)
    return [lowest + chroma * share for share in clip(shares)]


def to_grayscale(channels: list[tf.Tensor], seeds: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Returns the luminance (BT.601), three times; `seeds` are not used."""
    del seeds
    red, green, blue = channels
    return [0.2989 * red + 0.5870 * green + 0.1140 * blue] * 3


def jitter_amounts(seeds: tf.Tensor, strength: float, brightness: str = "multiplicative"
                  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Uniform draws for the steps of `color_jitter`, and the order of the steps.

    Brightness, contrast and saturation are drawn from 1 +- 0.8 * strength (not below 0; additive brightness from
    +-0.8 * strength), hue from +-0.2 * strength (at most half a turn).

    Returns:
      [n, 4] float32 amounts of brightness, contrast, saturation, hue; [n, 4] int32 permutations of the four.
    """
    factors, hue = (max(1 - 0.8 * strength, 0.0), 1 + 0.8 * strength), min(0.2 * strength, 0.5)
    first = factors if brightness == "multiplicative" else (-0.8 * strength, 0.8 * strength)
    low, high = np.float32([first, factors, factors, (-hue, hue)]).T
    draws = rng.uniforms(seeds, 8)
    return draws[:, :4] * (high - low) + low, tf.math.top_k(draws[:, 4:], 4).indices


def color_jitter(channels: list[tf.Tensor], seeds: tf.Tensor, strength: float = 1.0, brightness: str = "multiplicative",
                 random_order: bool = True) -> list[tf.Tensor]:
    """Brightness, contrast, saturation (each 0.8 * strength) and hue (0.2 * strength), clipped after each step.

    Args:
      channels: three tensors [n, h, w].
      seeds: int tensor [n, 2].
      strength: 0 leaves the image alone (paper, Appendix A).
      brightness: multiplicative or additive.
      random_order: draw the order of the four for each image; otherwise it is the order listed here.

    Returns:
      channels in [0, 1], up to rounding.
    """
    if strength == 0:
        return channels
    amounts, order = jitter_amounts(seeds, strength, brightness)
    steps = (adjust_brightness if brightness == "multiplicative" else shift_brightness, adjust_contrast,
             adjust_saturation, adjust_hue)
    if random_order:
        amounts = tf.gather(amounts, order, batch_dims=1)
    if channels[0].shape[0] == 1:
        amounts = tf.unstack(amounts[0])  # Scalars are multiplied faster.
    else:
        amounts = tf.unstack(amounts[:, :, tf.newaxis, tf.newaxis], axis=1)
    for position in range(4):
        # Once a clip has removed the crop's overshoot, saturation and hue lead out of [0, 1] by rounding only.
        clipped = [_then_clip(step) if number < 2 or position == 0 else step for number, step in enumerate(steps)]
        if random_order:
            channels = switch_per_image(order[:, position], clipped, channels, amounts[position])
        else:
            channels = clipped[position](channels, amounts[position])
    return channels


def _then_clip(step):
    return lambda channels, amount: clip(step(channels, amount))


# ----------------------------------------------------------------------------------------------------------- blur


def gaussian_blur(image: tf.Tensor, kernel_size: int, sigma: float | tf.Tensor, padding: str = "SAME") -> tf.Tensor:
    """Gaussian blur by two one-dimensional convolutions.

    Args:
      image: [h, w, c], or a batch [n, h, w, c].
      kernel_size: int; the filter has 2 * (kernel_size // 2) + 1 taps.
      sigma: standard deviation in pixels: a scalar, or [n] with one for each image of a batch.
      padding: "SAME" (zeros outside) or "VALID".

    Returns:
      The blurred image or batch, of the same dtype.
    """
    batch = image if image.shape.rank == 4 else image[tf.newaxis]
    sigma = tf.broadcast_to(tf.cast(sigma, batch.dtype), tf.shape(batch)[:1])
    radius = kernel_size // 2
    offsets = tf.cast(tf.range(-radius, radius + 1), batch.dtype)
    taps = tf.exp(-tf.square(offsets) / (2 * tf.square(sigma[:, tf.newaxis])))
    taps /= tf.reduce_sum(taps, axis=1, keepdims=True)
    if padding == "SAME":
        batch = tf.pad(batch, [[0, 0], [radius, radius], [radius, radius], [0, 0]])
    for axis in (2, 1):
        batch = _correlate(batch, taps, axis)
    return batch if image.shape.rank == 4 else batch[0]


def _correlate(batch, taps, axis):
    """Valid correlation of every image of [n, h, w, c] along `axis` (1 or 2) with its own row of `taps` [n, k].

    A sum of shifted copies: convolution kernels are shared by the batch, and one sigma an image is wanted.
    """
    count = taps.shape[1]
    length = tf.shape(batch)[axis] - count + 1
    total = 0.0
    for tap in range(count):
        window = batch[:, tap:tap + length] if axis == 1 else batch[:, :, tap:tap + length]
        total += taps[:, tap, tf.newaxis, tf.newaxis, tf.newaxis] * window
    return total


def batch_random_blur(images: tf.Tensor, seed: tf.Tensor, height: int, probability: float = 0.5,
                      first_row: int | tf.Tensor = 0, total_rows: int | None = None) -> tf.Tensor:
    """Blurs every image with `probability`, each with its own sigma from 0.1 to 2 (paper, Appendix A).

    Args:
      images: [n, h, w, c] in [0, 1].
      seed: int tensor [2].
      height: pixels; the kernel is a tenth of it.
      probability: of blurring an image.
      first_row: where `images` stands in the batch of all replicas, so that its draws do not depend on their number.
      total_rows: size of that batch; None: n.

    Returns:
      [n, h, w, c], clipped to [0, 1].
    """
    seeds = tf.random.experimental.stateless_split(seed, 2)
    count = images.shape[0] or tf.shape(images)[0]
    shape = [count if total_rows is None else total_rows]
    sigma = tf.slice(tf.random.stateless_uniform(shape, seeds[0], 0.1, 2.0, images.dtype), [first_row], [count])
    chosen = tf.slice(tf.random.stateless_uniform(shape, seeds[1]), [first_row], [count]) < probability
    blurred = gaussian_blur(images, height // 10, sigma)
    return tf.clip_by_value(tf.where(chosen[:, tf.newaxis, tf.newaxis, tf.newaxis], blurred, images), 0.0, 1.0)


# ------------------------------------------------------------------------------------------------------- policies


@dataclasses.dataclass(frozen=True)
class Operator:
    """A random operator of a policy.

    Attributes:
      name: for people.
      function: (channels, seeds [n, 2]) -> channels of the same shape; three tensors [n, size, size] each.
      probability: share of the images that it is applied to.
    """

    name: str
    function: Callable
    probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """The augmentation of one view: a random crop, resized, and then `operators` in order.

    Attributes:
      area_range: smallest and largest share of the image that the crop covers.
      operators: applied to the crop, in order.
    """

    area_range: tuple[float, float] = (0.08, 1.0)
    operators: tuple[Operator, ...] = ()

    def then(self, *operators: Operator) -> Policy:
        """Returns this policy with further operators at its end."""
        return dataclasses.replace(self, operators=self.operators + operators)


def crop_and_flip_policy(min_area: float = 0.08, flip: bool = True) -> Policy:
    """Returns the policy of fine-tuning: random crop and flip (paper, B.5)."""
    return Policy((min_area, 1.0), (Operator("flip", flip_horizontally, 0.5),) * flip)


def simclr_policy(strength: float, brightness: str, min_area: float = 0.08, flip: bool = True) -> Policy:
    """Returns the default policy: crop, flip, color distortion (paper, Appendix A). Blur is applied on the device."""
    policy = crop_and_flip_policy(min_area, flip)
    return policy.then(*color_distortion(strength, brightness)) if strength > 0 else policy


def color_distortion(strength: float, brightness: str) -> tuple[Operator, Operator]:
    """Returns the operators of color distortion: jitter for 80 % of the images, grayscale for 20 % (paper, A)."""
    jitter = functools.partial(color_jitter, strength=strength, brightness=brightness)
    return Operator("color_jitter", jitter, 0.8), Operator("grayscale", to_grayscale, 0.2)


def crop_by_policy(image: tf.Tensor, policy: Policy, seed: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the crop of `policy`: image [h, w, 3], uint8 or float, to [size, size, 3] float32."""
    return random_crop_and_resize(image, seed, size, size, area_range=policy.area_range)


def apply_after_crop(channels: list[tf.Tensor], policy: Policy, seeds: tf.Tensor) -> list[tf.Tensor]:
    """Applies the operators of `policy` to many crops.

    Args:
      channels: three tensors [n, size, size], of crops by `crop_by_policy`.
      policy: a `Policy`.
      seeds: int tensor [n, 2], the same as for the crops; every operator gets its own from them.

    Returns:
      Three tensors [n, size, size] in [0, 1].
    """
    draws = rng.uniforms(seeds, len(policy.operators))
    for number, operator in enumerate(policy.operators):
        is_applied = tf.cast(draws[:, number] < operator.probability, tf.int32)
        channels = switch_per_image(is_applied, (identity, operator.function), channels,
                                    rng.nth_seed(seeds, number + 1))
    return clip(channels)


def identity(channels: list[tf.Tensor], _: tf.Tensor) -> list[tf.Tensor]:
    """Returns the channels: the operator that changes nothing."""
    return channels


def apply_policy(image: tf.Tensor, policy: Policy, seed: tf.Tensor, size: int) -> tf.Tensor:
    """Applies a policy to one image.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      policy: a `Policy`.
      seed: int tensor [2]; every operator gets its own seed from it.
      size: height and width of the result, in pixels.

    Returns:
      [size, size, 3] float32 in [0, 1].
    """
    channels = to_channels(crop_by_policy(image, policy, seed, size)[tf.newaxis])
    return tf.squeeze(from_channels(apply_after_crop(channels, policy, seed[tf.newaxis])), 0)


def preprocess_for_eval(image: tf.Tensor, size: int, crop: bool = True) -> tf.Tensor:
    """Centre crop (87.5 % of the shorter side; all of it where `crop` is False), resized to [size, size, 3].

    `image` may be a batch of one size, [n, h, w, 3].
    """
    image = center_crop(image, size, size, CROP_PROPORTION if crop else 1.0)
    return tf.clip_by_value(tf.ensure_shape(image, [None] * (image.shape.rank - 3) + [size, size, 3]), 0.0, 1.0)


def preprocess_image(image: tf.Tensor, height: int, width: int, is_training: bool = False,
                     color_jitter_strength: float = 0.0, test_crop: bool = True, *, seed: tf.Tensor | None = None,
                     brightness: str = "multiplicative") -> tf.Tensor:
    """One image, ready for the network.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      height: output height in pixels; must equal `width`.
      width: output width in pixels.
      is_training: random crop, flip and colour; else the evaluation crop.
      color_jitter_strength: 0 leaves colour alone.
      test_crop: whether evaluation crops at all.
      seed: int tensor [2], needed for training.
      brightness: multiplicative or additive.

    Returns:
      [height, width, 3] float32 in [0, 1].
    """
    if height != width:
        raise ValueError(f"only square outputs: {height} x {width}")
    image = tf.convert_to_tensor(image)
    if is_training:
        return apply_policy(image, simclr_policy(color_jitter_strength, brightness), seed, height)
    return preprocess_for_eval(tf.image.convert_image_dtype(image, tf.float32), height, test_crop)
