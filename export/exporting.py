"""Exports checkpoints as SavedModels and TF Hub archives."""

from __future__ import annotations

import os

import tensorflow as tf

from checkpoints import inspection
from export import archives, saving
from runtime import console, signals
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path, check_writable_parent


def export_checkpoint(
    checkpoint: str, export_dir: str, archive: str | None = None, image_size: int | None = None
) -> None:
    """Exports a checkpoint's network and logs the paths of the written files.

    Args:
      checkpoint: see `weight_files.locate`.
      export_dir: new or empty directory for the SavedModel. Missing parent directories are created.
      archive: path FILE.tar.gz for a TF Hub archive with a model card FILE.md, or None for no
        archive. Missing parent directories are created.
      image_size: image size in pixels. If None, the run's image size is used, or 224 if it is
        unknown.

    Raises:
      UserError: an argument is invalid.
    """
    checkpoint, export_dir = (
        check_weights_path("checkpoint", checkpoint),
        check_path("export_dir", export_dir),
    )
    archive = None if archive is None else check_path("archive", archive)
    _check_export_paths(export_dir, archive)
    info = inspection.inspect_checkpoint(checkpoint, image_size)
    signals.safe_point(saving.NOTHING_WRITTEN)
    for path in filter(None, (export_dir, archive)):
        tf.io.gfile.makedirs(os.path.dirname(path if "://" in path else os.path.realpath(path)))
    saving.export(
        info.config,
        info.class_names,
        checkpoint,
        export_dir,
        info.results,
        info.has_training_config,
        info.step,
        info.multi_label,
    )
    console.log(f"SavedModel: {export_dir}")
    if archive:
        console.log(f"archive: {archive}, model card: {archives.archive(export_dir, archive)}")


def _check_export_paths(export_dir, archive_path):
    """Raises `UserError` if the SavedModel, the archive or its model card cannot be written."""
    if "://" not in export_dir:
        target = os.path.realpath(export_dir)
        check_writable_parent("--export_dir", target, create_parents=True)
        if target == os.getcwd() or os.path.ismount(target):
            raise UserError(
                f"--export_dir={export_dir}: the path is the working directory or a mount point,"
                " which cannot be replaced. Use a new directory inside it."
            )
        if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
            raise UserError(
                f"--export_dir={export_dir}: the path exists and is not an empty directory. Use"
                " another path, or delete this one."
            )
    elif tf.io.gfile.exists(export_dir) and (
        not tf.io.gfile.isdir(export_dir) or tf.io.gfile.listdir(export_dir)
    ):
        raise UserError(
            f"--export_dir={export_dir}: the path exists and is not an empty directory. Use another"
            " path, or delete this one."
        )
    if archive_path is None:
        return
    if "://" in archive_path + export_dir:
        raise UserError(
            f"--archive={archive_path}: archives can only be made from local files. Use local paths"
            " for --archive and --export_dir."
        )
    suffix = archives.ARCHIVE_SUFFIX
    if not os.path.basename(archive_path).removesuffix(suffix) or not archive_path.endswith(suffix):
        raise UserError(f"--archive={archive_path}: not a valid archive name. Use FILE{suffix}.")
    check_writable_parent("--archive", archive_path, create_parents=True)
    archives.check_absent("archive", (archive_path, archives.card_path(archive_path)))
    for path in (archive_path, archives.card_path(archive_path)):
        if f"{os.path.realpath(path)}/".startswith(f"{target}/"):
            raise UserError(
                f"--archive={archive_path}: {path} would be inside --export_dir. Use another"
                " directory."
            )
