"""Baseline for training steps: the same networks and losses in PyTorch.

This module imports only PyTorch. The names of the weights are those of `checkpoints.torch_names`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_TEMPERATURE = 0.1
_NETWORKS = {10: (False, (1, 1, 1, 1)), 18: (False, (2, 2, 2, 2)), 50: (True, (3, 4, 6, 3))}


def _convolution(inputs, outputs, size, strides=1):
    return nn.Conv2d(inputs, outputs, size, strides, padding=size // 2, bias=False)


class Block(nn.Module):
    """A basic block (two 3x3 convolutions) or a bottleneck block (1x1, 3x3 and 1x1 convolutions)."""

    def __init__(self, inputs, width, strides, bottleneck, project):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        # (input channels, output channels, kernel size, stride)
        shapes = (
            [(inputs, width, 1, 1), (width, width, 3, strides), (width, outputs, 1, 1)]
            if bottleneck
            else [(inputs, width, 3, strides), (width, outputs, 3, 1)]
        )
        self.depth = len(shapes)
        for index, shape in enumerate(shapes, 1):
            self.add_module(f"conv{index}", _convolution(*shape))
            self.add_module(f"bn{index}", nn.BatchNorm2d(shape[1]))
        self.downsample = (
            nn.Sequential(_convolution(inputs, outputs, 1, strides), nn.BatchNorm2d(outputs))
            if project
            else nn.Identity()
        )

    def forward(self, inputs):
        """Maps [n, c, h, w] to [n, c', h / strides, w / strides]."""
        outputs = inputs
        for index in range(1, self.depth + 1):
            outputs = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(outputs))
            if index < self.depth:
                outputs = torch.relu(outputs)
        return torch.relu(outputs + self.downsample(inputs))


class Network(nn.Module):
    """A ResNet with a projection head and a linear head."""

    def __init__(self, depth, cifar_stem, classes=10, out_dim=128, num_layers=3):
        """Creates the network.

        Args:
          depth: 10, 18 or 50.
          cifar_stem: whether the first layer is a 3x3 convolution, rather than a 7x7 convolution
            with max pooling.
          classes: number of classes.
          out_dim: size of the projections.
          num_layers: number of layers in the projection head.
        """
        super().__init__()
        bottleneck, counts = _NETWORKS[depth]
        self.conv1 = _convolution(3, 64, 3) if cifar_stem else _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if cifar_stem else nn.MaxPool2d(3, 2, ceil_mode=True)
        channels, groups = 64, []
        for group, count in enumerate(counts):
            blocks = []
            for index in range(count):
                strides = 2 if group and not index else 1
                blocks.append(Block(channels, 64 * 2**group, strides, bottleneck, not index))
                channels = 64 * 2**group * (4 if bottleneck else 1)
            groups.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.projection_head = nn.ModuleDict()
        for index in range(num_layers):
            is_last = index == num_layers - 1
            outputs = out_dim if is_last else channels
            norm = nn.BatchNorm1d(outputs)
            if is_last:
                norm.register_parameter("bias", None)
            self.projection_head[f"layer{index}"] = nn.ModuleDict(
                dict(linear=nn.Linear(channels, outputs, bias=False), bn=norm)
            )
        self.linear_head = nn.Linear(channels, classes)

    def forward(self, images):
        """Maps images [n, 3, h, w] to projections [n, out_dim] and logits of the linear head [n, classes]."""
        outputs = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        for group in (self.layer1, self.layer2, self.layer3, self.layer4):
            outputs = group(outputs)
        hidden = outputs.float().mean([2, 3])
        logits = self.linear_head(hidden.detach())
        last = len(self.projection_head) - 1
        for index, layer in enumerate(self.projection_head.values()):
            hidden = layer["bn"](layer["linear"](hidden))
            hidden = torch.relu(hidden) if index < last else hidden
        return hidden, logits


def nt_xent(projections):
    """Returns NT-Xent with the scale of `objective.add_contrastive_loss`, for projections [2n, d]."""
    with torch.autocast(projections.device.type, enabled=False):
        z = functional.normalize(projections.float(), dim=1)
        similarities = (z @ z.T / _TEMPERATURE).fill_diagonal_(-1e9)
    positives = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return 2 * functional.cross_entropy(similarities, positives)


def losses(network, views, labels):
    """Returns the contrastive loss and the loss of the linear head, for views [2n, 3, h, w] and labels [n]."""
    projections, logits = network(views)
    return nt_xent(projections), functional.cross_entropy(
        logits.float(), torch.cat([labels, labels])
    )


def make_step(network, precision="float32", backend=None):
    """Returns a function that runs one step on (views [2n, 3, h, w], labels [n]) and returns the loss as a tensor.

    The optimizer is SGD with momentum, which costs less than LARS. With float16, the loss is not
    scaled.

    Args:
      network: a `Network`.
      precision: float32, tf32 (the same here), mixed_float16 or mixed_bfloat16.
      backend: backend of `torch.compile` for the network and the losses, or None.
    """
    compute = losses if backend is None else torch.compile(losses, backend=backend)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
    dtype = {"mixed_float16": torch.float16, "mixed_bfloat16": torch.bfloat16}.get(precision)

    def step(views, labels):
        with torch.autocast(views.device.type, dtype, enabled=dtype is not None):
            loss = sum(compute(network, views, labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
