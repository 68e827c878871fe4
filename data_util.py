"""SimCLR's image operators and its augmentation policy (paper, Appendix A).

Images are float tensors, nominally in [0, 1]. A single image has the shape [height, width, 3].
Operators with per-image parameters take channels instead: three tensors [n, height, width] for red,
green and blue. Arithmetic on channels is faster than on interleaved colors, and batching amortizes
the overhead of each operation.

Random operators take `seed`, an integer tensor [2], or `seeds` [n, 2] for n images. They are
stateless: equal seeds give equal results, in eager mode and in `tf.data`, regardless of the other
images in the batch. The operators for the paper's other studies are in `augmentation`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from runtime import rng

# Fraction of the shorter side that the evaluation crop covers (224 of 256).
CROP_PROPORTION = 0.875
# As in the original, areas below 10 % are rejected if the minimum is the default of 8 %.
_ORIGINAL_MIN_AREA, _ORIGINAL_MIN_COVERED = 0.08, 0.1
_EPSILON = 1e-12  # Avoids division by 0; far smaller than any difference between color values.


# ------------------------------------------------------------------------------------------------- crop and flip


def random_window(
    image_shape: tf.Tensor,
    seed: tf.Tensor,
    area_range: tuple[float, float] = (0.08, 1.0),
    aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[tf.Tensor, tf.Tensor]:
    """Samples a random crop window (Inception crop; paper, Appendix A).

    With the default minimum area of 8 %, windows that cover less than 10 % of the image are
    rejected, as in the original. With other minimum areas, all areas in the range are accepted. If
    100 samples are rejected, the window is the whole image.

    Args:
      image_shape: int tensor [3]: height, width, channels.
      seed: int tensor [2].
      area_range: range of the window's area, as a fraction of the image's area.
      aspect_ratio_range: range of the window's aspect ratio (width / height).

    Returns:
      Arguments of `tf.slice`: begin, int32 [3], and size, int32 [3].
    """
    # The object is the whole image, so min_object_covered is the minimum area of the window.
    min_covered = (
        _ORIGINAL_MIN_COVERED if area_range[0] == _ORIGINAL_MIN_AREA else min(area_range[0], 1.0)
    )
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        image_shape,
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed=seed,
        min_object_covered=min_covered,
        aspect_ratio_range=aspect_ratio_range,
        area_range=area_range,
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, size


def resize_window(
    image: tf.Tensor, begin: tf.Tensor, size: tf.Tensor, height: int, width: int
) -> tf.Tensor:
    """Resizes the window `tf.slice(image, begin, size)` with bicubic interpolation.

    Only the window is converted to float, since photographs are usually much larger than their
    views.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      begin: int32 [3].
      size: int32 [3].
      height: output height in pixels.
      width: output width in pixels.

    Returns:
      [height, width, 3] float32; values may fall outside [0, 1].
    """
    window = tf.cast(tf.slice(image, begin, size), tf.float32)
    resized = tf.raw_ops.ResizeBicubic(
        images=window[tf.newaxis], size=[height, width], half_pixel_centers=True
    )
    resized = tf.ensure_shape(tf.squeeze(resized, 0), [height, width, 3])
    return resized * (1 / 255) if image.dtype == tf.uint8 else resized


def flip_horizontally(channels: list[tf.Tensor], seeds: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Flips images horizontally. `seeds` is ignored."""
    del seeds
    return [tf.reverse(channel, [2]) for channel in channels]


