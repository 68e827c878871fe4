"""Reads PyTorch ResNets from safetensors files whose tensors are named as in torchvision and timm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import safetensors

import resnet
from checkpoints import architecture, torch_names
from runtime import batch_norm
from runtime.errors import UserError, first_line

FORMAT = "PyTorch weights"
_DTYPES = ("F16", "F32", "F64")
_REMEDY = "Use a ResNet with the names and shapes of torchvision's resnet18 to resnet152."
_IDENTITY_SHORTCUT = "layer1.0.downsample."


@dataclasses.dataclass(frozen=True)
class Contents:
    """The names and shapes of the weights in a file, and the metadata of the file."""

    # Maps checkpoint keys to names. `reader` computes tensors that are not in the file.
    tensors: dict[str, str]
    shapes: dict[str, tuple]  # Maps checkpoint keys to shapes in the layout of a checkpoint.
    image_size: int | None  # The image size is optional in the metadata.
    step: int | None  # The training step is optional in the metadata.
    notes: list[str]  # Messages for the user.


def read_contents(path: str, flag: str) -> Contents:
    """Reads the header of the file at `path`. `flag` is the flag whose value is `path`, for error messages.

    Raises:
      UserError: the file cannot be read, or it does not contain a ResNet that this program
        supports.
    """
    if "://" in path:
        raise UserError(
            f"{flag}={path}: {torch_names.SUFFIX} files must be on a local disk. Copy the file to a"
            " local disk."
        )
    try:
        with safetensors.safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"{flag}={path}: the file cannot be read ({first_line(error)}). Copy it again, or use"
            " another file."
        ) from error
    head = {"fc.weight": "kernel", "fc.bias": "bias"}
    names = {name for name in shapes if not name.endswith("num_batches_tracked")}
    tensors, has_identity = _encoder_tensors(f"{flag}={path}", names - head.keys(), shapes)
    if len(shapes.get("fc.weight", ())) == 2 and shapes.get("fc.bias") == shapes["fc.weight"][:1]:
        for name, variable in head.items():
            tensors[name] = f"{architecture.LINEAR_HEAD}{variable}", shapes[name][::-1]
    for name in tensors.keys() & names:
        if dtypes[name] not in _DTYPES:
            raise UserError(
                f"{flag}={path}: {name} has type {dtypes[name]}. Convert the weights to float32."
            )
    notes = []
    if has_identity:
        notes.append(
            "PyTorch weights: the identity shortcut of layer1.0 becomes a convolution with batch"
            " norm that computes the identity; in training, its batch norm uses batch statistics"
        )
    if "resnet_depth" not in metadata:
        notes.append(
            "PyTorch weights: unlike in most PyTorch networks, images are not normalized by mean"
            " and standard deviation, and max pooling pads inputs of even size only at the bottom"
            " and right (docs/pytorch.md)"
        )
    image_size, step = (
        int(metadata[name]) if name in metadata else None for name in ("image_size", "step")
    )
    return Contents(
        {key: name for name, (key, _) in tensors.items()},
        dict(tensors.values()),
        image_size,
        step,
        notes,
    )


def _encoder_tensors(
    location: str, names: set[str], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], bool]:
    """Finds the encoder with the given tensors.

    Args:
      location: flag and path, for error messages.
      names: the names of the encoder's tensors.
      shapes: dict mapping names to shapes.

    Returns:
      A dict that maps names to pairs of a checkpoint key and the shape in a checkpoint, and whether
      layer1.0 has an identity shortcut. In this case, the tensors of the shortcut are not in the
      file, and `reader` computes them.
    """
    settings, deep_stem = _count(location, names, shapes)
    expected = {
        torch_names.torch_name(key, deep_stem): (key, shape)
        for key, shape in architecture.encoder_shapes(*settings).items()
    }
    missing = expected.keys() - names
    # Stock ResNet-18 and ResNet-34 have an identity shortcut in layer1.0. This program has a
    # convolution there.
    shortcut = {name for name in expected if name.startswith(_IDENTITY_SHORTCUT)}
    has_identity = not settings[0] and shortcut <= missing
    if has_identity:
        missing -= shortcut
    for problem, unusual in (
        ("is missing", missing),
        ("is not supported", names - expected.keys()),
    ):
        if unusual:
            raise UserError(f"{location}: {min(unusual)} {problem}. {_REMEDY}")
    for name in sorted(names):
        shape = torch_names.shape_to_torch(expected[name][1])
        if shapes[name] != shape:
            raise UserError(
                f"{location}: {name} has shape {list(shapes[name])} instead of {list(shape)}."
                " Grouped convolutions (ResNeXt) and torchvision's wide ResNets are not supported."
                f" {_REMEDY}"
            )
    return expected, has_identity


def _count(
    location: str, names: set[str], shapes: dict[str, tuple[int, ...]]
) -> tuple[tuple, bool]:
    """Returns the arguments of `architecture.encoder_shapes`, and whether the stem is that of ResNet-D."""
    # Networks with selective kernels have ResNet-D's shortcuts.
    has_kernels = "layer1.0.downsample.2.weight" in names
    deep_stem = "conv1.0.weight" in names and has_kernels
    conv1 = "conv1.0.weight" if deep_stem else "conv1.weight"
    if len(shapes.get(conv1, ())) != 4:
        raise UserError(
            f"{location}: the file does not contain a ResNet (no tensor conv1.weight with four"
            f" axes; first tensors: {', '.join(sorted(shapes)[:3])}). {_REMEDY}"
        )
    width, _, kernel_size, _ = shapes[conv1]
    width *= 1 + deep_stem
    blocks = tuple(
        len({name.split(".")[1] for name in names if name.startswith(f"layer{group}.")})
        for group in range(1, 5)
    )
    structure = ("layer1.0.conv3.weight" in names, blocks)
    if (
        structure not in resnet.DEPTHS.values()
        or not width
        or width % 64
        or kernel_size not in (3, 7)
    ):
        raise UserError(
            f"{location}: no ResNet of depth 10 to 200 has {'-'.join(map(str, blocks))} "
            f"{'bottleneck' if structure[0] else 'basic'} blocks and conv1.weight of shape "
            f"{list(shapes[conv1])}. {_REMEDY}"
        )

    def ratio(name):
        # Half a channel more than the layer has, because `resnet` rounds down.
        return (shapes[name][0] + 0.5) / (8 * width) if name in names else 0.0

    ratios = (
        ratio("layer4.0.conv2.attn.fc_reduce.weight") or float(has_kernels),
        ratio("layer4.0.se.fc1.weight"),
    )
    cifar_stem = kernel_size == 3 and not deep_stem
    return (*structure, width // 64, cifar_stem, *ratios), deep_stem


def _replaced_tensor(name: str, channels: int) -> np.ndarray:
    """Returns one tensor of the convolution and batch norm that replace the identity shortcut.

    The tensor is float32, in PyTorch's layout.
    """
    variable = name.removeprefix(_IDENTITY_SHORTCUT)
    if variable == "0.weight":
        return np.eye(channels, dtype=np.float32)[:, :, np.newaxis, np.newaxis]
    values = {"1.weight": 1, "1.running_var": 1 - batch_norm.EPSILON}
    return np.full(channels, values.get(variable, 0), np.float32)


def reader(path: str) -> Callable[[str], np.ndarray]:
    """Returns a function that maps names from `Contents.tensors` to arrays in the layout of the checkpoint.

    The function raises `ValueError` if the file is corrupt.
    """

    def read(name):
        try:
            with safetensors.safe_open(path, "numpy") as file:
                if name not in file.keys():  # noqa: SIM118  (not a dict)
                    return torch_names.from_torch(
                        _replaced_tensor(name, len(file.get_tensor("bn1.weight")))
                    )
                return torch_names.from_torch(file.get_tensor(name))
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(first_line(error)) from error

    return read
