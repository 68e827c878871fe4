"""Exports SavedModels for TF Hub, with the original's ten outputs, serving signatures, and fine-tuning support."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import data_util
import model as model_lib
from checkpoints import checkpoint_files, descriptions, inspection, restoring
from checkpoints.lock import EXPORT, Lock
from config import Config, settings_with
from runtime import console
from runtime.errors import UserError

# Prefix of temporary directories in which SavedModels are first written.
TEMP_PREFIX = "unfinished_"
# Relative paths of the files in this program's SavedModels. Files that are still being written may
# have a suffix.
_SAVED_MODEL_FILE = re.compile(
    r"(saved_model\.pb|saved_model\.pbtxt|fingerprint\.pb|keras_metadata\.pb)(\.tmp\w*)?"
    r"|variables/(variables\.|variables_temp/).*|assets\.extra/simclr\.json(\.\d+\.simclr_tmp)?"
)
NOTHING_WRITTEN = "nothing was written; run the same command again"


def _forward(model):
    """Returns a function that computes the endpoints of `model` from images and the Python bool `training`."""

    @tf.function(autograph=False)
    def forward(inputs, training):
        endpoints = model(inputs, training=training)
        return {name: endpoints[name] for name in model.endpoint_names}

    return forward


def _variable_tree(model):
    """Returns a tree of trackables that contains the variables under their checkpoint keys.

    Saving the Keras model instead would trace and save every layer's call function.
    """
    root = tf.__internal__.tracking.AutoTrackable()
    for key, variable in restoring.variables_by_key(model=model).items():
        *parents, leaf = key.split("/")[1:]
        node = root
        for name in parents:
            if not hasattr(node, name):
                setattr(node, name, tf.__internal__.tracking.AutoTrackable())
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
    # AutoTrackable is used because tf.Module does not allow setting trainable_variables.
    module = tf.__internal__.tracking.AutoTrackable()
    forward = _forward(model)
    images = tf.TensorSpec([None, None, None, 3], tf.float32, name="inputs")

    @tf.function(autograph=False)
    def call(inputs, training=False, trainable=False):
        return forward(inputs, bool(training or trainable))

    for training in (False, True):
        for trainable in (False, True):
            call.get_concrete_function(images, training=training, trainable=trainable)

    @tf.function(autograph=False, input_signature=[images])
    def serving_default(inputs):
        return forward(inputs, False)

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="inputs")],
    )
    def serving_uint8(inputs):
        size = config.image_size
        cropped = data_util.preprocess_for_eval(
            tf.image.convert_image_dtype(inputs, tf.float32), size, config.center_crop_eval
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
    return module, {"serving_default": serving_default, "serving_uint8": serving_uint8}


def export(
    config: Config,
    class_names: list[str] | None,
    checkpoint_path: str,
    export_dir: str,
    results: dict[str, float] | None = None,
    has_training_config: bool = True,
    step: int | None = None,
    multi_label: bool = False,
    replace: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Exports a checkpoint's model as a SavedModel to `export_dir`.

    The model is rebuilt in float32, so that the SavedModel does not depend on the strategy, frozen
    blocks or precision used in training.

    Args:
      config: settings of the network.
      class_names: names of the linear head's classes, in order, or None if there is no linear head.
      checkpoint_path: see `weight_files.locate`.
      export_dir: a directory that does not exist or is empty.
      results: evaluation results to record in the description.
      has_training_config: whether `config` also contains training settings, which are then
        recorded.
      step: training step to record if the checkpoint does not contain it.
      multi_label: whether examples may have multiple labels; recorded in the description.
      replace: whether to replace an existing SavedModel from this program at `export_dir`.
      check: called before a directory is replaced; may raise `UserError`.
    """
    model = model_lib.build_model(
        config.replace(precision="float32"), class_names and len(class_names)
    )
    file = restoring.load_model(model, checkpoint_path, "--checkpoint")
    for note in file.notes:
        console.log(note)
    module, signatures = build_module(model, config)
    description = dict(
        network=config.network_name,
        image_size=config.image_size,
        weights=file.format,
        step=step if file.step is None else file.step,
        class_names=class_names if config.has_linear_head else None,
        multi_label=multi_label,
        results=results or {},
        eval_center_crop=config.eval_center_crop,
        flags=_training_flags(config) if has_training_config else None,
    )
    with _atomic_directory(export_dir, replace, check) as directory:
        tf.saved_model.save(module, directory, signatures=signatures)
        descriptions.write_description(directory, description)


