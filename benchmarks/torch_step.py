"""Baseline for training steps: the same networks and losses in PyTorch.

This module does not import TensorFlow. The names of the weights are those of `checkpoints.torch_names`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

_TEMPERATURE = 0.1
_NETWORKS = {10: (False, (1, 1, 1, 1)), 18: (False, (2, 2, 2, 2)), 50: (True, (3, 4, 6, 3))}


def _convolution(inputs: int, outputs: int, size: int, strides: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, strides, padding=size // 2, bias=False)


class Block(nn.Module):
    """A basic block (two 3x3 convolutions) or a bottleneck block (1x1, 3x3 and 1x1 convolutions)."""

    def __init__(self, inputs: int, width: int, strides: int, bottleneck: bool, project: bool):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        # (input channels, output channels, kernel size, stride)
        shapes = [(inputs, width, 3, strides), (width, outputs, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, strides), (width, outputs, 1, 1)]
        self.depth = len(shapes)
        for index, shape in enumerate(shapes, 1):
            self.add_module(f"conv{index}", _convolution(*shape))
            self.add_module(f"bn{index}", nn.BatchNorm2d(shape[1]))
        shortcut = _convolution(inputs, outputs, 1, strides), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(*shortcut if project else ())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps [n, c, h, w] to [n, c', h / strides, w / strides]."""
        x = inputs
        for index in range(1, self.depth + 1):
            x = x if index == 1 else torch.relu(x)
            x = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(x))
        return torch.relu(x + self.downsample(inputs))


class Network(nn.Module):
    """A ResNet with a projection head of three layers and a linear head for ten classes."""

    def __init__(self, depth: int, cifar_stem: bool):
        """Creates the network.

        Args:
          depth: 10, 18 or 50.
          cifar_stem: whether the first layer is a 3x3 convolution, rather than a 7x7 convolution
            with max pooling.
        """
        super().__init__()
        bottleneck, counts = _NETWORKS[depth]
        self.conv1 = _convolution(3, 64, 3) if cifar_stem else _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if cifar_stem else nn.MaxPool2d(3, 2, ceil_mode=True)
        channels, self.groups = 64, [f"layer{group}" for group in range(1, 5)]
        for group, count in enumerate(counts):
            width, blocks = 64 * 2**group, []
            for index in range(count):
                strides = 2 if group and not index else 1
                blocks.append(Block(channels, width, strides, bottleneck, not index))
                channels = width * (4 if bottleneck else 1)
            self.add_module(self.groups[group], nn.Sequential(*blocks))
        self.projection_head = nn.ModuleDict()
        for index, outputs in enumerate((channels, channels, 128)):
            linear, norm = nn.Linear(channels, outputs, bias=False), nn.BatchNorm1d(outputs)
            layer = nn.ModuleDict(dict(linear=linear, bn=norm))
            self.projection_head[f"layer{index}"] = layer
        norm.register_parameter("bias", None)
        self.linear_head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps images [n, 3, h, w] to projections [n, 128] and logits of the linear head [n, 10]."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        for group in self.groups:
            x = getattr(self, group)(x)
        x = x.float().mean([2, 3])
        logits = self.linear_head(x.detach())
        for index, layer in enumerate(self.projection_head.values()):
            x = layer["bn"](layer["linear"](torch.relu(x) if index else x))
        return x, logits


def losses(network: Network, views: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns NT-Xent, scaled as in `objective`, and the linear head's loss, for views [2n, 3, h, w] and labels [n]."""
    projections, logits = network(views)
    with torch.autocast(views.device.type, enabled=False):
        z = functional.normalize(projections.float(), dim=1)
        similarities = (z @ z.T / _TEMPERATURE).fill_diagonal_(-1e9)
    positives = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    head_loss = functional.cross_entropy(logits.float(), torch.cat([labels, labels]))
    return 2 * functional.cross_entropy(similarities, positives), head_loss


def step(
    depth: int, size: int, batch: int, precision: str, cifar_stem: bool, backend: str | None = None
) -> Callable[[int], float]:
    """Training steps on random views in the memory of the device; see `measure.measure`.

    The optimizer is SGD with momentum, which costs less than LARS. With float16, the loss is not
    scaled. `backend` is the backend of `torch.compile`, or None.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # As in TensorFlow, float32 uses TF32.
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    layout = dict(device=device, memory_format=torch.channels_last)
    views = torch.rand(2 * batch, 3, size, size).to(**layout)
    labels = torch.randint(10, (batch,), device=device)
    network = Network(depth, cifar_stem).to(**layout)
    compute = losses if backend is None else torch.compile(losses, backend=backend)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
    dtype = {"mixed_float16": torch.float16, "mixed_bfloat16": torch.bfloat16}.get(precision)

    def run_steps(calls):
        for _ in range(calls):
            with torch.autocast(device, dtype, enabled=dtype is not None):
                loss = sum(compute(network, views, labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    return run_steps
