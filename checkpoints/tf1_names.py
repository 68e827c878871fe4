"""Variable names in the original's TF1 checkpoints."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable


def tf1_names(keys: Iterable[str]) -> dict[str, str]:
    """Maps checkpoint keys to the variable names of the original's TF1 code.

    TF1 numbers convolutions and batch norms in call order. A block's shortcut is called first.
    Because of this numbering, `keys` must contain all keys of an encoder.

    Args:
      keys: checkpoint keys of an encoder and, optionally, of heads.

    Returns:
      A dict mapping keys to variable names.
    """
    names, counts = {}, collections.Counter()
    layers = sorted(
        {key.rpartition("/")[0] for key in keys if key.startswith("model/resnet_model/")},
        key=call_order,
    )
    for layer in layers:
        layer_type = "batch_normalization" if layer.endswith("/bn") else "conv2d"
        suffix = f"_{counts[layer_type]}" if counts[layer_type] else ""
        counts[layer_type] += 1
        names[layer] = f"base_model/{layer_type}{suffix}"
    num_proj_layers = sum(
        key.startswith("model/_projection_head/") and key.endswith("/dense/kernel") for key in keys
    )
    prefix = "head_contrastive/nl_" if num_proj_layers > 1 else "head_contrastive/l_"
    for key in keys:
        layer = key.rpartition("/")[0]
        match = re.fullmatch(
            r"model/_projection_head/linear_layers/(\d+)/(dense|bn_relu/bn)", layer
        )
        if match:
            names[layer] = (
                f"{prefix}{match[1]}/{'dense' if match[2] == 'dense' else 'batch_normalization'}"
            )
        elif layer == "model/supervised_head/linear_layer/dense":
            names[layer] = "head_supervised/linear_layer/dense"
    return {
        key: f"{names[layer]}/{leaf}" for key in keys for layer, _, leaf in [key.rpartition("/")]
    }


def call_order(layer: str) -> list[int]:
    """Returns a sort key that puts the layers of an encoder in call order.

    `layer` is a checkpoint key without the variable name.
    """
    part_order = {
        "initial_conv_relu_max_pool": 0,
        "block_groups": 1,
        "layers": 0,
        "projection_layers": 0,
        "shortcut_layers": 0,
        "conv_relu_dropblock_layers": 1,
        "conv2d_bn_layers": 1,
        "se_layer": 2,
        "conv2d_fixed_padding": 0,
        "conv2d": 0,
        "bn": 0,
        "batch_norm_relu": 1,
        "conv2d_0": 2,
        "batch_norm_relu_1": 3,
        "conv2d_1": 4,
        "se_reduce": 0,
        "se_expand": 1,
    }
    return [int(part) if part.isdigit() else part_order[part] for part in layer.split("/")[2:]]
