"""Archives of SavedModels, as TF Hub takes them."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterable

from export import model_card, saving
from runtime.errors import UserError

# ------------------------------------------------------------------------------------------------------- TF Hub


ARCHIVE_SUFFIX = ".tar.gz"


def archive(saved_model: str, path: str) -> str:
    """Writes `path` (.tar.gz), as TF Hub takes it, and the model card next to it (.md); returns the card's path.

    Both are written to a fresh directory next to them, and renamed. Raises `UserError` if one of them exists.
    """
    card = card_path(path)
    with tempfile.TemporaryDirectory(prefix=saving.TEMP_PREFIX, dir=os.path.dirname(path) or ".") as scratch:
        parts = {path: os.path.join(scratch, "archive"), card: os.path.join(scratch, "card")}
        with tarfile.open(parts[path], "w:gz") as tar:
            tar.add(os.path.realpath(saved_model), arcname=".")
        with open(parts[card], "w", encoding="utf-8") as file:
            file.write(model_card.model_card(saved_model))
        check_absent("archive", parts)
        for final, part in parts.items():
            os.rename(part, final)
    return card


def card_path(archive_path: str) -> str:
    """Returns the path of an archive's model card."""
    return f"{archive_path.removesuffix(ARCHIVE_SUFFIX)}.md"


def check_absent(flag: str, paths: Iterable[str]) -> None:
    """Raises `UserError` if one of the paths exists."""
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"--{flag}: {path} exists already. Use another name, or remove it.")
