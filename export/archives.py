"""TF Hub archives of SavedModels."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterable

from export import model_card, saving
from runtime.errors import UserError

ARCHIVE_SUFFIX = ".tar.gz"


def archive(saved_model: str, path: str) -> str:
    """Writes a TF Hub archive (.tar.gz) with a model card (.md) next to it, and returns the path of the card.

    Both files are written to a temporary directory and then renamed. Raises `UserError` if either
    file exists.
    """
    card = card_path(path)
    with tempfile.TemporaryDirectory(
        prefix=saving.TEMP_PREFIX, dir=os.path.dirname(path) or "."
    ) as scratch:
        temporary_paths = {
            path: os.path.join(scratch, "archive"),
            card: os.path.join(scratch, "card"),
        }
        with tarfile.open(temporary_paths[path], "w:gz") as tar:
            tar.add(os.path.realpath(saved_model), arcname=".")
        with open(temporary_paths[card], "w", encoding="utf-8") as file:
            file.write(model_card.model_card(saved_model))
        check_absent("archive", temporary_paths)
        for final_path, temporary_path in temporary_paths.items():
            os.rename(temporary_path, final_path)
    return card


def card_path(archive_path: str) -> str:
    """Returns the path of an archive's model card."""
    return f"{archive_path.removesuffix(ARCHIVE_SUFFIX)}.md"


def check_absent(flag: str, paths: Iterable[str]) -> None:
    """Raises `UserError` if any of the paths exists."""
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"--{flag}: {path} already exists. Use another name, or delete it.")
