"""AutoAugment policies for ImageNet (Cubuk et al. 2019). A policy applies one of 25 operator pairs to each image.

Two policies are published: `TABLE_9`, from Table 9 of the paper (CVPR version), and `V0`, the
policy `v0` in the code of EfficientNet (github.com/tensorflow/tpu). The two policies have no
operator pair in common. The SimCLR paper does not say which policy it uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
# Sub-policies of the policy `v0` in the same format, but with levels from 0 to 10.
SUB_POLICIES_V0 = (
    (("equalize", 0.8, 1), ("shear_y", 0.8, 4)),
    (("color", 0.4, 9), ("equalize", 0.6, 3)),
    (("color", 0.4, 1), ("rotate", 0.6, 8)),
    (("solarize", 0.8, 3), ("equalize", 0.4, 7)),
    (("solarize", 0.4, 2), ("solarize", 0.6, 2)),
    (("color", 0.2, 0), ("equalize", 0.8, 8)),
    (("equalize", 0.4, 8), ("solarize_add", 0.8, 3)),
    (("shear_x", 0.2, 9), ("rotate", 0.6, 8)),
    (("color", 0.6, 1), ("equalize", 1.0, 2)),
    (("invert", 0.4, 9), ("rotate", 0.6, 0)),
    (("equalize", 1.0, 9), ("shear_y", 0.6, 3)),
    (("color", 0.4, 7), ("equalize", 0.6, 0)),
    (("posterize", 0.4, 6), ("autocontrast", 0.4, 7)),
    (("solarize", 0.6, 8), ("color", 0.6, 9)),
    (("solarize", 0.2, 4), ("rotate", 0.8, 9)),
    (("rotate", 1.0, 7), ("translate_y", 0.8, 9)),
    (("shear_x", 0.0, 0), ("solarize", 0.8, 4)),
    (("shear_y", 0.8, 0), ("color", 0.6, 4)),
    (("color", 1.0, 0), ("rotate", 0.6, 2)),
    (("equalize", 0.8, 4), ("equalize", 0.0, 8)),
    (("equalize", 1.0, 4), ("autocontrast", 0.6, 2)),
    (("shear_y", 0.4, 7), ("solarize_add", 0.6, 7)),
    (("posterize", 0.8, 2), ("solarize", 0.6, 10)),
    (("solarize", 0.6, 8), ("equalize", 0.6, 1)),
    (("color", 0.8, 6), ("rotate", 0.4, 5)),
)


@dataclasses.dataclass(frozen=True)
class AutoAugmentPolicy:
    """An AutoAugment policy: sub-policies, and the functions that map levels to magnitudes."""

    sub_policies: tuple
    amounts: dict[str, Callable[[float], float]]  # operators without an entry have no magnitude


# Operators whose amounts are negated with probability 0.5.
_SIGNED = {"shear_x", "shear_y", "translate_y", "rotate"}
# The ranges follow the AutoAugment paper. Where the paper does not specify a direction, higher
# levels are stronger. For color, contrast and sharpness, an amount of 1 has no effect.
TABLE_9 = AutoAugmentPolicy(
    SUB_POLICIES,
    {
        "shear_x": lambda level: level / 9 * 0.3,
        "rotate": lambda level: level / 9 * 30.0,
        "solarize": lambda level: (1 - level / 9) * 256 / 255,
        "posterize": lambda level: 8 - level / 9 * 4,
        **dict.fromkeys(("color", "contrast", "sharpness"), lambda level: 0.1 + level / 9 * 1.8),
    },
)
# Higher levels of posterize and solarize are weaker. Thresholds and additions are multiples of
# 1/255. Translations do not depend on the image size: level 9 moves images with up to 225 rows out
# of view.
V0 = AutoAugmentPolicy(
    SUB_POLICIES_V0,
    {
        **dict.fromkeys(("shear_x", "shear_y"), lambda level: level / 10 * 0.3),
        "rotate": lambda level: level / 10 * 30.0,
        "translate_y": lambda level: level / 10 * 250.0,
        "solarize": lambda level: int(level / 10 * 256) / 255,
        "solarize_add": lambda level: int(level / 10 * 110) / 255,
        # The EfficientNet code shifts 8-bit integers, and TensorFlow limits shifts to 7 bits, so at
        # least one bit remains.
        "posterize": lambda level: max(int(level / 10 * 4), 1),
        "color": lambda level: 0.1 + level / 10 * 1.8,
    },
)


def _operator(name, has_amount):
    """Returns the operator as a function of channels and amounts [n], for `data_util.switch_per_image`."""
    function = getattr(operators, name)
    if name == "posterize":
        return lambda channels, amounts: function(channels, tf.cast(tf.round(amounts), tf.int32))
    return function if has_amount else lambda channels, amounts: function(channels)


def autoaugment(
    channels: list[tf.Tensor], seeds: tf.Tensor, policy: AutoAugmentPolicy = TABLE_9
) -> list[tf.Tensor]:
    """Applies a random sub-policy to each image: two operators, each with its own probability.

    Args:
      channels: three tensors [n, h, w] in [0, 1].
      seeds: int tensor [n, 2].
      policy: the policy to draw from.

    Returns:
      Three tensors [n, h, w] in [0, 1].
    """
    operator_names = sorted({name for pair in policy.sub_policies for name, _, _ in pair})
    functions = [
        data_util.identity,
        *(_operator(name, name in policy.amounts) for name in operator_names),
    ]
    draws = rng.uniforms(seeds, 5)
    sub_policy = tf.cast(draws[:, 0] * len(policy.sub_policies), tf.int32)
    for position in range(2):
        names, probabilities, levels = zip(*[pair[position] for pair in policy.sub_policies])
        indices = 1 + tf.gather([operator_names.index(name) for name in names], sub_policy)
        is_applied = draws[:, 1 + position] < tf.gather(np.float32(probabilities), sub_policy)
        amounts = np.float32(
            [
                policy.amounts[name](level) if name in policy.amounts else 0.0
                for name, level in zip(names, levels)
            ]
        )
        is_signed = np.array([name in _SIGNED for name in names])
        is_negative = tf.gather(is_signed, sub_policy) & (draws[:, 3 + position] < 0.5)
        amounts = tf.gather(amounts, sub_policy) * tf.where(is_negative, -1.0, 1.0)
        channels = data_util.switch_per_image(
            tf.where(is_applied, indices, 0), functions, channels, amounts
        )
    return channels
