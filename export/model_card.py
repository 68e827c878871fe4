"""Model cards in Markdown."""

from __future__ import annotations

import html
import re

from checkpoints import descriptions
from runtime import console

_TRAINED = {"pretrain": "pretrained", "finetune": "fine-tuned from a SimCLR encoder", "supervised": "trained on labels"}


def _escape_html(text):
    """Returns a text in one line, without HTML and control characters."""
    return html.escape(console.printable_name(str(text)), quote=False)


def _escape_markdown(text):
    """Returns a text that Markdown shows as it is."""
    return re.sub(r"([\\`*\[\]|~#!])", r"\\\1", _escape_html(text))


def model_card(saved_model: str) -> str:
    """Returns a Markdown page about a SavedModel of this program: inputs, outputs, training and results."""
    known = descriptions.read_description(saved_model)
    flags = known.get("flags") or {}
    listed = "\n".join(f"    --{_escape_html(name)}={_escape_html(value)}" for name, value in sorted(flags.items()))
    results = "\n".join(f"| {_escape_markdown(name)} | {value:.4f} |"
                        for name, value in sorted((known.get("results") or {}).items()) if isinstance(value, float))
    classes = known.get("class_names")
    head = "There is no linear head."
    if classes:
        listed_classes = ", ".join([*map(_escape_markdown, classes[:10]), *(["..."] if len(classes) > 10 else [])])
        head = f"`logits_sup` are the logits of {len(classes)} classes: {listed_classes}."
    data = " Trained on {dataset} ({train_split}).".format(
        **{name: _escape_markdown(value) for name, value in flags.items()}) if flags else ""
    steps = f" {known['step']:,} steps." if known.get("step") is not None else ""
    return f"""# {_escape_markdown(known.get('network'))}, {_TRAINED[flags.get("train_mode", "pretrain")]}

An image encoder, of *A Simple Framework for Contrastive Learning of Visual Representations* (Chen, Kornblith, Norouzi,
Hinton, 2020, arXiv:2002.05709).{data}{steps}

## Use

```python
import tensorflow_hub as hub
layer = hub.KerasLayer(HANDLE, trainable=False, output_key="final_avg_pool")  # trainable=True: to fine-tune
h = layer(images)  # float32 [n, height, width, 3] in [0, 1], no mean subtraction
```

Made for {known['image_size']} pixels. Without output key the layer gives a dict of `initial_conv`,
`initial_max_pool`, `block_group1` to `block_group4`, `final_avg_pool` and, if there are such heads,
`proj_head_input`, `proj_head_output`, `logits_sup`. The signature `serving_default` gives the
same, and `serving_uint8` crops and resizes uint8 images of any size first. {head}

## Training

{f"Settings that are not listed have their defaults.{chr(10)}{chr(10)}{listed}" if flags else "Not recorded."}

## Results

{f"| what | value |{chr(10)}|---|---|{chr(10)}{results}" if results else "None recorded."}
"""
