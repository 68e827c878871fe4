"""Model cards for PyTorch weights, in Markdown. The tests execute the code in the cards."""

from __future__ import annotations

import json

import numpy as np

import data_util
import resnet
from checkpoints import torch_names
from config import Config
from export import model_card

_MAX_CLASSES = 10  # The linear head's file contains the names of all classes.


def torch_card(
    config: Config,
    step: int | None,
    class_names: list[str] | None,
    tensors: dict[str, dict[str, np.ndarray]],
    file_name: str,
) -> str:
    """Returns a model card with the code that loads a network in PyTorch.

    Args:
      config: settings of the network.
      step: training step, or None if unknown.
      class_names: names of the linear head's classes, or None if unknown.
      tensors: dict that maps `encoder`, `projection_head` and `linear_head` to dicts of arrays by
        name. The dict of a head that the network does not have is empty.
      file_name: name of the encoder's file.
    """
    size = config.image_size
    stem = "the CIFAR stem" if config.cifar_stem else "the ImageNet stem"
    width = (
        "the standard number of channels"
        if config.width_multiplier == 1
        else (f"{config.width_multiplier} times the standard number of channels")
    )
    steps = "" if step is None else f" after {step:,} training steps"
    differences = "\n".join(
        f"| {part} | {here} | {stock} |" for part, here, stock in _differences(config)
    )
    code = {
        library: "\n".join(_loading_lines(config, library, file_name))
        for library in ("torchvision", "timm")
    }
    resized = round(size / data_util.CROP_PROPORTION) if config.center_crop_eval else size
    pooling = (
        ""
        if config.cifar_stem
        else f"""
The code is for images of {size} x {size} pixels, and for all heights and widths that leave a remainder of
{"0 or 3" if _pools_even_size(size) else "1 or 2"} when divided by 4. For other sizes, {_other_pooling(size)}.
"""
    )
    return f"""# Encoder {config.network_name} for PyTorch

The encoder of a SimCLR network{steps}: a ResNet-{config.resnet_depth} with {stem} and {width}. The
tensors are named as in torchvision's and timm's ResNets. There is no classifier: the output is the representation h,
[n, {_num_features(config)}].

## torchvision

```python
{code["torchvision"]}
h = model.eval()(images)
```

## timm

```python
{code["timm"]}
h = model.eval()(images)
```
{pooling}
## Input

`images` is float32 [n, 3, height, width], RGB, in [0, 1]. Do not subtract a mean or divide by a standard deviation.

```python
from torchvision import transforms

preprocess = transforms.Compose([
    transforms.Resize({resized}, transforms.InterpolationMode.BICUBIC),
    transforms.CenterCrop({size}),
    transforms.ToTensor()])
```

The evaluation preprocesses images in the same way, with one difference: `Resize` applies antialiasing when it shrinks
an image, which `tf.image.resize` does not do by default. The network was trained on random crops with values in the
same range.

{_heads_section(config, class_names, tensors, file_name)}## Differences from stock ResNets

| part | this network | torchvision and timm |
|---|---|---|
{differences}

The stride is in the 3x3 convolution of bottleneck blocks, convolutions are padded symmetrically, and epsilon in batch
norm is {resnet.BATCH_NORM_EPSILON:g}, as in torchvision and timm. For training, note that batch norm updates its moving
variance with the biased variance of the batch here, and with the unbiased variance in PyTorch.
"""


def _quote(file_name):
    """Returns a file name as a Python string literal."""
    return json.dumps(file_name, ensure_ascii=False)


def _num_features(config):
    bottleneck, blocks = resnet.DEPTHS[config.resnet_depth]
    return 64 * config.width_multiplier * 2 ** (len(blocks) - 1) * (4 if bottleneck else 1)


def _pools_even_size(image_size):
    """Returns whether the input of the max-pooling layer has an even size."""
    return (image_size + 1) // 2 % 2 == 0


def _other_pooling(image_size):
    if _pools_even_size(image_size):
        return "omit the line with `model.maxpool`"
    return "add `model.maxpool = nn.MaxPool2d(3, 2, ceil_mode=True)`"


