"""Infers the architecture of a network from the names and shapes of its variables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

import resnet
from resnet import LayerSpec

ENCODER, PROJECTION_HEAD = "model/resnet_model/", "model/_projection_head/linear_layers/"
LINEAR_HEAD = "model/supervised_head/linear_layer/dense/"
_MAX_PROJ_LAYERS = 100


@functools.cache
def all_keys() -> frozenset[str]:
    """Returns the checkpoint keys of all networks that this program supports.

    The encoders have one more block per group than the largest supported one, so that a larger
    encoder is not mistaken for a supported one.
    """
    blocks = tuple(max(counts) + 1 for counts in zip(*(b for _, b in resnet.DEPTHS.values())))
    layers = {
        ENCODER + spec.key: spec.kind
        for parts in itertools.product((False, True), repeat=4)
        for spec in _specs(blocks, *parts)
    }
    for index in range(_MAX_PROJ_LAYERS):
        layers[f"{PROJECTION_HEAD}{index}/dense"] = resnet.CONVOLUTION_WITH_BIAS
        layers[f"{PROJECTION_HEAD}{index}/bn_relu/bn"] = resnet.BATCH_NORM
    layers[LINEAR_HEAD.rstrip("/")] = resnet.CONVOLUTION_WITH_BIAS
    return frozenset(f"{key}/{variable}" for key, kind in layers.items() for variable in kind)


def checkpoint_names(layers: Iterable[LayerSpec]) -> list[str]:
    """Returns the keys of an encoder's layers in a checkpoint."""
    return [ENCODER + spec.key for spec in layers]


def match_encoder(
    shapes: Mapping[str, tuple], layer_names: Callable[[list[LayerSpec]], list[str]]
) -> tuple[dict, dict[str, str]] | None:
    """Finds the encoder whose variables have the given names and shapes.

    Args:
      shapes: dict mapping the names of an encoder's variables to shapes.
      layer_names: function that returns the names of an encoder's layers in this file format.

    Returns:
      A dict of `Config` settings, and a dict mapping names to checkpoint keys. None if this program
      does not support the encoder.
    """
    layers_in_file = {name.rpartition("/")[0] for name in shapes}
    for cifar_stem, has_sk, has_se, (depth, (bottleneck, blocks)) in itertools.product(
        (False, True), (False, True), (False, True), resnet.DEPTHS.items()
    ):
        specs = _specs(blocks, bottleneck, cifar_stem, has_sk, has_se)
        names = {spec.key: name for spec, name in zip(specs, layer_names(specs))}
        if set(names.values()) != layers_in_file:
            continue
        # Output channels of the last layer of each name, such as `conv2d`.
        channels = {
            key.rpartition("/")[2]: shapes.get(f"{name}/kernel", (0,))[-1]
            for key, name in names.items()
        }
        filters = channels["conv2d"] // (4 if bottleneck else 1)  # inner width of the last block
        width = filters // (64 * 2 ** max(len(blocks) - 1, 0))
        if not width:
            continue
        # Basic blocks have no SK convolution.
        sk_ratio = channels.get("conv2d_0", filters / 16) / filters if has_sk else 0.0
        se_ratio = channels.get("se_reduce", 0) / filters
        variables = {
            (f"{names[spec.key]}/{variable}", f"{ENCODER}{spec.key}/{variable}"): shape
            for spec in resnet.layer_specs(
                bottleneck, blocks, width, cifar_stem, sk_ratio, se_ratio
            )
            for variable, shape in spec.variables().items()
        }
        if {name: shape for (name, _), shape in variables.items()} == shapes:
            return dict(
                resnet_depth=depth,
                width_multiplier=width,
                sk_ratio=sk_ratio,
                se_ratio=se_ratio,
                stem="cifar" if cifar_stem else "imagenet",
            ), dict(variables.keys())
    return None


def infer_flags(shapes: Mapping[str, tuple]) -> dict | None:
    """Infers a network's settings from the shapes of its variables.

    Args:
      shapes: dict mapping checkpoint keys to shapes.

    Returns:
      A dict that maps names of `Config` settings to values, or None if this program does not
      support the encoder.
    """
    encoder = {key: shape for key, shape in shapes.items() if key.startswith(ENCODER)}
    match = match_encoder(encoder, checkpoint_names)
    if not match:
        return None
    layers = [
        shapes[key]
        for index in range(_MAX_PROJ_LAYERS)
        if (key := f"{PROJECTION_HEAD}{index}/dense/kernel") in shapes
    ]
    flags = dict(match[0], proj_head_mode={0: "none", 1: "linear"}.get(len(layers), "nonlinear"))
    if len(layers) > 1:
        flags["num_proj_layers"] = len(layers)
    if layers:
        flags["proj_out_dim"] = layers[-1][-1]
    return flags


def _specs(
    blocks: tuple[int, ...], bottleneck: bool, cifar_stem: bool, has_sk: bool, has_se: bool
) -> list[LayerSpec]:
    return list(resnet.layer_specs(bottleneck, blocks, 1, cifar_stem, has_sk / 16, has_se / 16))
