"""Infers the settings of a network from the names and shapes of its variables."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

import resnet

ENCODER, PROJECTION_HEAD = "model/resnet_model/", "model/_projection_head/linear_layers/"
LINEAR_HEAD = "model/supervised_head/linear_layer/dense/"


def infer_flags(shapes: Mapping[str, tuple]) -> dict | None:
    """Infers a network's settings by counting its variables. No network is built.

    Args:
      shapes: dict mapping checkpoint keys to shapes.

    Returns:
      A dict that maps names of `Config` settings to values, or None if this program does not
      support the encoder.
    """
    flags = _encoder_flags(shapes)
    if not flags:
        return None
    kernels = re.compile(rf"{PROJECTION_HEAD}(\d+)/dense/kernel")
    layers = {int(match[1]): shapes[key] for key in shapes if (match := kernels.fullmatch(key))}
    flags["proj_head_mode"] = {0: "none", 1: "linear"}.get(len(layers), "nonlinear")
    if len(layers) > 1:
        flags["num_proj_layers"] = len(layers)
    if layers:
        flags["proj_out_dim"] = layers[max(layers)][-1]
    return flags


def _encoder_flags(shapes: Mapping[str, tuple]) -> dict | None:
    blocks = re.compile(rf"{ENCODER}block_groups/(\d+)/layers/(\d+)/").match
    groups = collections.Counter(
        group for group, _ in {m.groups() for m in map(blocks, shapes) if m}
    )
    structure = (
        any("/conv_relu_dropblock_layers/" in key for key in shapes),
        tuple(groups[group] for group in sorted(groups, key=int)),
    )
    depths = {structure: depth for depth, structure in resnet.DEPTHS.items()}
    stem = f"{ENCODER}initial_conv_relu_max_pool"
    kernel = shapes.get(f"{stem}/0/conv2d/kernel", ())
    if structure not in depths or len(kernel) != 4:
        return None
    has_deep_stem = f"{stem}/4/conv2d/kernel" in shapes
    width, remainder = divmod(kernel[-1] * (2 if has_deep_stem else 1), 64)
    if remainder or not width:
        return None
    filters = 64 * width * 2 ** max(len(structure[1]) - 1, 0)  # inner width of the last blocks

    def ratio(layer):
        outputs = [shape[-1] for key, shape in shapes.items() if key.endswith(f"/{layer}/kernel")]
        return max(outputs, default=0) / filters

    # In shortcuts of networks with selective kernels, the convolution follows the pooling.
    pooled = re.compile(r"/(projection|shortcut)_layers/[12]/conv2d/").search
    sk_ratio = ratio("conv2d_0")
    if not sk_ratio and (has_deep_stem or any(map(pooled, shapes))):
        sk_ratio = 1 / 16  # Basic blocks do not depend on the ratio.
    return dict(
        resnet_depth=depths[structure],
        width_multiplier=width,
        sk_ratio=sk_ratio,
        se_ratio=ratio("se_reduce"),
        stem="imagenet" if has_deep_stem or kernel[0] > 3 else "cifar",
    )


@functools.cache
@tf.autograph.experimental.do_not_convert  # AutoGraph is slow.
def encoder_shapes(*settings: Any) -> dict[str, tuple[int, ...]]:
    """Builds an encoder as a graph, without values.

    Args:
      *settings: the first arguments of `resnet.ResNet`, up to `se_ratio`.

    Returns:
      A dict that maps checkpoint keys to shapes. Layers are in the order in which the blocks create
      them. TF1 numbered the layers in this order.
    """

    def visit(node: tf.Module, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        if isinstance(node, tf.Variable):
            yield path, tuple(node.shape)
        for name, child in tf.train.TrackableView(node).children(node).items():
            yield from visit(child, f"{path}/{name}")

    with tf.Graph().as_default():
        encoder = resnet.ResNet(*settings)
        encoder(tf.zeros([1, 64, 64, 3]))
        return dict(visit(encoder, ENCODER.rstrip("/")))