def center_crop(image: tf.Tensor, height: int, width: int, crop_proportion: float) -> tf.Tensor:
    """Crops a centered window with aspect ratio `width` / `height`, and resizes it with bicubic interpolation.

    Args:
      image: [h, w, 3], or a batch [n, h, w, 3].
      height: output height in pixels.
      width: output width in pixels.
      crop_proportion: height of the window divided by the height of the largest window with this
        aspect ratio, in (0, 1].

    Returns:
      [height, width, 3], or [n, height, width, 3].
    """
    size = tf.shape(image)[-3:-1]
    image_height, image_width = tf.unstack(tf.cast(size, tf.float32))
    aspect = width / height
    window_height = tf.minimum(image_height, image_width / aspect)
    crop_height = tf.cast(tf.math.rint(crop_proportion * window_height), tf.int32)
    crop_width = tf.cast(tf.math.rint(crop_proportion * aspect * window_height), tf.int32)
    top, left = (size[0] - crop_height + 1) // 2, (size[1] - crop_width + 1) // 2
    crop = tf.image.crop_to_bounding_box(image, top, left, crop_height, crop_width)
    resized = tf.image.resize(crop, [height, width], tf.image.ResizeMethod.BICUBIC)
    return tf.cast(resized, image.dtype)


# ------------------------------------------------------------------------------------------------------- channels


def to_channels(images: tf.Tensor) -> list[tf.Tensor]:
    """Splits images [n, h, w, c] into c tensors [n, h, w]."""
    return tf.unstack(images, axis=-1)


def from_channels(channels: list[tf.Tensor]) -> tf.Tensor:
    """Stacks c tensors [n, h, w] into images [n, h, w, c]."""
    # Stacking along the last axis copies elements one at a time; stacking rows and transposing
    # matrices is faster.
    height, width = channels[0].shape[1:]
    rows = tf.reshape(tf.stack(channels, axis=1), [-1, len(channels), height * width])
    return tf.reshape(tf.linalg.matrix_transpose(rows), [-1, height, width, len(channels)])


