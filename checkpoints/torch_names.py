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


# Selective kernels: path of a layer in a checkpoint -> in PyTorch. The names are those of timm, where it has the layer.
_SELECTIVE_KERNEL = {
    "conv2d_fixed_padding/conv2d": "conv",
    "batch_norm_relu/bn": "bn",
    "conv2d_0": "attn.fc_reduce",
    "batch_norm_relu_1/bn": "attn.bn",
    "conv2d_1": "attn.fc_select",
}
# The stem of networks with selective kernels (ResNet-D).
_DEEP_STEM = {"0": "conv1.0", "1": "conv1.1", "2": "conv1.3", "3": "conv1.4", "4": "conv1.6"}


def torch_name(key: str, deep_stem: bool) -> str:
    """Maps the checkpoint key of an encoder variable to the name of the variable in PyTorch.

    Args:
      key: checkpoint key.
      deep_stem: whether the stem is that of ResNet-D.
    """
    path, _, variable_name = key.removeprefix("model/resnet_model/").rpartition("/")
    return f"{_layer_name(path.split('/'), deep_stem)}.{_VARIABLE_NAMES[variable_name]}"


def _layer_name(path: list[str], deep_stem: bool) -> str:
    kind = "conv" if path[-1] == "conv2d" else "bn"
    if path[0] != "block_groups":
        return _DEEP_STEM.get(path[1], "bn1") if deep_stem else f"{kind}1"
    _, group, _, block, part, *rest = path
    prefix = f"layer{int(group) + 1}.{block}."
    if path[-1] in ("se_reduce", "se_expand"):
        return f"{prefix}se.fc{1 if path[-1] == 'se_reduce' else 2}"
    position, layer = int(rest[0]), "/".join(rest[1:])
    if layer in _SELECTIVE_KERNEL:
        return f"{prefix}conv2.{_SELECTIVE_KERNEL[layer]}"
    if part in ("projection_layers", "shortcut_layers"):
        # A strided shortcut with pooling has an unused position.
        return f"{prefix}downsample.{min(position, 1 if kind == 'conv' else 2)}"
    # A convolution and its batch norm take up two positions, or three in bottleneck blocks (the
    # third is unused).
    index = (position + 1) // 3 if part == "conv_relu_dropblock_layers" else position // 2
    return f"{prefix}{kind}{index + 1}"


def names_by_part(keys: Iterable[str], deep_stem: bool) -> dict[str, dict[str, str]]:
    """Maps the checkpoint keys of a model to names for PyTorch.

    Args:
      keys: checkpoint keys of a model.
      deep_stem: see `torch_name`.

    Returns:
      A dict with the keys `projection_head`, `linear_head` and `encoder`. Each value is a dict that
      maps checkpoint keys to names, and is empty if the model does not have that head. The names
      are layer0.linear.weight, layer0.bn.weight, ... for the projection head, and weight and bias
      for the linear head.
    """
    names = {"projection_head": {}, "linear_head": {}, "encoder": {}}
    for key in keys:
        *path, variable_name = key.split("/")
        if path[1] == "_projection_head":
            layer_type = "linear" if path[-1] == "dense" else "bn"
            names["projection_head"][key] = (
                f"layer{path[3]}.{layer_type}.{_VARIABLE_NAMES[variable_name]}"
            )
        elif path[1] == "supervised_head":
            names["linear_head"][key] = _VARIABLE_NAMES[variable_name]
        else:
            names["encoder"][key] = torch_name(key, deep_stem)
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
