"""Names of variables in checkpoints of the original's TF1 code."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

# ---------------------------------------------------------------------------------------------------- TF1's names


def tf1_names(keys: Iterable[str]) -> dict[str, str]:
    """What the original's TF1 code calls the variables with the given checkpoint keys.

    It numbers convolutions and batch norms in the order in which they are called: shortcuts before the rest of a
    block. So all of an encoder's keys must be there.

    Args:
      keys: of an encoder and perhaps heads.

    Returns:
      key -> name.
    """
    names, counts = {}, collections.Counter()
    layers = sorted({key.rpartition("/")[0] for key in keys if key.startswith("model/resnet_model/")}, key=call_order)
    for layer in layers:
        kind = "batch_normalization" if layer.endswith("/bn") else "conv2d"
        number = f"_{counts[kind]}" if counts[kind] else ""
        counts[kind] += 1
        names[layer] = f"base_model/{kind}{number}"
    heads = sum(key.startswith("model/_projection_head/") and key.endswith("/dense/kernel") for key in keys)
    prefix = "head_contrastive/nl_" if heads > 1 else "head_contrastive/l_"
    for key in keys:
        layer = key.rpartition("/")[0]
        head = re.fullmatch(r"model/_projection_head/linear_layers/(\d+)/(dense|bn_relu/bn)", layer)
        if head:
            names[layer] = f"{prefix}{head[1]}/{'dense' if head[2] == 'dense' else 'batch_normalization'}"
        elif layer == "model/supervised_head/linear_layer/dense":
            names[layer] = "head_supervised/linear_layer/dense"
    return {key: f"{names[layer]}/{leaf}" for key in keys for layer, _, leaf in [key.rpartition("/")]}


def call_order(layer: str) -> list[int]:
    """Sorts an encoder's layers, given by key, as they are called."""
    part_order = {"initial_conv_relu_max_pool": 0, "block_groups": 1, "layers": 0, "projection_layers": 0,
                  "shortcut_layers": 0, "conv_relu_dropblock_layers": 1, "conv2d_bn_layers": 1, "se_layer": 2,
                  "conv2d_fixed_padding": 0, "conv2d": 0, "bn": 0, "batch_norm_relu": 1, "conv2d_0": 2,
                  "batch_norm_relu_1": 3, "conv2d_1": 4, "se_reduce": 0, "se_expand": 1}
    return [int(part) if part.isdigit() else part_order[part] for part in layer.split("/")[2:]]
