"""Variable names in the original's TF1 checkpoints."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping

import resnet
from checkpoints import architecture

_VARIABLE = "(?:kernel|bias|gamma|beta|moving_mean|moving_variance)"
_NAME = re.compile(
    rf"(base_model/(?:conv2d|batch_normalization)(?:_\d+)?/{_VARIABLE}"
    rf"|head_contrastive/n?l_\d+/(?:dense|batch_normalization)/{_VARIABLE}"
    r"|head_supervised/linear_layer/dense/(?:kernel|bias))(?::0)?$"
)


def names_by_key(keys: Iterable[str]) -> dict[str, str]:
    """Maps the checkpoint keys of an encoder to TF1 names, which number convolutions and batch norms.

    Args:
      keys: checkpoint keys in the order of `architecture.encoder_shapes`.
    """
    names, numbers, counts = {}, {}, collections.Counter()
    for key in keys:
        layer, _, variable = key.rpartition("/")
        kind = "batch_normalization" if layer.endswith("/bn") else "conv2d"
        if layer not in numbers:
            numbers[layer] = f"_{counts[kind]}" if counts[kind] else ""
            counts[kind] += 1
        names[key] = f"base_model/{kind}{numbers[layer]}/{variable}"
    return names


def find_tensors(shapes: Mapping[str, tuple], names: Mapping[str, str]) -> dict[str, str]:
    """Returns a dict mapping checkpoint keys to keys in a file with TF1 names.

    If the encoder is not supported, the names of its variables are kept.

    Args:
      shapes: dict mapping keys in the file to shapes.
      names: dict mapping variable names to keys in the file. Scope prefixes that TF Hub modules may
        add to names are ignored.
    """
    tensors = {match[1]: key for name, key in names.items() if (match := _NAME.search(name))}
    encoder = {name: shapes[key] for name, key in tensors.items() if name.startswith("base_model/")}
    settings = _count(encoder)
    keys_by_name = {}
    if settings:
        names_in_encoder = names_by_key(architecture.encoder_shapes(*settings))
        keys_by_name = {name: key for key, name in names_in_encoder.items()}
    if keys_by_name.keys() != encoder.keys():
        keys_by_name = {}
    return {keys_by_name.get(name) or _head_key(name): key for name, key in tensors.items()}


def _count(shapes: Mapping[str, tuple]) -> tuple | None:
    """Returns the settings of an encoder that determine its keys (see `architecture.encoder_shapes`).

    Returns None if this program does not support the encoder.
    """
    kernels, name = [], "base_model/conv2d"
    while len(shapes.get(f"{name}/kernel", ())) == 4:
        kernels.append(shapes[f"{name}/kernel"])
        name = f"base_model/conv2d_{len(kernels)}"
    # A block starts with the shortcut, whose kernel has size 1. Bottleneck blocks continue with a
    # second kernel of size 1 and, with selective kernels, two convolutions in one.
    sizes = [kernel[0] for kernel in kernels]
    num_stem = [*sizes, 1].index(1)
    bottleneck = sizes[num_stem + 1 : num_stem + 2] == [1]
    spatial = kernels[num_stem + 2 : num_stem + 3]
    has_sk = bottleneck and any(kernel[3] == 2 * kernel[2] for kernel in spatial)
    has_se = any(name.endswith("/bias") for name in shapes)
    layers_per_block = (3 if bottleneck else 2) + 2 * has_sk + 2 * has_se
    for is_bottleneck, blocks in resnet.DEPTHS.values():
        num_layers = num_stem + len(blocks) + layers_per_block * sum(blocks)
        if (is_bottleneck, num_layers) == (bottleneck, len(kernels)):
            sk_ratio = 1 / 16 if has_sk or num_stem > 1 else 0.0
            cifar_stem = num_stem == 1 and sizes[0] == 3
            return bottleneck, blocks, 1, cifar_stem, sk_ratio, 1 / 16 if has_se else 0.0
    return None


def _head_key(name: str) -> str:
    name = re.sub(r"head_contrastive/n?l_(\d+)/", rf"{architecture.PROJECTION_HEAD}\1/", name)
    name = name.replace("/batch_normalization/", "/bn_relu/bn/")
    return name.replace("head_supervised/", "model/supervised_head/")
