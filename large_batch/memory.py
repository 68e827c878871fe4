"""Estimate of the memory that training requires, and memory of the machine."""

from __future__ import annotations

import math
import os
import pathlib

import psutil

import resnet
from config import Config

_PROCESS_BYTES = 1.3e9  # for TensorFlow and the compiled functions
_COPIES_OF_WEIGHTS = 4  # the value, the gradient, the momentum and a temporary copy
_COPIES_OF_IMAGES = 3  # the batch, and those that the input pipeline prepares
# Programs that XLA compiled for TPUs need 0.57 to 0.70 of the estimate (benchmarks/README.md).
_TPU_SHARE = 0.6
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def estimate(config: Config, parts: int = 1) -> float:
    """Returns the estimated peak memory use of training, in bytes.

    For the backward pass, each convolution stores its output and the normalized output. The
    gradients of both are stored for one layer at a time. See docs/training.md for measured values.

    Args:
      config: settings.
      parts: number of equal parts into which batches are divided. The estimate is for one part.
    """
    stride = 1 if config.cifar_stem else 2
    # sides of the outputs of the stem and of the block groups
    side = config.image_size / stride
    sides = [side, *(side / stride / 2**group for group in range(4))]
    outputs, weights = [0.0], 0
    for spec in resnet.layer_specs(
        *resnet.DEPTHS[config.resnet_depth],
        config.width_multiplier,
        config.cifar_stem,
        config.sk_ratio,
        config.se_ratio,
    ):
        weights += math.prod(spec.shape)
        group = int(spec.key.split("/")[1]) + 1 if spec.key.startswith("block_groups") else 0
        if spec.kind == resnet.BATCH_NORM and group > config.fine_tune_after_block:
            # Selective kernels weight their outputs.
            copies = 2 if "batch_norm_relu/" in spec.key else 1
            outputs.append(copies * spec.shape[-1] * sides[group] ** 2)
    views = 2 if config.pretraining else 1
    images = config.train_batch_size * views / parts
    stored = (config.micro_batch_size or config.train_batch_size) * views / parts
    value_bytes = 4 if config.precision == "float32" else 2
    return (_TPU_SHARE if config.use_tpu else 1) * (
        _PROCESS_BYTES
        + 4 * weights * _COPIES_OF_WEIGHTS
        + 12 * config.image_size**2 * images * _COPIES_OF_IMAGES
        + 2 * value_bytes * (sum(outputs) + max(outputs)) * stored
    )


def limits() -> tuple[float, float]:
    """Returns the total and the available memory of the machine or the container, in bytes."""
    memory = psutil.virtual_memory()
    texts = [pathlib.Path(path).read_text() for path in filter(os.path.exists, _CGROUP_LIMITS)]
    total = min([memory.total, *(int(text) for text in texts if text.strip().isdigit())])
    return total, min(total, memory.available)
