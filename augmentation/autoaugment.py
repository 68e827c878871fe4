"""AutoAugment's policy for ImageNet (Cubuk et al. 2019, CVPR version, Table 9).

Another policy, `v0`, is published in the code of EfficientNet. The SimCLR paper does not say which
policy it uses.
"""

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
# Operators whose amounts are negated with probability 0.5.
_SIGNED = {"shear_x", "rotate"}
# operator -> function of the fraction of the highest level that returns the amount
# The ranges follow the AutoAugment paper. Where the paper does not specify a direction, higher
# levels are stronger. For color, contrast and sharpness, an amount of 1 has no effect. The last
# three operators ignore their amount.
_AMOUNTS = {
    "shear_x": lambda fraction: fraction * 0.3,
    "rotate": lambda fraction: fraction * 30.0,
    "solarize": lambda fraction: (1 - fraction) * 256 / 255,
    "posterize": lambda fraction: 8 - fraction * 4,
    **dict.fromkeys(("color", "contrast", "sharpness"), lambda fraction: 0.1 + fraction * 1.8),
    **dict.fromkeys(("autocontrast", "equalize", "invert"), float),
}


def autoaugment(channels: list[tf.Tensor], seeds: tf.Tensor) -> list[tf.Tensor]:
    """Applies a random sub-policy to each image: two operators, each with its own probability.

    Args:
      channels: three tensors [n, h, w], clipped to [0, 1] first.
      seeds: int tensor [n, 2].

    Returns:
      Three tensors [n, h, w] in [0, 1].
    """
    operator_names = list(_AMOUNTS)
    functions = [data_util.identity, *(getattr(operators, name) for name in operator_names)]
    draws = rng.uniforms(seeds, 5)
    sub_policy = tf.cast(draws[:, 0] * len(SUB_POLICIES), tf.int32)
    channels = data_util.clip(channels)
    for position in range(2):
        names, probabilities, levels = zip(*[pair[position] for pair in SUB_POLICIES])
        is_applied = draws[:, 1 + position] < tf.gather(np.float32(probabilities), sub_policy)
        indices = 1 + tf.gather([operator_names.index(name) for name in names], sub_policy)
        amounts = [_AMOUNTS[name](level / 9) for name, level in zip(names, levels)]
        is_signed = tf.gather([name in _SIGNED for name in names], sub_policy)
        sign = tf.where(is_signed & (draws[:, 3 + position] < 0.5), -1.0, 1.0)
        channels = data_util.switch_per_image(
            tf.where(is_applied, indices, 0),
            functions,
            channels,
            tf.gather(np.float32(amounts), sub_policy) * sign,
        )
    return channels
