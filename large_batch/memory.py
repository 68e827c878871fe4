"""Estimate of the memory that training requires, and memory of the machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

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
    convolutions = list(_convolutions(config))
    weights = sum(size**2 * inputs * outputs for _, size, inputs, outputs in convolutions)
    outputs = [0.0] + [
        channels * sides[group] ** 2
        for group, _, _, channels in convolutions
        if group > config.fine_tune_after_block
    ]
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


def _convolutions(config: Config) -> Iterator[tuple[int, int, int, int]]:
    """Yields the block group (0 for the stem), kernel size, inputs and outputs of an encoder's convolutions.

    Convolutions of channel means, which are small, are left out.
    """
    bottleneck, blocks = resnet.DEPTHS[config.resnet_depth]
    inputs, has_sk = 64 * config.width_multiplier, config.sk_ratio > 0
    if has_sk and not config.cifar_stem:
        yield 0, 3, 3, inputs // 2
        yield 0, 3, inputs // 2, inputs // 2
        yield 0, 3, inputs // 2, inputs
    else:
        yield 0, 3 if config.cifar_stem else 7, 3, inputs
    for group, count in enumerate(blocks, 1):
        filters = 64 * config.width_multiplier * 2 ** (group - 1)
        outputs = 4 * filters if bottleneck else filters
        yield group, 1, inputs, outputs  # the shortcut
        for _ in range(count):
            if bottleneck:
                yield group, 1, inputs, filters
                yield group, 3, filters, 2 * filters if has_sk else filters
                if has_sk:
                    yield group, 0, 0, 2 * filters  # the weighted outputs
                yield group, 1, filters, outputs
            else:
                yield group, 3, inputs, filters
                yield group, 3, filters, filters
            inputs = outputs


def limits() -> tuple[float, float]:
    """Returns the total and the available memory of the machine or the container, in bytes."""
    memory = psutil.virtual_memory()
    texts = [pathlib.Path(path).read_text() for path in filter(os.path.exists, _CGROUP_LIMITS)]
    total = min([memory.total, *(int(text) for text in texts if text.strip().isdigit())])
    return total, min(total, memory.available)