@contextlib.contextmanager
def _atomic_directory(export_dir, replace, check):
    """Yields a directory for a SavedModel and renames it to `export_dir` if the body of the `with` statement succeeds.

    The yielded directory is temporary, so that readers never see an incomplete SavedModel at
    `export_dir`. A non-empty `export_dir` is replaced only if `replace` is True and it contains
    only a SavedModel from this program. On object storage, which cannot rename directories,
    `export_dir` itself is yielded.
    """
    if "://" in export_dir:
        yield export_dir
        return
    target = os.path.realpath(export_dir)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=os.path.dirname(target)) as scratch:
        directory, replaced = (os.path.join(scratch, name) for name in ("saved_model", "replaced"))
        yield directory
        check()
        if replace and os.path.isdir(target) and _foreign_content(target) is None:
            os.rename(target, replaced)
        try:
            os.rename(directory, target)  # This fails if the target is a non-empty directory.
        except OSError as error:
            if os.path.exists(replaced):
                os.rename(replaced, target)
            raise UserError(
                f"{export_dir}: the SavedModel cannot be moved to this path ({error.strerror}). Fix"
                " the cause, or use another directory."
            ) from error


def _foreign_content(path):
    """Returns the reason to keep `path`, or None if it is a directory with only a SavedModel from this program."""
    remote = "://" in path
    if not remote and (os.path.islink(path) or not os.path.isdir(path)):
        return "it is a link or a file"
    for directory, folders, names in (tf.io.gfile.walk if remote else os.walk)(path):
        subdirectory = directory[len(path) :].strip("/")
        links = [
            name for name in folders if not remote and os.path.islink(os.path.join(directory, name))
        ]
        for name in links + [
            name
            for name in names
            if not _SAVED_MODEL_FILE.fullmatch(f"{subdirectory}/{name}".strip("/"))
        ]:
            printable_name = console.printable_name(os.path.join(subdirectory, name))
            return f"it contains {printable_name}, which is not part of a SavedModel"
    return None


def _training_flags(config):
    """Returns the settings to record: data, mode, training length, and other settings that differ from the defaults."""
    always = ("dataset", "train_split", "train_mode", *settings_with("length"))
    return {**{name: getattr(config, name) for name in always}, **config.identity()}


