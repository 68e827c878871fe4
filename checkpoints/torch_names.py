"""Names and layouts of the weights in the ResNets of torchvision and timm."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SUFFIX = ".safetensors"
_VARIABLE_NAMES = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def torch_name(key: str) -> str:
    """Maps the checkpoint key of an encoder variable to the name of the variable in PyTorch.

    Networks with selective kernels, squeeze-and-excitation or ResNet-D's stem have no equivalent in
    torchvision.
    """
    *path, layer_type, variable_name = key.removeprefix("model/resnet_model/").split("/")
    prefix, index = "", 1
    if path[0] == "block_groups":
        _, group, _, block, part, position = path
        prefix = f"layer{int(group) + 1}.{block}."
        if part in ("projection_layers", "shortcut_layers"):
            return f"{prefix}downsample.{position}.{_VARIABLE_NAMES[variable_name]}"
        # A convolution and its batch norm take up two positions, or three in bottleneck blocks (the
        # third is unused).
        index = int(position) // (3 if part == "conv_relu_dropblock_layers" else 2) + 1
    return f"{prefix}{'conv' if layer_type == 'conv2d' else 'bn'}{index}.{_VARIABLE_NAMES[variable_name]}"


def head_names(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Maps the checkpoint keys of the heads to names for PyTorch.

    Args:
      keys: checkpoint keys of a model.

    Returns:
      A dict with the keys `projection_head` and `linear_head`. Each value is a dict that maps
      checkpoint keys to names, and is empty if the model does not have that head. The names are
      layer0.linear.weight, layer0.bn.weight, ... for the projection head, and weight and bias for
      the linear head.
    """
    names = {"projection_head": {}, "linear_head": {}}
    for key in keys:
        *path, variable_name = key.split("/")
        if path[1] == "_projection_head":
            layer_type = "linear" if path[-1] == "dense" else "bn"
            names["projection_head"][key] = (
                f"layer{path[3]}.{layer_type}.{_VARIABLE_NAMES[variable_name]}"
            )
        elif path[1] == "supervised_head":
            names["linear_head"][key] = _VARIABLE_NAMES[variable_name]
    return names


def to_torch(array: np.ndarray) -> np.ndarray:
    """Converts an array to PyTorch's layout.

    Args:
      array: [height, width, in, out], [in, out] or [channels].

    Returns:
      [out, in, height, width], [out, in] or [channels], contiguous.
    """
    return np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)


def from_torch(array: np.ndarray) -> np.ndarray:
    """Converts an array from PyTorch's layout. This is the inverse of `to_torch`."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T


def shape_to_torch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array after conversion with `to_torch`."""
    return (*shape[:-3:-1], *shape[:-2])


def shape_from_torch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array after conversion with `from_torch`."""
    return (*shape[2:], *shape[1::-1])
