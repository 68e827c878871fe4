"""Network settings of a checkpoint, read from its tensors and from the run or SavedModel that contains it."""

from __future__ import annotations

import dataclasses
import os

from checkpoints import architecture, computed_from, run_directory, weight_files
from config import Config, select_settings, settings_with
from runtime import console, storage
from runtime.errors import UserError

UNKNOWN_HEAD_INPUT = (
    "the weights do not show the input of the classifier; assumed: the encoder's output"
    " (--ft_proj_selector=0)"
)


def read_config(file: weight_files.WeightFile, origin: dict) -> Config:
    """Returns the settings that the run or the export recorded for the weights in a file.

    Settings of the network that were not recorded, except for the image size, are inferred from
    its variables.

    Args:
      file: the weights.
      origin: result of `read_origin`.

    Raises:
      UserError: the recorded settings are invalid, or this program does not support the encoder.
    """
    recorded = dict(origin.get("flags", {}))
    names = ("image_size", "eval_center_crop", "eval_resize")
    recorded.update({name: origin[name] for name in names if name in origin})
    if origin.get("train_mode") in ("pretrain", "distill") and origin.get("distill_alpha", 1) == 1:
        recorded.update(label_fraction=1.0, label_seed=0)  # The run's evaluation used a subset.
    counted = architecture.infer_flags(file.shapes) or {}
    if not counted and "resnet_depth" not in recorded:
        raise UserError(
            f"{file.path}: unsupported encoder (no ResNet of depth 10 to 200 matches its "
            f"{len(file.shapes)} tensors). Use another checkpoint."
        )
    counted["lineareval_while_pretraining"] = file.num_classes is not None
    try:
        return Config(**{**counted, **recorded})
    except UserError as error:
        raise UserError(
            f"{file.location}: the recorded settings are invalid ({str(error).rstrip('.')})."
            " Restore flags.json, or export the SavedModel again."
        ) from error


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The network in a checkpoint, and the recorded information about its training."""

    config: Config
    class_names: list | None
    results: dict | None
    # whether `config` contains recorded training settings, not only network settings
    has_training_config: bool
    step: int | None
    multi_label: bool
    file: weight_files.WeightFile
    trained_on: str | None = None  # `description_digest` of the training data


def network_flags(file: weight_files.WeightFile, with_head_input: bool = False) -> dict:
    """Returns the settings of the network in a weight file (see `read_config`).

    If the run or SavedModel that contains the file records the image size, the dict also contains
    `image_size`. The same applies to `ft_proj_selector`, the input of the linear head, if
    `with_head_input` is set; it may also be found in the weights.
    """
    origin = read_origin(file)
    config = read_config(file, origin)
    names = {*settings_with("network")} - {"lineareval_while_pretraining"}
    flags = {name: getattr(config, name) for name in config.settings() if name in names}
    flags.update(
        stem=config.stem_name,
        proj_head_mode=config.effective_proj_head_mode,
        image_size=origin.get("image_size"),
        ft_proj_selector=_head_input(file, origin) if with_head_input else None,
    )
    return storage.without_none(flags)


def _head_input(file: weight_files.WeightFile, origin: dict) -> int | None:
    """Returns the recorded `ft_proj_selector`, or the result of `WeightFile.head_input` if it is not recorded."""
    if "ft_proj_selector" in origin:
        return origin["ft_proj_selector"]
    return 0 if "flags" in origin else file.head_input()  # `flags` may omit default values.


def read_origin(file: weight_files.WeightFile) -> dict:
    """Returns what the run, the SavedModel or the PyTorch file that contains the weights records.

    The dict has the keys of simclr.json (see `export.saving`), without those that are not recorded,
    and additionally each setting in `flags`.
    """
    directory, flags = os.path.dirname(file.path), {}
    if file.is_torch:  # The file may be in the run directory of another network.
        origin: dict = dict(image_size=file.image_size)
    elif file.is_saved_model:
        origin = weight_files.read_description(file.location)
        flags = select_settings(origin.get("flags", {}), f"{file.path} (simclr.json)")
    else:
        flags = run_directory.read_flags(directory)
        origin = dict(
            multi_label=weight_files.read_classes(directory)[1],
            results=storage.read_json(os.path.join(directory, f"result_{file.step}.json")),
            trained_on=run_directory.training_data(directory),
        )
    return storage.without_none({**flags, **origin, "flags": flags or None})


def inspect_checkpoint(
    path: str, given: dict[str, int] | None = None, flag: str = "--checkpoint"
) -> CheckpointInfo:
    """Returns the `CheckpointInfo` of a checkpoint or SavedModel.

    If the input of the classifier is unknown, logs what is assumed.

    Args:
      path: see `weight_files.locate`.
      given: values for `image_size` and `ft_proj_selector`. By default, the recorded values are
        used, or 224 and 0 if they are unknown.
      flag: the flag whose value is `path`, for error messages.

    Raises:
      UserError: the weights or the recorded settings are unusable.
    """
    file = weight_files.open_weights(path, flag)
    origin = read_origin(file)
    config = read_config(file, origin)
    given = dict(given or {})
    if "ft_proj_selector" not in given:
        found = _head_input(file, origin)
        given["ft_proj_selector"] = found or 0
        if found is None:
            console.log(f"{file.path}: {UNKNOWN_HEAD_INPUT}")
    config = config.replace(**given)
    names = file.class_names
    if names is None and file.num_classes:
        names = [f"class {index}" for index in range(file.num_classes)]
    results = origin.get("results")
    # The file may describe other weights, such as those of another run at the same step.
    if results and results.get(computed_from.KEY, {}).get("weights") != file.digest():
        results = None
    return CheckpointInfo(
        config,
        names,
        results,
        "flags" in origin,
        origin.get("step") if file.step is None else file.step,
        origin.get("multi_label", False),
        file,
        origin.get("trained_on"),
    )


def read_recorded(config: Config) -> run_directory.Recorded:
    """Reads what the run in `model_dir`, or the checkpoint to evaluate or to fine-tune, recorded.

    `Recorded.network` describes the run if its weights are evaluated or if it is resumed, and
    otherwise the checkpoint. Besides the settings of the network, it contains the recorded data set
    and splits.
    """
    recorded = run_directory.read_run(config.model_dir)
    if config.mode != "eval" and config.train_mode not in ("finetune", "distill"):
        return recorded
    flag = config.weights_flag
    if recorded.settings and config.weights in (None, recorded.settings.get(flag)):
        network, path = recorded.settings, config.model_dir
        trained_on = run_directory.description_digest(recorded.data)
    elif config.weights is None:
        return recorded
    else:
        file, path = weight_files.open_weights(config.weights, f"--{flag}"), config.weights
        origin = read_origin(file)
        trained_on, network = origin.get("trained_on"), network_flags(file, with_head_input=True)
        data = {
            name: origin[name] for name in settings_with("data_of_run", "pixels") if name in origin
        }
        network = {**network, **data}
    if flag == "teacher":  # The student may be another network.
        others = {*settings_with("network")} - {"image_size"}
        network = {name: value for name, value in network.items() if name not in others}
    return dataclasses.replace(recorded, network=network, network_path=path, trained_on=trained_on)
