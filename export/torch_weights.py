"""Exports a network's weights for PyTorch."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
from safetensors import numpy as safetensors_numpy

from checkpoints import loading, torch_names
from export import model_card
from runtime import console, signals, storage
from runtime.paths import check_out, check_weights_path

_CODE = pathlib.Path(__file__).with_name("torch_resnet.py")


def export_torch(checkpoint: str, out: str, given: dict[str, int] | None = None) -> None:
    """Writes the encoder, the heads, a model card and the code that loads them, and logs their paths.

    All files are first written to a temporary directory. The encoder's file is renamed last, so
    that it exists only if the other files are complete.

    Args:
      checkpoint: see `weight_files.locate`.
      out: path FILE.safetensors for the encoder. The heads are written to
        FILE.projection_head.safetensors and FILE.linear_head.safetensors, the model card is written
        to FILE.md, and torch_resnet.py is copied to the same directory. Missing parent directories
        are created.
      given: see `inspection.inspect_checkpoint`.

    Raises:
      UserError: an argument is invalid, or a file exists.
      errors.Stopped: a signal arrived; nothing is written.
    """
    checkpoint = check_weights_path("checkpoint", checkpoint)
    suffix = torch_names.SUFFIX
    stem = check_out(out, [suffix]).removesuffix(suffix)
    code = os.path.join(os.path.dirname(stem), _CODE.name)
    card = f"{stem}.md"
    files = {part: f"{stem}.{part}{suffix}" for part in ("projection_head", "linear_head")}
    files["encoder"] = f"{stem}{suffix}"
    if os.path.exists(code) and pathlib.Path(code).read_bytes() != _CODE.read_bytes():
        storage.check_new("--out", code)
    for path in (card, *files.values()):
        storage.check_new("--out", path)
    model, info = loading.open_network(checkpoint, given)
    config, class_names = info.config, info.file.class_names
    metadata = {
        "format": "pt",
        "resnet_depth": config.resnet_depth,
        "width_multiplier": config.width_multiplier,
        "stem": config.stem_name,
        "sk_ratio": config.sk_ratio,
        "se_ratio": config.se_ratio,
        "image_size": config.image_size,
        "step": info.step,
    }
    head_metadata = {
        "num_projection_layers": config.ft_proj_selector % (config.effective_num_proj_layers + 1),
        "class_names": class_names and json.dumps(class_names),
    }
    variables = loading.variables_by_key(model=model)
    deep_stem = config.sk_ratio > 0 and not config.cifar_stem
    contents = {
        code: _CODE.read_bytes(),
        card: model_card.torch_card(config, info.step, class_names, os.path.basename(out)).encode(),
    }
    for part, names in torch_names.names_by_part(variables, deep_stem).items():
        tensors = {
            name: torch_names.to_torch(variables[key].numpy()) for key, name in names.items()
        }
        if tensors:
            texts = {**metadata, **(head_metadata if part == "linear_head" else {})}
            contents[files[part]] = safetensors_numpy.save(
                _add_missing(tensors),
                {name: str(value) for name, value in storage.without_none(texts).items()},
            )
    signals.safe_point(storage.NOTHING_WRITTEN)
    with storage.replacing(*contents) as temporary_paths:
        for path, content in zip(temporary_paths, contents.values()):
            pathlib.Path(path).write_bytes(content)
    for path in contents:
        console.log(f"wrote {path}")


def _add_missing(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds tensors that PyTorch's batch norm requires and this program's batch norm does not have."""
    for name in list(tensors):
        layer = name.removesuffix(".running_mean")
        if layer != name:
            # PyTorch uses `num_batches_tracked` only for batch norm layers without a momentum.
            tensors[f"{layer}.num_batches_tracked"] = np.array(0, np.int64)
            tensors.setdefault(f"{layer}.bias", np.zeros_like(tensors[name]))
    return tensors
