"""Exports SavedModels for TF Hub, with the original's ten outputs, serving signatures, and fine-tuning support."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import data_util
import model as model_lib
from checkpoints import checkpoint_files, loading, weight_files
from checkpoints.lock import EXPORT, Lock
from config import Config, settings_with
from runtime import console, storage
from runtime.errors import UserError
from runtime.paths import without_directories

# The files of a SavedModel. Without the first, a directory does not count as a SavedModel.
FILES = (
    "saved_model.pb",
    "fingerprint.pb",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
    weight_files.DESCRIPTION_FILE,
)
# tf.Module does not allow setting trainable_variables.
_Trackable = tf.__internal__.tracking.AutoTrackable


def _variable_tree(model: model_lib.Model) -> tf.__internal__.tracking.AutoTrackable:
    """Returns a tree of trackables that contains the variables under their checkpoint keys.

    Saving the Keras model instead would trace and save every layer's call function.
    """
    root = _Trackable()
    for key, variable in loading.variables_by_key(model=model).items():
        *parents, leaf = key.split("/")[1:]
        node = root
        for name in parents:
            if not hasattr(node, name):
                setattr(node, name, _Trackable())
            node = getattr(node, name)
        setattr(node, leaf, variable)
    return root


def build_module(model: model_lib.Model, config: Config) -> tuple[Any, dict[str, Callable]]:
    """Builds the object to save, which follows TF Hub's Reusable SavedModel interface.

    Args:
      model: a built `model_lib.Model`, created outside any strategy scope.
      config: the model's settings.

    Returns:
      A tuple of the module and a dict mapping the names of signatures to functions. The module is
      called as `module(images, trainable=False)`, as in the original, or as `module(images,
      training=False)`. Images are float32 [n, h, w, 3] in [0, 1], without mean subtraction. If
      `trainable` or `training` is True, batch norm uses batch statistics and updates the moving
      averages.
    """
    module = _Trackable()
    images = tf.TensorSpec([None, None, None, 3], name="inputs")

    @tf.function(autograph=False)
    def forward(inputs, training):
        endpoints = model(inputs, training=training)
        return {name: endpoints[name] for name in model.endpoint_names}

    @tf.function(autograph=False)
    def call(inputs, training=False, trainable=False):
        return forward(inputs, bool(training or trainable))

    for training in (False, True):
        for trainable in (False, True):
            call.get_concrete_function(images, training=training, trainable=trainable)

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="inputs")],
    )
    def serving_uint8(inputs):
        cropped = data_util.preprocess_for_eval(
            tf.image.convert_image_dtype(inputs, tf.float32),
            config.image_size,
            config.center_crop_eval,
            config.eval_resize,
        )
        return forward(cropped, False)

    @tf.function(autograph=False, input_signature=[])
    def regularization_loss():
        return model_lib.add_weight_decay(model, config.weight_decay, "momentum")

    module.__call__ = call
    module.model = _variable_tree(model)
    module.variables = model.variables
    module.trainable_variables = model.trainable_variables
    module.trainable_variables_list = model.trainable_variables  # the original's name
    module.regularization_losses = [regularization_loss] if config.weight_decay else []
    serving_default = forward.get_concrete_function(images, False)
    return module, {"serving_default": serving_default, "serving_uint8": serving_uint8}


def export(
    checkpoint_path: str,
    export_dir: str,
    given: dict[str, int] | None = None,
    results: dict[str, float] | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Exports a checkpoint's network as a SavedModel to `export_dir`, unless it already contains the same one.

    On a local disk, the SavedModel is written to a temporary directory. If `export_dir` does not
    exist, that directory is renamed, so that readers never see an incomplete SavedModel. Otherwise,
    its files replace those in `export_dir`, saved_model.pb last, and all other files there stay.

    Args:
      checkpoint_path: see `weight_files.locate`.
      export_dir: path of the SavedModel.
      given: see `inspection.inspect_checkpoint`.
      results: evaluation results to record in the description. If None, the recorded results are
        used.
      check: called before `export_dir` is changed; may raise `UserError`.
    """
    model, info = loading.open_network(checkpoint_path, given)
    config = info.config
    description = dict(
        {
            name: getattr(config, name)
            for name in ("image_size", "ft_proj_selector", "eval_center_crop", "eval_resize")
        },
        network=config.network_name,
        weights=info.file.format,
        step=info.step,
        class_names=info.file.class_names,
        multi_label=info.multi_label,
        results=results or info.results or {},
        flags=_training_flags(config) if info.has_training_config else None,
        trained_on=info.trained_on,
        digest=info.file.digest(),
    )
    recorded = storage.read_json(os.path.join(export_dir, weight_files.DESCRIPTION_FILE))
    # The description contains the digest of the weights.
    if recorded == description and tf.saved_model.contains_saved_model(export_dir):
        return
    console.log("exporting the SavedModel")
    module, signatures = build_module(model, config)
    is_remote = "://" in export_dir
    with contextlib.nullcontext() if is_remote else storage.scratch_beside(export_dir) as scratch:
        # Object storage cannot rename directories.
        directory = export_dir if is_remote else os.path.join(scratch, "saved_model")
        for name in ("variables", "assets"):  # TensorFlow would not allow the group to write.
            storage.makedirs(os.path.join(directory, name))
        tf.saved_model.save(module, directory, signatures=signatures)
        # TensorFlow does not read the directory assets.extra.
        storage.write_json(os.path.join(directory, weight_files.DESCRIPTION_FILE), description)
        check()
        if is_remote:
            return
        if not os.path.lexists(export_dir):
            storage.rename({directory: export_dir})
            return
        remove(export_dir)
        for name in reversed(FILES):
            path = os.path.join(export_dir, name)
            if _has_link(export_dir, path):
                raise UserError(f"{path}: links are not replaced. Remove the link.")
            storage.makedirs(os.path.dirname(path))
            storage.rename({os.path.join(directory, name): path})


