"""Model cards in Markdown."""

from __future__ import annotations

import html
import re

import metrics
from checkpoints import computed_from, weight_files
from runtime import console

_TRAINED = {
    None: "training not recorded",
    "pretrain": "pretrained",
    "finetune": "fine-tuned from a SimCLR encoder",
    "supervised": "trained on labels",
    "distill": "distilled from another network",
}


def _escape_html(text: object) -> str:
    """Returns the text as a single line with HTML and control characters escaped."""
    return html.escape(console.printable_name(str(text)), quote=False)


def escape_markdown(text: object) -> str:
    """Returns the text as a single line with HTML, Markdown and control characters escaped."""
    return re.sub(r"([\\`*\[\]|~#!])", r"\\\1", _escape_html(text))


def class_list(names: list[str]) -> str:
    """Returns the number of classes and the names of the first ten, in Markdown."""
    return f"{len(names)} ({escape_markdown(console.join_first(names))})"


def front_matter(library: str) -> str:
    """Returns the metadata at the start of a card, in YAML, as the Hugging Face Hub reads it."""
    return f"""---
library_name: {library}
pipeline_tag: image-feature-extraction
tags: [simclr, self-supervised-learning, contrastive-learning]
---
"""


def model_card(saved_model: str) -> str:
    """Returns a Markdown page that describes a SavedModel's inputs, outputs, training settings and results."""
    description = weight_files.read_description(saved_model)
    flags = description.get("flags", {})
    settings = "\n".join(
        f"    --{_escape_html(name)}={_escape_html(value)}" for name, value in sorted(flags.items())
    )
    results = description.get("results", {})
    lines = [
        f"| {escape_markdown(name)} | {value:.4f} |"
        for name, value in sorted(results.items())
        if isinstance(value, float)
    ]
    if lines:
        lines = [_evaluated_images(results), "", "| metric | value |", "|---|---|", *lines]
    table = "\n".join(lines) or "None recorded."
    data = (
        f" Trained on {escape_markdown(flags['dataset'])} ({escape_markdown(flags['train_split'])})."
        if flags
        else ""
    )
    steps = f" Training length: {description['step']:,} steps." if "step" in description else ""
    return f"""{front_matter("tf-keras")}
# {escape_markdown(description.get("network"))}, {_TRAINED[flags.get("train_mode")]}

An image encoder from an implementation of SimCLR: *A Simple Framework for Contrastive Learning of Visual
Representations* (Chen, Kornblith, Norouzi, Hinton, 2020, arXiv:2002.05709).{data}{steps}

## Use

```python
import tensorflow_hub as hub
layer = hub.KerasLayer(HANDLE, trainable=False, output_key="final_avg_pool")  # trainable=True enables fine-tuning
h = layer(images)  # float32 [n, height, width, 3] in [0, 1], no mean subtraction
```

The image size is {description["image_size"]} pixels. Without `output_key`, the layer returns a dict of `initial_conv`,
`initial_max_pool`, `block_group1` to `block_group4` and `final_avg_pool`. If the model has a projection head, the dict
also contains `proj_head_input` and `proj_head_output`; if it has a linear head, `logits_sup`. The signature
`serving_default` returns the same outputs; `serving_uint8` first crops and resizes uint8 images of any size. Class
names of the linear head: {class_list(description["class_names"]) if "class_names" in description else "none recorded"}.

## Training

{f"Settings that are not listed have their default values.{chr(10)}{chr(10)}{settings}" if flags else "Not recorded."}

## Results

{table}
"""


def _evaluated_images(results: dict) -> str:
    """Returns sentences that describe the images and labels with which results were computed, in Markdown."""
    record = results[computed_from.KEY]
    trained = (
        f" **{record['trained_examples']:,} of these images were also used for training.**"
        if record["trained_examples"]
        else ""
    )
    labels = f"{100 * record['label_fraction']:g} % of the labels of {record['train_split']}"
    probes = (
        f" Logistic regression and nearest neighbors use {escape_markdown(labels)}."
        if {metrics.LBFGS, metrics.KNN} & results.keys()
        else ""
    )
    return (
        f"Evaluated on {record['examples']:,} images of {escape_markdown(record['dataset'])}"
        f" ({escape_markdown(record['eval_split'])}).{trained}{probes}"
    )
