"""Exports checkpoints as SavedModels and TF Hub archives."""

from __future__ import annotations

import gzip
import os
import pathlib
import tarfile

from export import model_card, saving
from runtime import console, signals, storage
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path

_SUFFIX = ".tar.gz"


def export_checkpoint(
    checkpoint: str, export_dir: str, archive: str | None, given: dict[str, int] | None
) -> None:
    """Exports a checkpoint's network and logs the paths of the written files.

    Args:
      checkpoint: see `weight_files.locate`.
      export_dir: new or empty directory for the SavedModel. Missing parent directories are created.
      archive: path FILE.tar.gz for a TF Hub archive with a model card FILE.md, or None for no
        archive. Missing parent directories are created.
      given: see `inspection.inspect_checkpoint`.

    Raises:
      UserError: an argument is invalid.
    """
    checkpoint = check_weights_path("checkpoint", checkpoint)
    export_dir = check_path("export_dir", export_dir)
    storage.check_new("--export_dir", export_dir)
    if archive:
        archive = check_path("archive", archive)
        stem = archive.removesuffix(_SUFFIX)
        if "://" in archive + export_dir or stem == archive or not os.path.basename(stem):
            raise UserError(
                f"--archive={archive}: not a valid archive name. Use local paths, and FILE{_SUFFIX}."
            )
        for path in (archive, f"{stem}.md"):
            storage.check_new("--archive", path)
            if pathlib.Path(path).resolve().is_relative_to(pathlib.Path(export_dir).resolve()):
                raise UserError(
                    f"--archive={archive}: {path} would be inside --export_dir. Use another directory."
                )
    signals.safe_point(storage.NOTHING_WRITTEN)
    saving.export(checkpoint, export_dir, given)
    console.log(f"SavedModel: {export_dir}")
    if archive:
        console.log(f"archive: {archive}, model card: {write_archive(export_dir, archive)}")


def write_archive(saved_model: str, path: str) -> str:
    """Writes a TF Hub archive (.tar.gz) with a model card (.md) next to it, and returns the path of the card."""
    card_path = f"{path.removesuffix(_SUFFIX)}.md"
    with storage.replacing(path, card_path) as (temporary_path, temporary_card):
        with (
            open(temporary_path, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as tar,
        ):
            tar.add(os.path.realpath(saved_model), arcname=".", filter=_anonymous)
        pathlib.Path(temporary_card).write_text(model_card.model_card(saved_model), "utf-8")
    return card_path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes the owner and the time from an archive member, so that equal files lead to equal archives."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = "root"
    return member