def clip(channels: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Clips all channels to [0, 1]."""
    return [tf.clip_by_value(channel, 0.0, 1.0) for channel in channels]


def switch_per_image(
    indices: tf.Tensor,
    functions: Sequence[Callable],
    channels: list[tf.Tensor],
    arguments: tf.Tensor,
) -> list[tf.Tensor]:
    """Applies `functions[indices[i]]` to image i, like a batched `tf.switch_case`.

    Args:
      indices: int32 [n].
      functions: functions that map (channels, arguments) to channels. Each function is called once,
        with all images that are assigned to it.
      channels: three tensors [n, h, w]. If n is statically known to be 1, the batch is not
        partitioned.
      arguments: tensor [n, ...] with one entry per image, such as seeds or amounts.

    Returns:
      Three tensors [n, h, w].
    """
    shape = channels[0].shape
    if shape[0] == 1:
        return tf.switch_case(
            indices[0], [lambda f=function: list(f(channels, arguments)) for function in functions]
        )
    tensors = (*channels, arguments, tf.range(tf.shape(channels[0])[0]))
    *partitions, rows = (
        tf.dynamic_partition(tensor, indices, len(functions)) for tensor in tensors
    )
    results = [
        function(part, part_arguments)
        for function, *part, part_arguments in zip(functions, *partitions)
    ]
    return [tf.ensure_shape(tf.dynamic_stitch(rows, channel), shape) for channel in zip(*results)]


def select_per_image(
    indices: tf.Tensor,
    functions: Sequence[Callable],
    channels: list[tf.Tensor],
    arguments: tf.Tensor,
) -> list[tf.Tensor]:
    """Returns the same as `switch_per_image`, but applies every function to all images.

    All shapes are static, so XLA can compile this function. On CPUs, `switch_per_image` is faster.
    """
    selected = functions[0](channels, arguments)
    for index, function in enumerate(functions[1:], 1):
        is_selected = tf.equal(indices, index)[:, tf.newaxis, tf.newaxis]
        selected = [
            tf.where(is_selected, *pair) for pair in zip(function(channels, arguments), selected)
        ]
    return selected


# ---------------------------------------------------------------------------------------------------------- color


# The functions `adjust_*` and `shift_*` take channels and an amount, which is either a scalar or a
# tensor [n, 1, 1] with one value per image. The returned channels are not clipped.


def adjust_brightness(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies the brightness by `factor` (SimCLR v2)."""
    return [channel * factor for channel in channels]


def shift_brightness(channels: list[tf.Tensor], shift: tf.Tensor) -> list[tf.Tensor]:
    """Adds `shift` to the brightness, as in the paper (SimCLR v1)."""
    return [channel + shift for channel in channels]


def adjust_contrast(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies the deviations from the mean of each channel by `factor`."""
    return [
        channel * factor + tf.reduce_mean(channel, [1, 2], keepdims=True) * (1 - factor)
        for channel in channels
    ]


def _extremes(red: tf.Tensor, green: tf.Tensor, blue: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the maximum and the minimum of red, green and blue for each pixel."""
    return tf.maximum(tf.maximum(red, green), blue), tf.minimum(tf.minimum(red, green), blue)


def adjust_saturation(channels: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies the HSV saturation by `factor` (>= 0), and limits the result to 1."""
    highest, lowest = _extremes(*channels)
    ratio = tf.minimum(factor, highest / tf.maximum(highest - lowest, _EPSILON))
    return [highest - (highest - channel) * ratio for channel in channels]


def adjust_hue(channels: list[tf.Tensor], turns: tf.Tensor) -> list[tf.Tensor]:
    """Rotates the HSV hue by `turns`, where 1 is a full turn of the color wheel.

    The color wheel is treated as a hexagon with sides of length 1. A color's distance from red
    along the hexagon is 1 + (g + b - r - min) / (max - min), toward green if g >= b, otherwise
    toward blue. Each output channel is a function of the hue's distance from that channel's corner.
    """
    red, green, blue = channels
    highest, lowest = _extremes(red, green, blue)
    chroma = highest - lowest
    distance = (green + blue - red - lowest) / tf.maximum(chroma, _EPSILON) + 1
    # 1 if green equals blue, since 0 would turn cyan into red.
    direction = tf.sign(green - blue + _EPSILON)
    hue = direction * distance + 6 * turns
    hue -= 6 * tf.floor(hue * (1 / 6))
    weights = tf.abs(hue - 3) - 1, 2 - tf.abs(hue - 2), 2 - tf.abs(hue - 4)
    return [lowest + chroma * weight for weight in clip(weights)]


def to_grayscale(channels: list[tf.Tensor], seeds: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Replaces each channel with the luminance (BT.601). `seeds` is ignored."""
    del seeds
    red, green, blue = channels
    return [0.2989 * red + 0.5870 * green + 0.1140 * blue] * 3


def jitter_amounts(
    seeds: tf.Tensor, strength: float, brightness: str = "multiplicative"
) -> tuple[tf.Tensor, tf.Tensor]:
    """Samples the amounts and the order of the `color_jitter` steps.

    Brightness, contrast and saturation factors are uniform in 1 +- 0.8 * strength (at least 0).
    Additive brightness shifts are uniform in +-0.8 * strength, and hue shifts in +-0.2 * strength
    (at most half a turn).

    Returns:
      amounts: float32 [n, 4], the amounts for brightness, contrast, saturation and hue.
      order: int32 [n, 4], a permutation of these four steps for each image.
    """
    factors, hue = (max(1 - 0.8 * strength, 0.0), 1 + 0.8 * strength), min(0.2 * strength, 0.5)
    brightness_range = (
        factors if brightness == "multiplicative" else (-0.8 * strength, 0.8 * strength)
    )
    low, high = np.array([brightness_range, factors, factors, (-hue, hue)], np.float32).T
    draws = rng.uniforms(seeds, 8)
    return draws[:, :4] * (high - low) + low, tf.math.top_k(draws[:, 4:], 4).indices


def color_jitter(
    channels: list[tf.Tensor],
    seeds: tf.Tensor,
    strength: float = 1.0,
    brightness: str = "multiplicative",
    switch: Callable = switch_per_image,
) -> list[tf.Tensor]:
    """Jitters brightness, contrast, saturation and hue in random order, and clips (paper, Appendix A).

    Args:
      channels: three tensors [n, h, w].
      seeds: int tensor [n, 2].
      strength: color distortion strength s.
      brightness: multiplicative or additive.
      switch: `switch_per_image` or `select_per_image`.

    Returns:
      Three tensors [n, h, w] in [0, 1], up to rounding.
    """
    amounts, order = jitter_amounts(seeds, strength, brightness)
    amounts = tf.gather(amounts, order, batch_dims=1)[:, :, tf.newaxis, tf.newaxis]
    steps = (
        _with_clip(adjust_brightness if brightness == "multiplicative" else shift_brightness),
        _with_clip(adjust_contrast),
        adjust_saturation,
        adjust_hue,
    )
    # The first step clips values that bicubic resizing has moved outside [0, 1]. After that, the
    # saturation and hue steps leave [0, 1] only because of rounding.
    for position in range(4):
        functions = steps if position else (*steps[:2], *map(_with_clip, steps[2:]))
        channels = switch(order[:, position], functions, channels, amounts[:, position])
    return channels


def _with_clip(step: Callable) -> Callable:
    return lambda channels, amount: clip(step(channels, amount))


# ----------------------------------------------------------------------------------------------------------- blur

# Range of the blur's standard deviation in pixels, and probability of blurring a view (paper, Appendix A).
BLUR_SIGMA, BLUR_PROBABILITY = (0.1, 2.0), 0.5


def gaussian_blur(
    image: tf.Tensor, kernel_size: int, sigma: float | tf.Tensor, padding: str = "SAME"
) -> tf.Tensor:
    """Applies Gaussian blur as two one-dimensional convolutions.

    Args:
      image: [h, w, c], or a batch [n, h, w, c].
      kernel_size: int; the filter has 2 * (kernel_size // 2) + 1 taps.
      sigma: standard deviation in pixels (scalar or [n]).
      padding: "SAME" (zeros outside) or "VALID".

    Returns:
      The blurred image or batch, with the same dtype as `image`.
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


def _correlate(batch: tf.Tensor, taps: tf.Tensor, axis: int) -> tf.Tensor:
    """Correlates each image `batch[i]` with `taps[i]` along `axis`, using "VALID" padding.

    `batch` is [n, h, w, c], `taps` is [n, k], and `axis` is 1 (vertical) or 2 (horizontal).
    TensorFlow's convolutions apply the same kernel to all images, so the result is computed as a
    sum of shifted copies.
    """
    num_taps = taps.shape[1]
    length = tf.shape(batch)[axis] - num_taps + 1
    total = 0.0
    for tap in range(num_taps):
        window = batch[:, tap : tap + length] if axis == 1 else batch[:, :, tap : tap + length]
        total += taps[:, tap, tf.newaxis, tf.newaxis, tf.newaxis] * window
    return total


def blur_sigma(draws: tf.Tensor) -> tf.Tensor:
    """Maps uniform random numbers in [0, 1) to standard deviations from `BLUR_SIGMA`."""
    low, high = BLUR_SIGMA
    return low + (high - low) * draws


def batch_random_blur(
    images: tf.Tensor, seed: tf.Tensor, height: int, first_row: int | tf.Tensor = 0
) -> tf.Tensor:
    """Blurs each image with probability `BLUR_PROBABILITY`, using a random sigma from `BLUR_SIGMA`.

    Args:
      images: [n, h, w, c] in [0, 1].
      seed: int tensor [2].
      height: image height in pixels; the kernel size is a tenth of it, so images with fewer than 20
        pixels are not blurred.
      first_row: position of `images[0]` in the global batch, which makes results independent of the
        number of replicas.

    Returns:
      [n, h, w, c], clipped to [0, 1].
    """
    rows = tf.cast(first_row + tf.range(images.shape[0] or tf.shape(images)[0]), seed.dtype)
    # `tf.random` would draw different numbers in functions compiled by XLA.
    draws = tf.cast(rng.uniforms(seed + tf.stack([rows, tf.zeros_like(rows)], 1), 2), images.dtype)
    is_blurred = draws[:, 0] < BLUR_PROBABILITY
    blurred = gaussian_blur(images, height // 10, blur_sigma(draws[:, 1]))
    return tf.clip_by_value(
        tf.where(is_blurred[:, tf.newaxis, tf.newaxis, tf.newaxis], blurred, images), 0.0, 1.0
    )


# ------------------------------------------------------------------------------------------------------- policies


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator that a policy applies with a given probability.

    Attributes:
      name: display name.
      function: maps channels (three tensors [n, size, size]) and seeds [n, 2] to channels of the
        same shape.
      probability: probability of applying the operator to an image.
    """

    name: str
    function: Callable
    probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Augmentation of one view: random crop and resize, followed by `operators`.

    Attributes:
      area_range: range of the crop's area, as a fraction of the image's area.
      operators: operators to apply to the crop, in this order.
      switch: function that applies one of several functions to each image: `switch_per_image` or
        `select_per_image`.
    """

    area_range: tuple[float, float] = (0.08, 1.0)
    operators: tuple[Operator, ...] = ()
    switch: Callable = switch_per_image

    def then(self, *operators: Operator) -> Policy:
        """Returns a copy of this policy with `operators` appended."""
        return dataclasses.replace(self, operators=self.operators + operators)


def crop_and_flip_policy(
    min_area: float = 0.08, flip: bool = True, switch: Callable = switch_per_image
) -> Policy:
    """Returns the fine-tuning policy: random crop and flip (paper, B.5)."""
    return Policy((min_area, 1.0), (Operator("flip", flip_horizontally, 0.5),) * flip, switch)


def simclr_policy(
    strength: float,
    brightness: str,
    min_area: float = 0.08,
    flip: bool = True,
    switch: Callable = switch_per_image,
) -> Policy:
    """Returns the default policy: crop, flip, color distortion (paper, Appendix A). Blur is applied on the device."""
    policy = crop_and_flip_policy(min_area, flip, switch)
    return policy.then(*color_distortion(strength, brightness, switch)) if strength > 0 else policy


def color_distortion(
    strength: float, brightness: str, switch: Callable = switch_per_image
) -> tuple[Operator, Operator]:
    """Returns the color distortion: jitter with probability 0.8, grayscale with probability 0.2 (paper, Appendix A).

    The paper calls grayscale "color drop".
    """
    jitter = functools.partial(
        color_jitter, strength=strength, brightness=brightness, switch=switch
    )
    return Operator("color_jitter", jitter, 0.8), Operator("grayscale", to_grayscale, 0.2)


def identity(channels: list[tf.Tensor], _: tf.Tensor) -> list[tf.Tensor]:
    """Returns the channels unchanged."""
    return channels


def apply_operators(crops: tf.Tensor, policy: Policy, seeds: tf.Tensor) -> tf.Tensor:
    """Applies the operators of `policy` to n crops.

    Args:
      crops: [n, size, size, 3]; values may fall outside [0, 1].
      policy: a `Policy`.
      seeds: int tensor [n, 2]: the seeds of the crops. Each operator gets seeds derived from them.

    Returns:
      [n, size, size, 3] in [0, 1].
    """
    channels, draws = to_channels(crops), rng.uniforms(seeds, len(policy.operators))
    for index, operator in enumerate(policy.operators):
        is_applied = tf.cast(draws[:, index] < operator.probability, tf.int32)
        channels = policy.switch(
            is_applied, (identity, operator.function), channels, rng.nth_seed(seeds, index + 1)
        )
    return from_channels(clip(channels))


def view_seed(seed: tf.Tensor, view: int) -> tf.Tensor:
    """Returns the seed of one view, derived from the seed of its example ([2], or [n, 2] for n examples)."""
    return rng.nth_seed(seed, view, rng.VIEW)


def augment_crops(
    crops: Sequence[tf.Tensor], policies: Sequence[Policy], seeds: tf.Tensor
) -> list[tf.Tensor]:
    """Applies the operators of each view's policy to the crops of n examples.

    Args:
      crops: for each view, [n, size, size, 3].
      policies: one policy for each view.
      seeds: int tensor [n, 2]: the seeds of the examples.

    Returns:
      For each view, [n, size, size, 3] in [0, 1].
    """
    return [
        apply_operators(images, policy, view_seed(seeds, view))
        for view, (images, policy) in enumerate(zip(crops, policies))
    ]


def apply_policy(image: tf.Tensor, policy: Policy, seed: tf.Tensor, size: int) -> tf.Tensor:
    """Applies a policy to one image.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      policy: a `Policy`.
      seed: int tensor [2]. Each operator gets a seed derived from it.
      size: output height and width in pixels.

    Returns:
      [size, size, 3] float32 in [0, 1].
    """
    window = random_window(tf.shape(image), seed, policy.area_range)
    crop = resize_window(image, *window, size, size)
    return apply_operators(crop[tf.newaxis], policy, seed[tf.newaxis])[0]


def preprocess_for_eval(
    image: tf.Tensor, size: int, crop: bool = True, resize: str = "crop"
) -> tf.Tensor:
    """Center-crops an image [h, w, 3] or a batch [n, h, w, 3], and resizes it to `size`.

    The crop covers 87.5 % of the shorter side, or the whole shorter side if `crop` is False. If
    `resize` is "squash", the whole image is resized, and if it is "pad", black borders first make it
    square.
    """
    if resize == "squash":
        image = tf.image.resize(image, [size, size], tf.image.ResizeMethod.BICUBIC)
    elif resize == "pad":
        side = tf.reduce_max(tf.shape(image)[-3:-1])
        image = tf.image.resize_with_crop_or_pad(image, side, side)
    image = center_crop(image, size, size, CROP_PROPORTION if crop and resize == "crop" else 1.0)
    return tf.clip_by_value(
        tf.ensure_shape(image, [None] * (image.shape.rank - 3) + [size, size, 3]), 0.0, 1.0
    )


def preprocess_image(
    image: tf.Tensor,
    height: int,
    width: int,
    is_training: bool = False,
    color_jitter_strength: float = 0.0,
    test_crop: bool = True,
    *,
    seed: tf.Tensor | None = None,
    brightness: str = "multiplicative",
    resize: str = "crop",
) -> tf.Tensor:
    """Preprocesses one image for the network.

    Args:
      image: [h, w, 3] uint8, or float in [0, 1].
      height: output height in pixels; must equal `width`.
      width: output width in pixels.
      is_training: whether to apply a random crop, a random flip and color distortion, rather than
        the evaluation crop.
      color_jitter_strength: color distortion strength; 0 disables color distortion.
      test_crop: see `crop` in `preprocess_for_eval`.
      seed: int [2], a list or a tensor, required if `is_training`.
      brightness: multiplicative or additive.
      resize: see `preprocess_for_eval`.

    Returns:
      [height, width, 3] float32 in [0, 1].
    """
    if height != width:
        raise ValueError(f"height={height}, width={width}: the output must be square")
    image = tf.convert_to_tensor(image)
    if is_training:
        policy = simclr_policy(color_jitter_strength, brightness)
        return apply_policy(image, policy, tf.convert_to_tensor(seed), height)
    image = tf.image.convert_image_dtype(image, tf.float32)
    return preprocess_for_eval(image, height, test_crop, resize)
