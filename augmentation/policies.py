"""Augmentation policies for the paper's studies (Figure 5, Table 3, B.2), and policy selection based on `Config`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

import data_util
from augmentation import autoaugment, operators
from config import Config
from data_util import Operator, Policy


def view_policies(config: Config) -> tuple[Policy, ...]:
    """Returns one policy for each view: two policies in pretraining, otherwise one.

    In fine-tuning and distillation, the policy applies only crops and flips. The policies for
    `--augment_on=device` use `data_util.select_per_image`.
    """
    crop_and_flip: dict = dict(min_area=config.min_crop_area, flip=config.random_flip)
    color: dict = dict(strength=config.color_jitter_strength, brightness=config.brightness)
    switch = (
        data_util.select_per_image if config.augment_on == "device" else data_util.switch_per_image
    )
    if not config.uses_pretraining_augmentation:
        return (data_util.crop_and_flip_policy(**crop_and_flip, switch=switch),)
    if config.branch_operators:
        return tuple(
            branch_policy(names, **color, **crop_and_flip) for names in config.branch_operators
        )
    if config.augmentation == "autoaugment":
        operator = Operator("autoaugment", autoaugment.autoaugment)
        policy = data_util.crop_and_flip_policy(**crop_and_flip).then(operator)
    else:
        policy = data_util.simclr_policy(**color, **crop_and_flip, switch=switch)
    if config.augmentation == "broader":
        policy = policy.then(*(Operator(name, _FUNCTIONS[name], 0.2) for name in _BROADER))
    policy = policy.then(*(_EXTRA[name] for name in config.extra_augmentations))
    return (policy,) * (2 if config.pretraining else 1)


def branch_policy(
    names: tuple[str, ...],
    strength: float,
    brightness: str,
    min_area: float = 0.08,
    flip: bool = True,
) -> Policy:
    """Returns one branch's policy: the crop shared by both branches, then the operators in `names` (Figure 5)."""
    crop = functools.partial(
        operators.random_resized_crop,
        area_range=(min_area, 1.0),
        flip_probability=0.5 if flip else 0.0,
    )
    color = data_util.color_distortion(strength, brightness)
    by_name = {
        **{name: (Operator(name, function),) for name, function in _FUNCTIONS.items()},
        "crop": (Operator("crop", crop),),
        "color": color if strength > 0 else (),
        "jitter": (dataclasses.replace(color[0], probability=1.0),),
        "drop": (dataclasses.replace(color[1], probability=1.0),),
        "blur": (Operator("blur", operators.random_blur, data_util.BLUR_PROBABILITY),),
    }
    return data_util.Policy((min_area, 1.0)).then(*sum((by_name[name] for name in names), ()))


def _solarize(channels: list[tf.Tensor], seeds: tf.Tensor) -> list[tf.Tensor]:
    return operators.solarize(data_util.clip(channels), tf.fill(tf.shape(seeds)[:1], 0.5))


# name -> function of an operator that `branch_policy` applies with probability 1
_FUNCTIONS: dict[str, Callable] = {
    "rotate": operators.random_rot90,
    "cutout": operators.random_cutout,
    "noise": operators.random_noise,
    "sobel": operators.sobel,
    "equalize": operators.equalize,
    "solarize": _solarize,
    "motion_blur": operators.random_motion_blur,
    "autoaugment": autoaugment.autoaugment,
}
# The operators of --augment_extra (paper, Table 3).
_EXTRA = {
    "rotate": Operator("rotate", functools.partial(operators.random_rot90, turns=(0, 1, 2, 3))),
    "noise": Operator("noise", operators.random_noise, 0.5),
    "sobel": Operator("sobel", operators.sobel, 0.5),
}
# The operators that broader augmentation adds to SimCLR's policy (paper, B.2).
_BROADER = ("equalize", "solarize", "sobel", "motion_blur")
