"""AutoAugment policy for ImageNet (Cubuk et al. 2019, CVPR, Table 9): applies one of 25 operator pairs per image."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import data_util
from augmentation import operators
from runtime import rng

# Each sub-policy is a pair of tuples (operator, probability, level from 0 to 9).
SUB_POLICIES = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)
# Maps an operator to (amount at level 0, amount at level 9, whether the sign is random). The ranges follow the
# AutoAugment paper. Where the paper does not specify a direction, higher levels are stronger. For color, contrast and
# sharpness, an amount of 1 has no effect.
AMOUNTS = {
    "shear_x": (0.0, 0.3, True), "rotate": (0.0, 30.0, True), "solarize": (256 / 255, 0.0, False),
    "posterize": (8.0, 4.0, False), "color": (0.1, 1.9, False), "contrast": (0.1, 1.9, False),
    "sharpness": (0.1, 1.9, False), "equalize": None, "autocontrast": None, "invert": None,
}
_NAMES = tuple(AMOUNTS)


def amount_at_level(name: str, level: float) -> float:
    """Returns the unsigned amount of an operator at `level`, or 0 if the operator has no amount."""
    if AMOUNTS[name] is None:
        return 0.0
    low, high, _ = AMOUNTS[name]
    return low + level / 9 * (high - low)


def _operator(name):
    """Returns the operator as a function of channels and amounts [n], for `data_util.switch_per_image`."""
    function = getattr(operators, name)
    if name == "posterize":
        return lambda channels, amounts: function(channels, tf.cast(tf.round(amounts), tf.int32))
    return function if AMOUNTS[name] else lambda channels, amounts: function(channels)


def autoaugment(channels: list[tf.Tensor], seeds: tf.Tensor) -> list[tf.Tensor]:
    """Applies a random sub-policy to each image: two operators, each with its own probability.

    Args:
      channels: three tensors [n, h, w] in [0, 1].
      seeds: int tensor [n, 2].

    Returns:
      Three tensors [n, h, w] in [0, 1].
    """
    functions = [data_util.identity, *map(_operator, _NAMES)]
    draws = rng.uniforms(seeds, 5)
    sub_policy = tf.cast(draws[:, 0] * len(SUB_POLICIES), tf.int32)
    for position in range(2):
        names, probabilities, levels = zip(*[pair[position] for pair in SUB_POLICIES])
        indices = 1 + tf.gather([_NAMES.index(name) for name in names], sub_policy)
        is_applied = draws[:, 1 + position] < tf.gather(np.float32(probabilities), sub_policy)
        amounts = np.float32([amount_at_level(name, level) for name, level in zip(names, levels)])
        has_sign = np.array([bool(AMOUNTS[name] and AMOUNTS[name][2]) for name in names])
        is_negative = tf.gather(has_sign, sub_policy) & (draws[:, 3 + position] < 0.5)
        amounts = tf.gather(amounts, sub_policy) * tf.where(is_negative, -1.0, 1.0)
        channels = data_util.switch_per_image(tf.where(is_applied, indices, 0), functions, channels, amounts)
    return channels
