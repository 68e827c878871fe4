"""AutoAugment's policy for ImageNet (Cubuk et al. 2019, CVPR, Table 9): one of 25 pairs of operators for each image."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import data_util
from augmentation import operators
from runtime import rng

# Each pair: two times (operator, probability, level from 0 to 9).
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
# Operator -> (its amount at level 0 and at level 9, whether its sign is drawn). Ranges are the paper's; more is
# stronger, where it leaves the direction open, and 1 leaves colour, contrast and sharpness alone.
AMOUNTS = {
    "shear_x": (0.0, 0.3, True), "rotate": (0.0, 30.0, True), "solarize": (256 / 255, 0.0, False),
    "posterize": (8.0, 4.0, False), "color": (0.1, 1.9, False), "contrast": (0.1, 1.9, False),
    "sharpness": (0.1, 1.9, False), "equalize": None, "autocontrast": None, "invert": None,
}
_NAMES = tuple(AMOUNTS)


def amount_of(name: str, level: float) -> float:
    """The amount of an operator at `level`, without its sign; 0 for those that have none."""
    if AMOUNTS[name] is None:
        return 0.0
    low, high, _ = AMOUNTS[name]
    return low + level / 9 * (high - low)


def _operator(name):
    """A function of channels and amounts [n], for `data_util.switch_per_image`."""
    function = getattr(operators, name)
    if name == "posterize":
        return lambda channels, amounts: function(channels, tf.cast(tf.round(amounts), tf.int32))
    return function if AMOUNTS[name] else lambda channels, amounts: function(channels)


def autoaugment(channels: list[tf.Tensor], seeds: tf.Tensor) -> list[tf.Tensor]:
    """Applies a pair of operators, drawn for each image, one after the other, each with its probability.

    Args:
      channels: three tensors [n, h, w] in [0, 1].
      seeds: int tensor [n, 2].

    Returns:
      channels.
    """
    functions = [lambda channels, _: channels, *map(_operator, _NAMES)]
    draws = rng.uniforms(seeds, 5)
    pair = tf.cast(draws[:, 0] * len(SUB_POLICIES), tf.int32)
    for place in range(2):
        names, probabilities, levels = zip(*[pairs[place] for pairs in SUB_POLICIES])
        indices = 1 + tf.gather([_NAMES.index(name) for name in names], pair)
        chosen = draws[:, 1 + place] < tf.gather(np.float32(probabilities), pair)
        amounts = np.float32([amount_of(name, level) for name, level in zip(names, levels)])
        signed = np.array([bool(AMOUNTS[name] and AMOUNTS[name][2]) for name in names])
        negative = tf.gather(signed, pair) & (draws[:, 3 + place] < 0.5)
        amounts = tf.gather(amounts, pair) * tf.where(negative, -1.0, 1.0)
        channels = data_util.switch_per_image(tf.where(chosen, indices, 0), functions, channels, amounts)
    return channels
