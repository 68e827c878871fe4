"""Summary of the contents of a SimCLR checkpoint or SavedModel."""

from __future__ import annotations

import math
import textwrap

from checkpoints import inspection, loading, weight_files
from config import as_flags
from runtime import console

_FLAGS_WIDTH = 80  # characters per line


def describe(path: str) -> str:
    """Returns a text table that describes the weights at `path` (see `weight_files.locate`).

    Raises:
      UserError: the weights cannot be loaded.
    """
    file = weight_files.open_weights(path, "PATH")
    config = inspection.read_config(file, inspection.read_origin(file))
    classes = file.num_classes
    encoder = loading.split_by_part(file.shapes)["encoder"]
    weights = sum(map(math.prod, encoder.values())) / 1e6
    layers = {"nonlinear": f"{config.num_proj_layers} layers"}.get(
        config.proj_head_mode, config.proj_head_mode
    )
    network = inspection.network_flags(file, with_head_input=classes is not None)
    flags = textwrap.wrap(" ".join(as_flags(network)), _FLAGS_WIDTH, break_on_hyphens=False)
    selector = network.get("ft_proj_selector")
    selector = selector and selector % (config.effective_num_proj_layers + 1)
    head_input = {None: "unknown", 0: "the encoder's output"}.get(
        selector, f"the output of layer {selector} of the projection head"
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
        (
            "linear head",
            "none" if classes is None else f"{classes} classes; its input is {head_input}",
        ),
        None,
        *zip(("flags", *[""] * len(flags)), flags),
    ]
    return console.format_table("SimCLR weights", rows)