def export_to_model_dir(
    config: Config,
    class_names: list[str] | None,
    checkpoint_path: str,
    results: dict[str, float] | None = None,
    multi_label: bool = False,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Exports a run's checkpoint to model_dir/saved_model/<step>/ and returns that path.

    Deletes older SavedModels, so that `keep_hub_module_max` SavedModels remain, always including
    the new one. Directories are deleted or replaced only if they contain nothing but a SavedModel
    from this program. If `saved_model` is a link, no directories are deleted or replaced, because
    other runs may export to the link's target. If another process is exporting to the same
    directory, waits for it.

    Args:
      config: settings of the run.
      class_names, results, multi_label: see `export`.
      checkpoint_path: prefix of a checkpoint of the run.
      check: called before a directory is created, replaced or deleted; may raise `UserError`.
    """
    check()
    with Lock(config.model_dir, name=EXPORT, wait=True) as lock:
        return _export_and_prune(
            config,
            class_names,
            checkpoint_path,
            os.path.join(config.model_dir, "saved_model"),
            results,
            multi_label=multi_label,
            check=lambda: (check(), lock.check()),
        )


def export_evaluated(
    config: Config, directory: str, checkpoint_path: str, results: dict[str, float]
) -> str | None:
    """Exports a checkpoint to <directory>/saved_model/<step>/ after its evaluation, and returns the path.

    Unlike `export_to_model_dir`, this function does not delete the SavedModels of later steps,
    which the training process may already have exported. If `keep_hub_module_max` SavedModels of
    later steps exist, exports nothing and returns None.

    Args:
      config: settings of the evaluation. The training settings are read from the run.
      directory: directory of the evaluation's results.
      checkpoint_path: prefix of a checkpoint of the run.
      results: evaluation results to record in the description.
    """
    info = inspection.inspect_checkpoint(checkpoint_path, config.image_size)
    settings = info.config.replace(keep_hub_module_max=config.keep_hub_module_max)
    root = os.path.join(directory, "saved_model")
    with Lock(directory, name=EXPORT, wait=True) as lock:
        step = checkpoint_files.step_from_prefix(checkpoint_path)
        num_later = sum(int(name) > step for name in _step_names(root))
        if config.keep_hub_module_max and num_later >= config.keep_hub_module_max:
            console.log(
                f"step {step} is not exported, because {root} contains SavedModels of later steps "
                f"(--keep_hub_module_max={config.keep_hub_module_max})"
            )
            return None
        console.log("exporting the SavedModel")
        return _export_and_prune(
            settings,
            info.class_names,
            checkpoint_path,
            root,
            results,
            has_training_config=info.has_training_config,
            multi_label=info.multi_label,
            check=lock.check,
        )


def _step_names(root):
    """Returns the names of the numbered directories in `root`, in ascending order of their numbers."""
    names = (
        [name.rstrip("/") for name in tf.io.gfile.listdir(root)] if tf.io.gfile.exists(root) else []
    )
    return sorted((name for name in names if re.fullmatch("[0-9]+", name)), key=int)


def _export_and_prune(config, class_names, checkpoint_path, root, results, check, **arguments):
    """Exports a checkpoint to <root>/<step>/, deletes old SavedModels in `root`, and returns the new path."""
    step = str(checkpoint_files.step_from_prefix(checkpoint_path))
    path = os.path.join(root, step)
    is_link = os.path.islink(root)
    reason = "it may belong to another run" if is_link else _foreign_content(path)
    if "://" not in path and os.path.lexists(path) and reason:
        kept = os.path.join(tempfile.mkdtemp(prefix=f"{step}_kept_", dir=root), step)
        os.rename(path, kept)
        console.log(f"moved {path} to {kept} because {reason}")
    export(
        config, class_names, checkpoint_path, path, results, replace=True, check=check, **arguments
    )
    if is_link:
        console.log(f"{root} is a link, so no old SavedModels are deleted (--keep_hub_module_max)")
        return path
    check()
    others = [name for name in _step_names(root) if name != step]
    old = (
        others[: max(len(others) + 1 - config.keep_hub_module_max, 0)]
        if config.keep_hub_module_max
        else []
    )
    for name in old:
        _remove_saved_model(os.path.join(root, name))
    for name in [name.rstrip("/") for name in tf.io.gfile.listdir(root)]:
        # Clean up temporary directories left by killed processes. The lock excludes other
        # processes.
        if re.fullmatch(rf"{TEMP_PREFIX}\w{{8}}", name):
            for subdirectory in ("saved_model", "replaced"):
                _remove_saved_model(os.path.join(root, name, subdirectory))
            with contextlib.suppress(OSError):  # OSError: the directory is not empty.
                os.rmdir(os.path.join(root, name))
    return path


def _remove_saved_model(directory):
    """Deletes a SavedModel that this program wrote.

    If the directory contains other files, logs a message and deletes nothing.
    """
    if not tf.io.gfile.exists(directory):
        return
    reason = _foreign_content(directory)
    if reason is not None:
        console.log(f"kept {directory} because {reason}")
    elif "://" in directory:
        tf.io.gfile.rmtree(directory)
    else:
        shutil.rmtree(directory)  # Unlike tf.io.gfile.rmtree, shutil.rmtree does not follow links.
