"""Model cards in Markdown, rendered from the templates next to this file."""

from __future__ import annotations

import html
import re
from typing import Any

import jinja2
import markupsafe

import data_util
import metrics
from checkpoints import weight_files
from config import Config
from runtime import console


def model_card(saved_model: str) -> str:
    """Returns a Markdown page that describes a SavedModel's inputs, outputs, training settings and results."""
    description = weight_files.read_description(saved_model)
    return _render("model_card.md.jinja", description=description, metrics=metrics)


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
    return _render(
        "torch_card.md.jinja",
        config=config,
        step=step,
        class_names=class_names,
        file_name=markupsafe.Markup(repr(file_name)),
        crop_proportion=data_util.CROP_PROPORTION,
    )


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("export", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escape_markdown,
    )
    return environment.get_template(template).render(
        values, code=_escape_code, join_first=console.join_first
    )


def _escape_code(value: object) -> markupsafe.Markup:
    """Returns a value as a single line with HTML and control characters escaped."""
    return markupsafe.Markup(html.escape(console.printable_name(str(value)), quote=False))


def _escape_markdown(value: Any) -> Any:
    """Returns a value as a single line with HTML, Markdown and control characters escaped."""
    if isinstance(value, markupsafe.Markup):
        return value
    return re.sub(r"([\\`*\[\]|~#!])", r"\\\1", _escape_code(value))