def _loading_lines(config, library, file_name):
    """Returns the lines of code that build and load the encoder with torchvision or timm."""
    bottleneck, blocks = resnet.DEPTHS[config.resnet_depth]
    block, width = "Bottleneck" if bottleneck else "BasicBlock", 64 * config.width_multiplier
    lines = [
        "from safetensors.torch import load_file",
        "from torch import nn",
        f"from {library}.models.resnet import {block}, ResNet",
        "",
    ]
    arguments, wide = f"{block}, {list(blocks)}", config.width_multiplier > 1
    if library == "timm":
        arguments += ", num_classes=0"
        if wide:
            # With a deep stem, `stem_width` sets the width of the network. `conv1` is replaced
            # below.
            channels = [width * 2**group for group in range(len(blocks))]
            arguments += f', stem_type="deep", stem_width={width // 2}, channels={channels}'
    elif wide:
        lines += [
            "class WideResNet(ResNet):",
            "    def _make_layer(self, block, planes, blocks, **options):",
            f"        self.inplanes = max(self.inplanes, {width})",
            (
                f"        return super()._make_layer(block, {config.width_multiplier} * planes,"
                " blocks, **options)"
            ),
            "",
        ]
    lines.append(
        f"model = {'WideResNet' if wide and library == 'torchvision' else 'ResNet'}({arguments})"
    )
    if config.cifar_stem:
        lines.append(
            f"model.conv1, model.maxpool = nn.Conv2d(3, {width}, 3, 1, 1, bias=False),"
            " nn.Identity()"
        )
    elif wide:
        lines.append(f"model.conv1 = nn.Conv2d(3, {width}, 7, 2, 3, bias=False)")
    if wide and library == "torchvision":
        lines.append(f"model.bn1 = nn.BatchNorm2d({width})")
    if not config.cifar_stem and _pools_even_size(config.image_size):
        lines.append("model.maxpool = nn.MaxPool2d(3, 2, ceil_mode=True)")
    if not bottleneck:
        lines.append(
            "model.layer1[0].downsample = nn.Sequential("
            f"nn.Conv2d({width}, {width}, 1, bias=False), nn.BatchNorm2d({width}))"
        )
    if library == "torchvision":
        lines.append("model.fc = nn.Identity()")
    return [*lines, f"model.load_state_dict(load_file({_quote(file_name)}))"]


def _differences(config):
    """Returns rows (part, this network, stock ResNets) for the table that lists the differences."""
    rows = []
    if config.cifar_stem:
        rows.append(
            (
                "stem",
                "a 3x3 convolution with stride 1, no max pooling",
                "a 7x7 convolution with stride 2, max pooling",
            )
        )
    elif _pools_even_size(config.image_size):
        rows.append(
            (
                "3x3 max pooling with stride 2",
                "pads inputs of even size at the bottom and right only (`SAME`)",
                "pads all four sides",
            )
        )
    if not resnet.DEPTHS[config.resnet_depth][0]:
        rows.append(
            (
                "shortcut of the first block (`layer1.0`)",
                "1x1 convolution and batch norm",
                "identity",
            )
        )
    if config.width_multiplier > 1:
        rows.append(
            (
                "number of channels",
                f"{config.width_multiplier} times as many in all layers",
                (
                    "`width_per_group` and `base_width` widen only the inner convolution of"
                    " bottleneck blocks"
                ),
            )
        )
    return [
        *rows,
        ("input", "RGB in [0, 1]", "normalized by the mean and standard deviation of ImageNet"),
    ]


def _heads_section(config, class_names, tensors, file_name):
    """Returns the section on the projection head and the linear head, or an empty string if there are none."""
    text, stem = "", file_name.removesuffix(torch_names.SUFFIX)
    projection, linear = tensors["projection_head"], tensors["linear_head"]
    if projection:
        count = sum(name.endswith(".linear.weight") for name in projection)
        shapes = [projection[f"layer{index}.linear.weight"].shape[::-1] for index in range(count)]
        layers = "".join(
            f"    layer{index}=layer({inputs}, {outputs})"
            + (f", relu{index}=nn.ReLU(),\n" if index < count - 1 else "))\n")
            for index, (inputs, outputs) in enumerate(shapes)
        )
        text += f"""## Projection head

The output is the projection z, [n, {shapes[-1][1]}]. The batch norm of the last layer has no offset, so its bias is 0.

```python
from collections import OrderedDict

def layer(inputs, outputs):
    return nn.Sequential(OrderedDict(linear=nn.Linear(inputs, outputs, bias=False), bn=nn.BatchNorm1d(outputs)))

head = nn.Sequential(OrderedDict(
{layers}head.load_state_dict(load_file({_quote(f"{stem}.projection_head{torch_names.SUFFIX}")}))
z = head.eval()(h)
```

"""
    if linear:
        outputs, inputs = linear["weight"].shape
        num_layers = config.ft_proj_selector % (config.effective_num_proj_layers + 1)
        # Each hidden layer is followed by ReLU in `head`.
        source = "h" if not num_layers else f"head[:{2 * num_layers}](h)"
        known = ""
        if class_names:
            names = ", ".join(map(model_card.escape_markdown, class_names[:_MAX_CLASSES]))
            more = (
                ", ... (the metadata `class_names` of the file lists all of them)"
                if len(class_names) > _MAX_CLASSES
                else ""
            )
            known = f" The classes are: {names}{more}."
        text += f"""## Linear head

The output is the logits of {outputs} classes.{known or " The names of the classes are not recorded."}

```python
linear_head = nn.Linear({inputs}, {outputs})
linear_head.load_state_dict(load_file({_quote(f"{stem}.linear_head{torch_names.SUFFIX}")}))
logits = linear_head({source})
```

"""
    return text
