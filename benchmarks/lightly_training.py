"""Baseline for `race`: SimCLR with the transformations, the loss, LARS and the schedule of the library lightly.

    python -m benchmarks.lightly_training JSON

The images are in memory, and no linear head is trained. This module does not import TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch
from lightly.loss import NTXentLoss
from lightly.models.utils import get_weight_decay_parameters
from lightly.transforms import SimCLRTransform
from lightly.utils.lars import LARS
from lightly.utils.scheduler import CosineWarmupScheduler
from PIL import Image
from safetensors.torch import save_file

from benchmarks import torch_step


def main(settings: dict) -> None:
    """Trains, and writes the encoder to EPOCH.safetensors every `checkpoint_epochs` epochs."""
    epochs = settings["train_epochs"]
    transform = SimCLRTransform(
        input_size=settings["image_size"],
        cj_strength=settings["color_jitter_strength"],
        gaussian_blur=0.0,
        normalize=None,
    )

    def views(images):  # two batches, each float32 [batch, 3, size, size]
        pairs = [transform(Image.fromarray(image)) for image in images]
        return torch.utils.data.default_collate(pairs)

    loader = torch.utils.data.DataLoader(
        np.load(f"{settings['model_dir']}/images.npy"),
        settings["train_batch_size"],
        collate_fn=views,
        shuffle=True,
        drop_last=True,
        num_workers=os.cpu_count() or 1,
        persistent_workers=True,
    )
    network = torch_step.make_network(settings["resnet_depth"], settings["cifar_stem"])
    network.to(memory_format=torch.channels_last)
    decayed, others = get_weight_decay_parameters([network.encoder, network.projection_head])
    optimizer = LARS(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=settings["peak"],
        momentum=0.9,
        weight_decay=settings["weight_decay"],
    )
    schedule = CosineWarmupScheduler(
        optimizer, settings["warmup_epochs"] * len(loader), epochs * len(loader)
    )
    compute_loss = NTXentLoss(settings["temperature"])
    for epoch in range(1, epochs + 1):
        for pair in loader:
            images = torch.cat(pair).to(memory_format=torch.channels_last)
            with torch.autocast("cpu", enabled=settings["precision"] == "mixed_bfloat16"):
                projections = network.projection_head(network.encoder(images))
            loss = compute_loss(*projections.float().chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch}/{epochs}  loss {loss.item():.3f}", flush=True)
        if epoch % settings["checkpoint_epochs"] == 0 or epoch == epochs:
            weights = {
                name: value.contiguous() for name, value in network.encoder.state_dict().items()
            }
            save_file(weights, f"{settings['model_dir']}/{epoch:04}.safetensors")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
