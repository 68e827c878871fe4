"""Exports a network's weights for PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from checkpoints import restoring, torch_names
from export import archives, saving, torch_card
from runtime import console, progress, signals
from runtime.errors import UserError, first_line
from runtime.paths import check_path, check_weights_path, check_writable_parent


def export_torch(checkpoint: str, out: str, image_size: int | None = None) -> None:
    """Writes the encoder, the heads and a model card, and logs their paths.

    All files are first written to a temporary directory. The encoder's file is renamed last, so
    that it exists only if the other files are complete.

    Args:
      checkpoint: see `weight_files.locate`.
      out: path FILE.safetensors for the encoder. The heads are written to
        FILE.projection_head.safetensors and FILE.linear_head.safetensors, and the model card is
        written to FILE.md. Missing parent directories are created.
      image_size: image size in pixels, which is recorded in the files. If None, the run's image
        size is used, or 224 if it is unknown.

    Raises:
      UserError: an argument is invalid, a file exists, or the network has no equivalent in
        torchvision.
      errors.Stopped: a signal arrived; nothing is written.
    """
    checkpoint, out = check_weights_path("checkpoint", checkpoint), check_path("out", out)
    paths = _check_out(out)
    model, info, file = restoring.open_network(checkpoint, image_size)
    config = info.config
    if config.sk_ratio > 0 or config.se_ratio > 0:
        raise UserError(
            f"--checkpoint={checkpoint}: {config.network_name} has selective kernels or"
            " squeeze-and-excitation, unlike torchvision's ResNets. Export a SavedModel with"
            " --export_dir instead."
        )
    signals.safe_point(saving.NOTHING_WRITTEN)
    console.log(f"converting the weights of {config.network_name}")
    for note in file.notes:
        console.log(note)
    variables = restoring.variables_by_key(model=model)
    encoder = restoring.filter_by_prefix(restoring.PARTS["encoder"], variables)
    names = {
        "encoder": {key: torch_names.torch_name(key) for key in encoder},
        **torch_names.head_names(variables),
    }
    tensors = {part: {} for part in names}
    with progress.terminal_bar(None, len(variables), "tensors") as bar:
        for part, names_of_part in names.items():
            for key, name in names_of_part.items():
                signals.safe_point(saving.NOTHING_WRITTEN)
                tensors[part][name] = torch_names.to_torch(variables[key].numpy())
                bar.update()
            _add_missing_tensors(tensors[part])
    step = info.step if file.step is None else file.step
    metadata = {
        "format": "pt",
        "resnet_depth": config.resnet_depth,
        "width_multiplier": config.width_multiplier,
        "stem": config.stem_name,
        "image_size": config.image_size,
        **({} if step is None else {"step": step}),
    }
    written = _write(
        tensors,
        {part: path for part, path in paths.items() if tensors.get(part) or part == "model_card"},
        {name: str(value) for name, value in metadata.items()},
        file.class_names,
        torch_card.torch_card(config, step, file.class_names, tensors, os.path.basename(out)),
    )
    for part, path in reversed(written.items()):
        console.log(f"{part.replace('_', ' ')}: {path}")


def _check_out(out):
    """Returns a dict with the paths of all files to write. Raises `UserError` if any of them cannot be written."""
    suffix = torch_names.SUFFIX
    stem = out.removesuffix(suffix)
    if "://" in out:
        raise UserError(f"--out={out}: the file must be on a local disk. Use a local path.")
    if not os.path.basename(stem) or not out.endswith(suffix):
        raise UserError(f"--out={out}: not a valid file name. Use FILE{suffix}.")
    # The encoder comes last; see `export_torch`.
    paths = {
        "projection_head": f"{stem}.projection_head{suffix}",
        "linear_head": f"{stem}.linear_head{suffix}",
        "model_card": f"{stem}.md",
        "encoder": out,
    }
    for path in paths.values():
        check_writable_parent("--out", path, create_parents=True)
    archives.check_absent("out", paths.values())
    return paths


def _add_missing_tensors(tensors):
    """Adds tensors that PyTorch's batch norm layers require and this program's batch norm layers do not have."""
    for name in list(tensors):
        layer = name.removesuffix(".running_mean")
        if layer != name:
            # PyTorch uses `num_batches_tracked` only for batch norm layers without a momentum.
            tensors[f"{layer}.num_batches_tracked"] = np.array(0, np.int64)
            tensors.setdefault(f"{layer}.bias", np.zeros_like(tensors[name]))


def _write(tensors, paths, metadata, class_names, card):
    """Writes all files to a temporary directory, renames them in the order of `paths`, and returns `paths`."""
    directory = os.path.dirname(paths["encoder"]) or "."
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=saving.TEMP_PREFIX, dir=directory) as scratch:
        with open(os.path.join(scratch, "model_card"), "w", encoding="utf-8") as file:
            file.write(card)
        for part in paths.keys() & tensors.keys():
            signals.safe_point(saving.NOTHING_WRITTEN)
            temporary = os.path.join(scratch, part)
            classes = (
                {"class_names": json.dumps(class_names)}
                if part == "linear_head" and class_names
                else {}
            )
            try:
                safetensors_numpy.save_file(tensors[part], temporary, {**metadata, **classes})
            except safetensors.SafetensorError as error:  # A full disk also causes this error.
                raise UserError(
                    f"--out={paths[part]}: the file cannot be written ({first_line(error)}). Free"
                    " some space, or choose another directory."
                ) from error
            # The library creates files that only their owner can read.
            shutil.copymode(os.path.join(scratch, "model_card"), temporary)
        archives.check_absent("out", paths.values())
        for part, path in paths.items():
            os.rename(os.path.join(scratch, part), path)
    return paths
