"""Summary of the contents of a SimCLR checkpoint or SavedModel."""

from __future__ import annotations

import textwrap

import model as model_lib
from checkpoints import inspection, restoring, weight_files
from runtime import console

_FLAGS_WIDTH = 80  # characters per line


def describe(path: str) -> str:
    """Returns a text table that describes the weights at `path` (see `weight_files.locate`).

    Raises:
      UserError: the weights cannot be loaded.
    """
    file = weight_files.open_weights(path, "PATH")
    config, classes = inspection.infer_config(file)
    variables = restoring.variables_by_key(model=model_lib.build_model(config, classes))
    differences = restoring.find_mismatches(restoring.shapes_of(variables), file.shapes)
    encoder = restoring.filter_by_prefix(restoring.PARTS["encoder"], variables)
    weights = sum(variable.shape.num_elements() for variable in encoder.values()) / 1e6
    layers = {"nonlinear": f"{config.num_proj_layers} layers"}.get(
        config.proj_head_mode, config.proj_head_mode
    )
    flags = textwrap.wrap(
        restoring.format_flags(inspection.network_flags(file)), _FLAGS_WIDTH, break_on_hyphens=False
    )
    rows = [
        ("file", file.path),
        ("format", file.format),
        ("step", "unknown" if file.step is None else file.step),
        None,
        ("encoder", f"{config.network_name}, {weights:.1f} million weights"),
        (
            "projection head",
            layers if layers == "none" else f"{layers}, output size {config.proj_out_dim}",
        ),
        ("linear head", "none" if classes is None else f"{classes} classes"),
        ("other tensors", f"{file.num_other_tensors} (optimizer, counters; needed only to resume)"),
        None,
        *zip(("flags", *[""] * len(flags)), flags),
        (
            "flags match",
            (
                "all tensors"
                if not differences
                else f"all but {len(differences)} tensors: {differences[0]}"
            ),
        ),
    ]
    return console.format_table("SimCLR weights", rows)
