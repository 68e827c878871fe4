"""The architecture of a network, inferred from the shapes of its tensors."""

from __future__ import annotations

import re

import resnet
from checkpoints import tf1_names, weight_files
from checkpoints.weight_files import WeightFile

# ------------------------------------------------------------------------------------------- which network it is


def infer_flags(weights: WeightFile) -> dict | None:
    """The settings of the network that a file holds, worked out from the number and the shapes of its tensors.

    Returns:
      dict from names of `Config`'s settings to values, and `num_classes`, None without a linear head; None in place of
      the dict if the encoder is none that this program can build.
    """
    kernels = _kernels(weights)
    encoder = _encoder_flags(weights, kernels)
    if encoder is None:
        return None
    tf1_head, head = r"head_contrastive/n?l_\d+/dense/kernel", r"model/_projection_head/linear_layers/\d+/dense/kernel"
    layers = _in_order(weights, tf1_head if weights.is_tf1 else head)
    flags = dict(encoder, proj_head_mode={0: "none", 1: "linear"}.get(len(layers), "nonlinear"))
    if len(layers) > 1:
        flags["num_proj_layers"] = len(layers)
    if layers:
        flags["proj_out_dim"] = layers[-1][-1]
    return dict(flags, num_classes=weight_files.head_size(weights))


def _in_order(weights, pattern):
    """Shapes of the tensors whose names match, sorted by the numbers in them."""
    names = [name for name in weights.shapes if re.fullmatch(pattern, name)]
    return [weights.shapes[name] for name in sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])]


def _kernels(weights):
    """Shapes of the encoder's convolutions, in the order in which they are called."""
    if weights.is_tf1:
        return _in_order(weights, r"base_model/conv2d(?:_\d+)?/kernel")
    keys = [key for key in weights.shapes if key.startswith("model/resnet_model/") and key.endswith("/kernel")]
    return [weights.shapes[key] for key in sorted(keys, key=lambda key: tf1_names.call_order(key.rpartition("/")[0]))]


def _encoder_flags(weights, kernels):
    """Depth, width, ratios and stem, or None."""
    excited = any(re.search(r"(?:base_model/conv2d(?:_\d+)?|se_expand)/bias$", name) for name in weights.shapes)
    deep_stem = len(kernels) > 3 and kernels[1] == (3, 3, kernels[0][3], kernels[0][3]) \
        and kernels[2] == (3, 3, kernels[0][3], 2 * kernels[0][3])
    pooled = any(re.search(r"block_groups/0/layers/0/(?:projection|shortcut)_layers/2/", name)
                 for name in weights.shapes)
    for selective in (deep_stem or pooled, True):
        for depth, (bottleneck, blocks) in resnet.DEPTHS.items():
            in_block = (5 if selective else 3) if bottleneck else 2
            if len(kernels) != (3 if deep_stem else 1) + 4 + sum(blocks) * (in_block + 2 * excited):
                continue
            filters = kernels[-1][-1] // (4 if bottleneck else 1)  # inner width of the last block
            mixing = kernels[-5 if excited else -3]
            ratio = mixing[-1] / filters if bottleneck else 1 / 16  # Basic blocks have no selective kernels.
            return dict(resnet_depth=depth, width_multiplier=filters // 512, sk_ratio=ratio if selective else 0.0,
                        se_ratio=kernels[-2][-1] / filters if excited else 0.0,
                        stem="imagenet" if deep_stem or kernels[0][0] == 7 else "cifar")
    return None
