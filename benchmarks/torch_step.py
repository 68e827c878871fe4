"""Baseline for training steps: the same networks and losses in PyTorch.

This module does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from export import torch_resnet

_TEMPERATURE = 0.1
_NETWORKS = {10: (False, (1, 1, 1, 1)), 18: (False, (2, 2, 2, 2)), 50: (True, (3, 4, 6, 3))}


def make_network(depth: int, cifar_stem: bool) -> torch_resnet.Network:
    """Returns a ResNet of depth 10, 18 or 50 with a projection head of three layers and a linear head."""
    encoder = torch_resnet.ResNet(*_NETWORKS[depth], cifar_stem=cifar_stem)
    channels = encoder.num_features
    head = torch_resnet.projection_head((channels, channels, channels, 128))
    return torch_resnet.Network(encoder, head, nn.Linear(channels, 10))


def losses(
    network: torch_resnet.Network, views: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns NT-Xent, scaled as in `objective`, and the linear head's loss, for views [2n, 3, h, w] and labels [n]."""
    h = network.encoder(views)
    projections, logits = network.projection_head(h), network.linear_head(h.detach())
    with torch.autocast(views.device.type, enabled=False):
        z = functional.normalize(projections.float(), dim=1)
        similarities = (z @ z.T / _TEMPERATURE).fill_diagonal_(-1e9)
    positives = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    head_loss = functional.cross_entropy(logits.float(), torch.cat([labels, labels]))
    return 2 * functional.cross_entropy(similarities, positives), head_loss


def step(
    depth: int, size: int, batch: int, precision: str, cifar_stem: bool, backend: str | None
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
    network = make_network(depth, cifar_stem).to(**layout)
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