def _has_link(saved_model: str, path: str) -> bool:
    """Returns whether a SavedModel, the file at `path` in it or the file's directory is a link."""
    return any(map(os.path.islink, (saved_model, os.path.dirname(path), path)))


def remove(saved_model: str) -> None:
    """Deletes the files of a SavedModel by their names. If other files or links remain, logs a message."""
    for name in FILES:
        path = os.path.join(saved_model, name)
        if tf.io.gfile.exists(path) and not _has_link(saved_model, path):
            tf.io.gfile.remove(path)
    for folder in ("variables", "assets", "assets.extra"):
        with contextlib.suppress(OSError):  # OSError: the directory is not empty or not local.
            os.rmdir(os.path.join(saved_model, folder))
    if tf.io.gfile.isdir(saved_model) and (others := tf.io.gfile.listdir(saved_model)):
        others = ", ".join(sorted(others))
        console.log(f"{saved_model} contains other files, which are kept: {others}")


def _training_flags(config: Config) -> dict[str, Any]:
    """Returns the settings to record: data, mode, training length, and other settings that differ from the defaults."""
    always = ("dataset", "train_split", "train_mode", "resnet_depth", *settings_with("length"))
    flags = {**{name: getattr(config, name) for name in always}, **config.identity()}
    # A SavedModel may be published.
    flags["dataset"] = without_directories(flags["dataset"])
    for name in {"checkpoint", "teacher"} & flags.keys():
        if "://" not in flags[name]:
            flags[name] = os.path.basename(flags[name].rstrip("/"))
    return flags


def export_to_model_dir(
    config: Config,
    directory: str,
    checkpoint_path: str,
    results: dict[str, float] | None = None,
    check: Callable[[], object] = lambda: None,
) -> str | None:
    """Exports a run's checkpoint to <directory>/saved_model/<step>/ and returns that path.

    Deletes the SavedModels of the earliest steps, so that `keep_hub_module_max` SavedModels remain,
    including the new one. An evaluation does not delete the SavedModels of later steps, which the
    training process may already have exported: if there are `keep_hub_module_max` of them, it
    exports nothing and returns None. If another process is exporting to the same directory, waits
    for it.

    Args:
      config: settings of the run or evaluation.
      directory: `model_dir`, or the directory of an evaluation's results.
      checkpoint_path: prefix of a checkpoint of the run.
      results: evaluation results to record in the description.
      check: called before a directory is created, replaced or deleted; may raise `UserError`.
    """
    check()
    root, keep = os.path.join(directory, "saved_model"), config.keep_hub_module_max
    step = checkpoint_files.step_from_prefix(checkpoint_path)
    with Lock(directory, name=EXPORT, wait=True) as lock:
        storage.makedirs(root)
        names = tf.io.gfile.listdir(root)
        steps = {int(name.rstrip("/")) for name in names if re.fullmatch("[0-9]+/?", name)}
        others = sorted(steps - {step})
        if config.mode == "eval" and 0 < keep <= sum(other > step for other in others):
            console.log(
                f"step {step} is not exported, because {root} contains SavedModels of later steps "
                f"(--keep_hub_module_max={keep})"
            )
            return None
        path = os.path.join(root, str(step))

        def check_locks():
            check()
            lock.check()

        given = {name: getattr(config, name) for name in ("image_size", "ft_proj_selector")}
        export(checkpoint_path, path, given, results, check_locks)
        # Other runs may use the target of a link.
        if keep and not os.path.islink(root):
            for other in others[: max(len(others) + 1 - keep, 0)]:
                old = os.path.join(root, str(other))
                remove(old)
                with contextlib.suppress(OSError):
                    os.rmdir(old)
        storage.remove_scratch(root)
    return path
