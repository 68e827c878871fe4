"""The exported networks in PyTorch. This file requires only PyTorch and safetensors.

    import torch_resnet
    outputs = torch_resnet.load("encoder.safetensors")(images)

`images` is float32 [n, 3, height, width], RGB, in [0, 1]. `outputs` is a dict of the representation
`h` and, if the network has these heads, the projection `z` and the `logits` of the linear head.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Returns a convolution without bias that is padded symmetrically."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class SelectiveKernel(nn.Module):
    """Two 3x3 convolutions mixed by channel attention (arXiv:1903.06586), as in SimCLR v2."""

    def __init__(self, width: int, stride: int, ratio: float):
        """Creates the layer. The attention's bottleneck has `width` * `ratio` channels, but at least 32."""
        super().__init__()
        reduced = max(int(width * ratio), 32)
        self.conv = convolution(width, 2 * width, 3, stride)
        self.bn = nn.BatchNorm2d(2 * width)
        self.attn = nn.Sequential(
            OrderedDict(
                fc_reduce=convolution(width, reduced, 1),
                bn=nn.BatchNorm2d(reduced),
                relu=nn.ReLU(),
                fc_select=convolution(reduced, 2 * width, 1),
            )
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [n, c, h, w] to [n, c, h / stride, w / stride]."""
        branches = torch.relu(self.bn(self.conv(inputs))).unflatten(1, (2, -1))
        mixing = self.attn(branches.sum(1).mean([2, 3], keepdim=True)).unflatten(1, (2, -1))
        return (branches * mixing.softmax(1)).sum(1)


class SqueezeExcitation(nn.Module):
    """Channel weights computed from channel means (arXiv:1709.01507)."""

    def __init__(self, channels: int, reduced: int):
        """Creates the layer, whose bottleneck has `reduced` channels."""
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiplies [n, c, h, w] by the channel weights."""
        means = inputs.mean([2, 3], keepdim=True)
        return inputs * torch.sigmoid(self.fc2(torch.relu(self.fc1(means))))


class Block(nn.Module):
    """A residual block with two 3x3 convolutions or, as a bottleneck, with 1x1, 3x3 and 1x1 convolutions."""

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        bottleneck: bool,
        project: bool,
        sk_ratio: float,
        se_ratio: float,
    ):
        """Creates a block whose shortcut is a projection, if `project` is True, or the identity.

        If `sk_ratio` is above 0, projections follow pooling, and bottlenecks have selective kernels.
        If `se_ratio` is above 0, the block has squeeze-and-excitation.
        """
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        shapes = [(inputs, width, 3, stride), (width, width, 3)]
        if bottleneck:
            shapes = [(inputs, width, 1), (width, width, 3, stride), (width, outputs, 1)]
        self.bottleneck = bottleneck
        for index, shape in enumerate(shapes, 1):
            self.add_module(f"conv{index}", convolution(*shape))
            self.add_module(f"bn{index}", nn.BatchNorm2d(shape[1]))
        if bottleneck and sk_ratio:
            self.conv2, self.bn2 = SelectiveKernel(width, stride, sk_ratio), nn.Identity()
        reduced = max(int(width * se_ratio), 1)
        self.se = SqueezeExcitation(outputs, reduced) if se_ratio else nn.Identity()
        self.downsample = nn.Identity()
        if project:
            pooling = []
            if sk_ratio:
                # Without stride, TensorFlow's average does not include the padding.
                padding = nn.ReplicationPad2d if stride == 1 else nn.ZeroPad2d
                pooling = [nn.Sequential(padding((0, 1, 0, 1)), nn.AvgPool2d(2, stride))]
                stride = 1
            shortcut = convolution(inputs, outputs, 1, stride)
            self.downsample = nn.Sequential(*pooling, shortcut, nn.BatchNorm2d(outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [n, c, h, w] to [n, c', h / stride, w / stride]."""
        outputs = torch.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs))
        if self.bottleneck:
            outputs = self.bn3(self.conv3(torch.relu(outputs)))
        return torch.relu(self.se(outputs) + self.downsample(inputs))


class ResNet(nn.Module):
    """The encoder f. Its tensors are named as in the ResNets of torchvision and timm."""

    def __init__(
        self,
        bottleneck: bool,
        blocks: Sequence[int],
        width: int = 64,
        cifar_stem: bool = False,
        sk_ratio: float = 0.0,
        se_ratio: float = 0.0,
    ):
        """Creates a network with `blocks` blocks in each group, and `width` channels after the stem."""
        super().__init__()
        self.has_pooling = not cifar_stem
        self.conv1 = convolution(3, width, 3) if cifar_stem else convolution(3, width, 7, 2)
        if sk_ratio and not cifar_stem:
            half = width // 2
            self.conv1 = nn.Sequential(
                convolution(3, half, 3, 2),
                nn.BatchNorm2d(half),
                nn.ReLU(),
                convolution(half, half, 3),
                nn.BatchNorm2d(half),
                nn.ReLU(),
                convolution(half, width, 3),
            )
        self.bn1 = nn.BatchNorm2d(width)
        self.num_features = width
        for group, count in enumerate(blocks):
            layers = nn.Sequential()
            channels = width * 2**group
            for index in range(count):
                stride = 2 if group and not index else 1
                inputs = self.num_features
                layers.append(
                    Block(inputs, channels, stride, bottleneck, index == 0, sk_ratio, se_ratio)
                )
                self.num_features = channels * (4 if bottleneck else 1)
            self.add_module(f"layer{group + 1}", layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images [n, 3, height, width] to representations [n, num_features]."""
        outputs = torch.relu(self.bn1(self.conv1(images)))
        if self.has_pooling:  # As in TensorFlow, even sizes are padded only at the end.
            padding = [size % 2 for size in outputs.shape[2:]]
            outputs = functional.max_pool2d(outputs, 3, 2, padding, ceil_mode=True)
        outputs = self.layer4(self.layer3(self.layer2(self.layer1(outputs))))
        # Averaging in half precision would be inaccurate.
        return outputs.mean([2, 3], dtype=torch.promote_types(outputs.dtype, torch.float32))


def projection_head(widths: Sequence[int]) -> nn.Sequential:
    """Returns the projection head g for the sizes of its input and of the outputs of its layers."""
    head = nn.Sequential()
    for index, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        layer = OrderedDict(
            linear=nn.Linear(inputs, outputs, bias=False),
            bn=nn.BatchNorm1d(outputs),
            relu=nn.ReLU() if index < len(widths) - 2 else nn.Identity(),
        )
        head.add_module(f"layer{index}", nn.Sequential(layer))
    return head


class Network(nn.Module):
    """An encoder with its heads. A head is None if the network does not have it."""

    def __init__(
        self,
        encoder: ResNet,
        projection_head: nn.Sequential | None = None,
        linear_head: nn.Linear | None = None,
        num_layers: int = 0,
    ):
        """Creates the network. The linear head follows the first `num_layers` layers of the projection head."""
        super().__init__()
        self.encoder, self.num_layers = encoder, num_layers
        self.projection_head, self.linear_head = projection_head, linear_head

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a dict of `h` [n, c], `z` [n, d] and `logits` [n, classes]."""
        outputs = {"h": self.encoder(images)}
        if self.projection_head is not None:
            outputs["z"] = self.projection_head(outputs["h"])
        if self.linear_head is not None:
            head = self.projection_head[: self.num_layers] if self.num_layers else nn.Identity()
            outputs["logits"] = self.linear_head(head(outputs["h"]))
        return outputs


def load(path: str) -> Network:
    """Returns the network in FILE.safetensors and its heads in the files next to it, in evaluation mode."""

    def read(part):
        name = path.removesuffix(".safetensors") + f"{part}.safetensors"
        if part and not os.path.exists(name):
            return {}, {}
        with safe_open(name, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118

    tensors, metadata = read("")
    blocks = [
        sum(
            name.startswith(f"layer{group}.") and name.endswith(".conv1.weight") for name in tensors
        )
        for group in range(1, 5)
    ]
    encoder = ResNet(
        "layer1.0.conv3.weight" in tensors,
        blocks,
        len(tensors["bn1.weight"]),
        metadata["stem"] == "cifar",
        float(metadata["sk_ratio"]),
        float(metadata["se_ratio"]),
    )
    encoder.load_state_dict(tensors)
    network = Network(encoder)
    tensors, _ = read(".projection_head")
    if tensors:
        layers = [tensors[f"layer{index}.linear.weight"] for index in range(len(tensors) // 6)]
        network.projection_head = projection_head([encoder.num_features, *map(len, layers)])
        network.projection_head.load_state_dict(tensors)
    tensors, metadata = read(".linear_head")
    if tensors:
        network.num_layers = int(metadata["num_projection_layers"])
        network.linear_head = nn.Linear(*reversed(tensors["weight"].shape))
        network.linear_head.load_state_dict(tensors)
    return network.eval()
