"""Augmentation policies as data: SimCLR's, AutoAugment's, and those of the studies (paper, Figure 5, Table 3, B.2)."""

from __future__ import annotations

import tensorflow as tf

import data_util
from augmentation import autoaugment, operators


def view_policies(config):
    """The augmentation policy of each view: two views while pretraining, else one; crop and flip in fine-tuning."""
    geometry = dict(min_area=config.min_crop_area, flip=config.random_flip)
    colour = dict(strength=config.color_jitter_strength, brightness=config.brightness)
    if not config.distorts_views:
        return (data_util.crop_and_flip_policy(**geometry),)
    if config.branches:
        return tuple(branch_policy(names, **colour, **geometry) for names in config.branches)
    if config.augmentation == "autoaugment":
        policy = autoaugment_policy(**geometry)
    else:
        make = {"simclr": data_util.simclr_policy, "broader": broader_policy}[config.augmentation]
        policy = make(**colour, **geometry)
    policy += extra_operators(config.extra_augmentations)
    return (policy,) * (2 if config.pretraining else 1)


# ------------------------------------------------------------------------------------------------------- policies

# The first operator of a policy: name -> function(image_shape [3], seed, **parameters) that returns begin [3] and size
# [3] of a window, which is then resized.
CROPS = {"crop_and_resize": data_util.random_window}
# The others: name -> (probability, unless the parameters say another; function(planes, seeds [n, 2], **parameters) that
# returns planes of the same size).
OPERATORS = {
    "flip": (0.5, lambda planes, seeds: data_util.flip(planes)),
    "color_jitter": (0.8, data_util.color_jitter),
    "grayscale": (0.2, lambda planes, seeds: data_util.to_grayscale(planes)),
    "crop_again": (1.0, operators.random_resized_crop),
    "quarter_turn": (1.0, operators.random_rot90),
    "cutout": (1.0, operators.random_cutout),
    "noise": (1.0, operators.random_noise),
    "blur": (0.5, operators.random_blur),
    "sobel": (1.0, lambda planes, seeds: operators.sobel(data_util.clip(planes))),
    "equalize": (0.2, lambda planes, seeds: operators.equalize(planes)),
    "solarize": (0.2, lambda planes, seeds: operators.solarize(data_util.clip(planes), tf.fill(tf.shape(seeds)[:1], 0.5))),
    "motion_blur": (0.2, operators.random_motion_blur),
    "autoaugment": (1.0, lambda planes, seeds: autoaugment.autoaugment(data_util.clip(planes), seeds)),
}


def autoaugment_policy(min_area=0.08, flip=True):
    """Crop, flip and AutoAugment (paper, Table 1)."""
    return data_util.crop_and_flip_policy(min_area, flip) + (("autoaugment", {}),)


def broader_policy(strength, brightness, min_area=0.08, flip=True):
    """The default policy with Sobel filtering, more colour distortion and motion blur, each at times (paper, B.2)."""
    return data_util.simclr_policy(strength, brightness, min_area, flip) + (
        ("equalize", {}), ("solarize", {}), ("sobel", {"probability": 0.2}), ("motion_blur", {}))


def extra_operators(names):
    """What is added to a policy for the transformations of Table 3: all four turns alike, the others half the time."""
    operators = {"rotate": ("quarter_turn", {"turns": (0, 1, 2, 3)}), "noise": ("noise", {"probability": 0.5}),
                 "sobel": ("sobel", {"probability": 0.5})}
    return tuple(operators[name] for name in names)


def branch_policy(names, strength, brightness, min_area=0.08, flip=True):
    """A crop, which both branches share, and then the operators that `names` names, in order (paper, Figure 5)."""
    operators = {
        "crop": (("crop_again", {"area_range": (min_area, 1.0), "flip_probability": 0.5 if flip else 0.0}),),
        "color": data_util.simclr_policy(strength, brightness, flip=False)[1:],
        "jitter": (("color_jitter", {"strength": strength, "brightness": brightness, "probability": 1.0}),),
        "drop": (("grayscale", {"probability": 1.0}),),
        "rotate": (("quarter_turn", {}),), "cutout": (("cutout", {}),), "noise": (("noise", {}),),
        "blur": (("blur", {}),), "sobel": (("sobel", {}),), "equalize": (("equalize", {"probability": 1.0}),),
        "solarize": (("solarize", {"probability": 1.0}),), "motion_blur": (("motion_blur", {"probability": 1.0}),),
        "autoaugment": (("autoaugment", {}),),
    }
    return data_util.crop_and_flip_policy(min_area, flip=False) + sum((operators[name] for name in names), ())
