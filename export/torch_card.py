"""Model cards for PyTorch weights, in Markdown. The tests execute the code in the cards."""

from __future__ import annotations

import data_util
from config import Config
from export import model_card


def torch_card(
    config: Config, step: int | None, class_names: list[str] | None, file_name: str
) -> str:
    """Returns a model card with the code that loads a network in PyTorch.

    Args:
      config: settings of the network.
      step: training step, or None if unknown.
      class_names: names of the linear head's classes, or None if unknown.
      file_name: name of the encoder's file.
    """
    size = config.image_size
    cropped = round(size / data_util.CROP_PROPORTION) if config.center_crop_eval else size
    resized = dict(crop=cropped, squash=(size, size), pad=size)[config.eval_resize]
    square = "transforms.functional.center_crop(image, max(image.size))"
    pad = f"    transforms.Lambda(lambda image: {square}),\n" * (config.eval_resize == "pad")
    return f"""{model_card.front_matter("pytorch")}
# Encoder {config.network_name} for PyTorch

The encoder of a SimCLR network: a ResNet-{config.resnet_depth} with the stem `{config.stem_name}` and
{config.width_multiplier} times the standard number of channels. Training step: {"unknown" if step is None else step}.

```python
import torch_resnet

network = torch_resnet.load({file_name!r})
outputs = network(images)
```

The file `torch_resnet.py` requires only PyTorch and safetensors. `outputs` is a dict of the representation `h` and, if
the network has these heads, the projection `z` and the `logits` of the linear head. The parts of the network are
`network.encoder`, `network.projection_head` and `network.linear_head`.

Classes of the linear head: {model_card.class_list(class_names) if class_names else "not recorded"}.

## Input

`images` is float32 [n, 3, height, width], RGB, in [0, 1]. Do not subtract a mean or divide by a standard deviation.

```python
from torchvision import transforms

preprocess = transforms.Compose([
{pad}    transforms.Resize({resized}, transforms.InterpolationMode.BICUBIC),
    transforms.CenterCrop({size}),
    transforms.ToTensor()])
```

The evaluation preprocesses images in the same way, with one difference: `Resize` applies antialiasing when it shrinks
an image, which `tf.image.resize` does not do by default. The network was trained on random crops with values in the
same range.

## Differences from the ResNets of torchvision and timm

The tensors are named as in torchvision and timm, but their networks compute something else: they pad the input of the
max pooling on all four sides (here: inputs of even size only at the bottom and right), the first block of their
ResNet-18 and ResNet-34 has no projection shortcut, and they widen networks differently. Batch norm updates its moving
variance with the unbiased variance in PyTorch, and with the biased variance in the training of this network.
"""
