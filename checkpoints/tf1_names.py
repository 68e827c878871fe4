"""Variable names in the original's TF1 checkpoints."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping

import resnet
from checkpoints import architecture
from resnet import LayerSpec

_VARIABLE = f"(?:{'|'.join({*resnet.CONVOLUTION_WITH_BIAS, *resnet.BATCH_NORM})})"
_NAME = re.compile(
    rf"(base_model/(?:conv2d|batch_normalization)(?:_\d+)?/{_VARIABLE}"
    rf"|head_contrastive/n?l_\d+/(?:dense|batch_normalization)/{_VARIABLE}"
    r"|head_supervised/linear_layer/dense/(?:kernel|bias))(?::0)?$"
)


def encoder_names(layers: Iterable[LayerSpec]) -> list[str]:
    """Returns the names of an encoder's layers. TF1 numbers convolutions and batch norms in call order."""
    names, counts = [], collections.Counter()
    for layer in layers:
        name = "batch_normalization" if layer.kind == resnet.BATCH_NORM else "conv2d"
        names.append(f"base_model/{name}_{counts[name]}" if counts[name] else f"base_model/{name}")
        counts[name] += 1
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
    _, keys = architecture.match_encoder(encoder, encoder_names) or (None, {})
    return {keys.get(name) or _head_key(name): key for name, key in tensors.items()}


def _head_key(name: str) -> str:
    name = re.sub(r"head_contrastive/n?l_(\d+)/", rf"{architecture.PROJECTION_HEAD}\1/", name)
    name = name.replace("/batch_normalization/", "/bn_relu/bn/")
    return name.replace("head_supervised/", "model/supervised_head/")
