"""Infers the architecture of a network from the shapes of its tensors."""

from __future__ import annotations

import re

import resnet
from checkpoints import tf1_names, weight_files
from checkpoints.weight_files import WeightFile


def infer_flags(weights: WeightFile) -> dict | None:
    """Infers a network's settings from the number and shapes of the tensors in its weight file.

    Returns:
      A dict that maps names of `Config` settings to values, or None if this program does not
      support the encoder. The dict also contains `num_classes`, which is None if there is no linear
      head.
    """
    kernels = _encoder_kernels(weights)
    encoder = _encoder_flags(weights, kernels)
    if encoder is None:
        return None
    layers = _sorted_shapes(
        weights,
        (
            r"head_contrastive/n?l_\d+/dense/kernel"
            if weights.is_tf1
            else r"model/_projection_head/linear_layers/\d+/dense/kernel"
        ),
    )
    flags = dict(encoder, proj_head_mode={0: "none", 1: "linear"}.get(len(layers), "nonlinear"))
    if len(layers) > 1:
        flags["num_proj_layers"] = len(layers)
    if layers:
        flags["proj_out_dim"] = layers[-1][-1]
    return dict(flags, num_classes=weight_files.head_size(weights))


def _sorted_shapes(weights, pattern):
    """Returns the shapes of the tensors whose names match `pattern`, sorted by the numbers in their names."""
    names = [name for name in weights.shapes if re.fullmatch(pattern, name)]
    return [
        weights.shapes[name]
        for name in sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    ]


def _encoder_kernels(weights):
    """Returns the kernel shapes of the encoder's convolutions in call order."""
    if weights.is_tf1:
        return _sorted_shapes(weights, r"base_model/conv2d(?:_\d+)?/kernel")
    keys = [
        key
        for key in weights.shapes
        if key.startswith("model/resnet_model/") and key.endswith("/kernel")
    ]
    return [
        weights.shapes[key]
        for key in sorted(keys, key=lambda key: tf1_names.call_order(key.rpartition("/")[0]))
    ]


def _encoder_flags(weights, kernels):
    """Returns the settings for depth, width, SK ratio, SE ratio and stem, or None if no ResNet matches."""
    has_se = any(
        re.search(r"(?:base_model/conv2d(?:_\d+)?|se_expand)/bias$", name)
        for name in weights.shapes
    )
    deep_stem = (
        len(kernels) > 3
        and kernels[1] == (3, 3, kernels[0][3], kernels[0][3])
        and kernels[2] == (3, 3, kernels[0][3], 2 * kernels[0][3])
    )
    has_sk_shortcut = any(
        re.search(r"block_groups/0/layers/0/(?:projection|shortcut)_layers/2/", name)
        for name in weights.shapes
    )
    for has_sk in (deep_stem or has_sk_shortcut, True):
        for depth, (bottleneck, blocks) in resnet.DEPTHS.items():
            convolutions_per_block = (5 if has_sk else 3) if bottleneck else 2
            if len(kernels) != (3 if deep_stem else 1) + 4 + sum(blocks) * (
                convolutions_per_block + 2 * has_se
            ):
                continue
            # This is the inner width of the last block.
            filters = kernels[-1][-1] // (4 if bottleneck else 1)
            sk_kernel = kernels[-5 if has_se else -3]
            # Basic blocks have no SK convolution.
            ratio = sk_kernel[-1] / filters if bottleneck else 1 / 16
            return dict(
                resnet_depth=depth,
                width_multiplier=filters // 512,
                sk_ratio=ratio if has_sk else 0.0,
                se_ratio=kernels[-2][-1] / filters if has_se else 0.0,
                stem="imagenet" if deep_stem or kernels[0][0] == 7 else "cifar",
            )
    return None
