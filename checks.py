"""Completes the settings of a run, and checks them against data, devices, files and workers.

`adopt` and `complete` are pure functions: they return the new settings and lines to log. The other
functions raise `UserError`, before anything is written.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import evaluate
import model as model_lib
import simclr
from checkpoints import computed_from, inspection, run_directory, weight_files
from checkpoints.run_context import RunContext
from checkpoints.run_directory import Recorded
from config import MIN_SEEN_IMAGES, Config, as_flag, as_flags, settings_with
from large_batch import memory
from runtime import console, devices, workers
from runtime.errors import UserError
from sources import classes, datasets, image_checks
from sources.files import FileSource
from sources.source import Source

# Below this number of images, the linear head requires its own learning rate.
_SMALL_DATA_SET = 20_000
_LINEAR_HEAD_LEARNING_RATE = 0.03  # Suitable for most small data sets; see docs/training.md.
_SMALL_FOLDER = 1_000  # Below this number of images, the length of training is checked.
_FEW_IMAGES = 10  # Below this number of images, a class can hardly be learned.
_SMALL_BATCH = 32  # Below this batch size, contrastive learning has too few negatives.
_MAX_GRAY_CHROMA = 4  # Compression as JPEG may change gray images by a few levels.
_MAX_MEMORY = 1.25  # The estimated memory may exceed that of the machine by this factor.
_SAMPLED_IMAGES = 32  # This is the number of images whose sizes are read.


def before_connecting(config: Config) -> None:
    """Rejects settings that training with several workers does not support, before this worker waits for the others.

    Raises:
      UserError: TF_CONFIG lists several workers, but a setting supports only one.
    """
    if workers.count_workers() == 1:
        return
    if config.use_tpu:
        raise UserError(
            "--use_tpu: one process controls a TPU of any size, but TF_CONFIG lists multiple"
            " workers. Unset TF_CONFIG."
        )
    if not config.trains:
        raise UserError(
            "--mode=eval: this mode runs in one process only. Start one process, without TF_CONFIG"
            " and --cluster, or use --mode=train_then_eval, which evaluates on all workers."
        )
    if config.seed is None:
        raise UserError(
            "--seed: the seed is not set, but all workers need the same seed. Pass, for example,"
            " --seed=1 on all workers."
        )


def adopt(config: Config, given: Collection[str], recorded: Recorded) -> tuple[Config, list[str]]:
    """Adopts settings of the weights to evaluate or to fine-tune, of the teacher, and of the run to evaluate.

    These are the network, the image size, the decoding of images and, in an evaluation, the input of
    the linear head, the training mode, the augmentation, the loss, the batch size, the settings of
    the weight decay, the last step of the run and, without `--dataset`, the data set and its splits.
    Settings that the user set do not change.

    Args:
      config: settings.
      given: names of the settings that the user set.
      recorded: what the run or the checkpoint recorded.

    Returns:
      The new settings, and lines to log.

    Raises:
      UserError: the network is incompatible with other settings.
    """
    network, is_eval = dict(recorded.network), not config.trains
    if network.get("stem") == "auto" and "image_size" in network:
        network["stem"] = Config(image_size=network["image_size"]).stem_name
    # A linear head is not adopted, because it requires labels in the data set. Fine-tuning trains a
    # new classifier, which may have a different input.
    names = {*settings_with("network", "pixels")} - {"lineareval_while_pretraining"}
    if is_eval:
        names.update(settings_with("of_run"))
    if is_eval and "dataset" not in given:
        names.update(settings_with("data_of_run"))
    for name in ("resnet_depth", "width_multiplier"):
        value = getattr(config, name)
        flag = as_flag(name, value)
        if name in given and network.get(name, value) != value:
            raise UserError(
                f"{flag}: the network in {recorded.network_path} has"
                f" {as_flag(name, network[name])}. Remove {flag}, or use another checkpoint."
            )
    changes = {
        name: network[name]
        for name in config.settings()
        if name in names - set(given) and name in network and network[name] != getattr(config, name)
    }
    image_size = changes.get("image_size", config.image_size)
    if changes.get("stem") == config.replace(image_size=image_size).stem_name:
        del changes["stem"]  # --stem=auto selects the stem of the checkpoint.
    lines = (
        [f"settings of {recorded.network_path}: {' '.join(as_flags(changes))}"] if changes else []
    )
    if (
        is_eval
        and network
        and config.has_linear_head
        and "linear_head" in config.eval_protocols
        and network.get("proj_head_mode") != "none"
        and "ft_proj_selector" not in {*network, *given}
    ):
        lines.append(inspection.UNKNOWN_HEAD_INPUT)
    if (
        is_eval
        and recorded.last_step
        and all(
            name not in given or getattr(config, name) in (0, recorded.settings.get(name))
            for name in (*settings_with("length"), "train_batch_size")
        )
    ):
        changes["train_steps"] = recorded.last_step
    return config.replace(**changes), lines


class Inputs(NamedTuple):
    """Inputs of `complete`, in addition to the settings.

    Attributes:
      source: the data set.
      given: names of the settings that the user set.
      recorded: what the run or the checkpoint recorded. A resumed run keeps its choices.
      new_seed: seed of a new training run.
      replicas: number of replicas, by which the batch size is divisible.
    """

    source: Source
    given: Collection[str]
    recorded: Recorded
    new_seed: int
    replicas: int = 1


def complete(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Completes splits, batch size, training length, linear head and seed. Returns the settings, and lines to log.

    Raises `UserError` if the seed of a run with checkpoints is unknown.
    """
    lines: list[str] = []
    for stage in stages(config).complete:
        config, new_lines = stage(config, inputs)
        lines += new_lines
    return config, lines


def _training_splits(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    config, lines = _choose_splits(config, inputs)
    before = inputs.recorded.settings.get("train_split", config.train_split)
    return config if "train_split" in inputs.given else config.replace(train_split=before), lines


def _evaluation_splits(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    source, given, recorded, lines = inputs.source, {*inputs.given}, inputs.recorded, []
    # A run without evaluation may have recorded the default of `eval_split`, which may not exist.
    exists = config.eval_split != Config.eval_split or config.eval_split in source.split_names
    if "dataset" not in given:
        if "eval_split" in recorded.network and exists:
            given |= {"train_split", "eval_split"}
    elif source.split_names == ["train"] and "eval_split" not in given:
        # The images of another data set need not be divided if nothing is trained on them.
        is_own = recorded.trained_on == computed_from.source_digest(source)
        if not (is_own or uses_train_split(config)):
            given, config = given | {"eval_split"}, config.replace(eval_split="train")
            lines.append(f"eval_split: train (all images of {source.name})")
    config, more_lines = _choose_splits(config, inputs._replace(given=given))
    return config, lines + more_lines


def _choose_splits(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Replaces splits that do not exist; see `datasets.choose_splits`."""
    source, given, settings, lines = inputs.source, inputs.given, inputs.recorded.settings, []
    train_split, eval_split = datasets.choose_splits(
        source, config.train_split, config.eval_split, given, hold_out=config.evaluates_last_step
    )
    held_out = [pair[1] for pair in datasets.HELD_OUT_SPLITS]
    if eval_split in held_out and "eval_split" not in given:
        if settings.get("eval_split") in held_out:  # Images may have been added since the start.
            train_split, eval_split = settings["train_split"], settings["eval_split"]
        lines.append(
            f"train_split: {train_split}, eval_split: {eval_split} ({source.name} has only a train"
            " split)"
        )
    elif eval_split != config.eval_split and config.evaluates:
        lines.append(f"eval_split: {eval_split} ({source.name} has no {config.eval_split} split)")
    return config.replace(train_split=train_split, eval_split=eval_split), lines


def _evaluation_length(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    has_length = config.train_steps or config.checkpoint
    return (config, []) if has_length else _length(config, inputs)


def _length(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Derives the batch size and the number of epochs from the number of images if they are 0."""
    if 0 not in (config.train_batch_size, config.train_epochs):
        return config, []
    source, replicas, settings = inputs.source, inputs.replicas, inputs.recorded.settings
    count = datasets.check_split(source, "train_split", config.train_split)
    if config.drops_unlabeled:
        # For multi-label data, the counts are those of labels rather than of labeled images.
        counts = {} if source.multi_label else source.class_counts(config.train_split)
        count = sum(counts.values()) or count
        count = max(int(count * config.label_fraction), 1)
    power = 2 ** int(math.log2(max(count // 4, 1)))
    batch = min(math.ceil(min(max(power, 32), 512) / replicas), count // replicas) * replicas
    batch = config.train_batch_size or settings.get("train_batch_size") or max(batch, 2)
    epochs = max(100, math.ceil(MIN_SEEN_IMAGES / count))
    epochs = config.train_epochs or settings.get("train_epochs") or epochs
    line = f"train_batch_size: {batch}"
    if not config.train_steps:
        line += f", train_epochs: {epochs}"
    line += f" (for {count:,} training images)"
    return config.replace(train_batch_size=batch, train_epochs=epochs), [line]


def _training_head(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Disables the linear head if there are no labels. A resumed run keeps its linear head."""
    if not config.pretraining:
        return config, []
    source, split = inputs.source, config.train_split
    reason = _reason_for_no_head(config, source)
    has_head = _recorded_head(inputs.recorded)
    if not reason and not (has_head and inputs.recorded.has_checkpoints):
        datasets.check_split(source, "train_split", split)
        if not source.has_labels(split):
            reason = f"no labels were found in {split} of {source.name}"
    return _without_head(config, reason)


def _evaluation_head(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Disables the linear head if there are no labels, or if the run has none."""
    recorded, reason = inputs.recorded, _reason_for_no_head(config, inputs.source)
    is_own_run = config.checkpoint in (None, recorded.settings.get("checkpoint"))
    if not reason and is_own_run and _recorded_head(recorded) is False:
        reason = "the run has none"
    return _without_head(config, reason)


def _reason_for_no_head(config: Config, source: Source) -> str | None:
    if not config.lineareval_while_pretraining:
        return "--nolineareval_while_pretraining"
    return f"{source.name} has no labels" if source.num_classes is None else None


def _recorded_head(recorded: Recorded) -> bool | None:
    """Returns whether a pretraining run has a linear head, or None if it is not recorded."""
    is_known = recorded.settings.get("train_mode") == "pretrain"
    return recorded.settings.get("lineareval_while_pretraining") if is_known else None


def _without_head(config: Config, reason: str | None) -> tuple[Config, list[str]]:
    if not (config.pretraining and reason):
        return config, []
    changes = dict(linear_head_learning_rate=None, zero_init_logits_layer=False)
    config = config.replace(lineareval_while_pretraining=False, **changes)
    return config, [f"linear head: off ({reason})"]


def _white_level(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    if config.white_level != "auto":
        return config, []
    # A resumed run keeps its value.
    white_level = inputs.recorded.settings.get("white_level")
    white_level = white_level or image_checks.find_white_level(inputs.source, config.train_split)
    line = f"white_level: {white_level or 'not used, because the images have 8 bits'}"
    return config.replace(white_level=white_level), [line]


def _training_seed(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    recorded, seed = inputs.recorded, config.seed
    if seed is None:
        seed = recorded.settings.get("seed")
    if seed is None and recorded.has_checkpoints:
        raise UserError(
            f"--model_dir={config.model_dir}: the directory contains checkpoints, but no flags.json"
            " that specifies the seed. Set --seed."
        )
    return config.replace(seed=inputs.new_seed if seed is None else seed), []


def _evaluation_seed(config: Config, inputs: Inputs) -> tuple[Config, list[str]]:
    """Evaluations use the seed of the run, or a fixed one, which makes them repeatable."""
    if config.seed is None:
        config = config.replace(seed=inputs.recorded.settings.get("seed") or 0)
    return config, []


def adopt_classes(config: Config, source: Source, recorded: Recorded) -> list[str]:
    """Replaces the classes of a data set with those of the teacher. Returns lines to log.

    If they differ, the labels of the data set are ignored.

    Raises:
      UserError: there is no teacher, it has no classifier, or the labels are needed.
    """
    if config.teacher is None:
        raise UserError("--train_mode=distill: there is no teacher to learn from. Set --teacher.")
    names = recorded.class_names if recorded.has_checkpoints else None
    if names is None:
        info = inspection.inspect_checkpoint(
            config.teacher, dict(ft_proj_selector=0), flag="--teacher"
        )
        if info.class_names is None or info.multi_label:
            problem = "has no classifier"
            if info.multi_label:
                problem = "was trained with several labels per image"
            raise UserError(
                f"--teacher={config.teacher}: the network {problem}. Use weights with a classifier"
                " for one label per image."
            )
        has_names = info.file.class_names or source.num_classes != len(info.class_names)
        names = info.class_names if has_names else source.class_names
    if names == source.class_names and not source.multi_label:
        return []
    text = classes.differences(source.class_names, names, "the data set", "the teacher")
    text = "several labels per image" if source.multi_label else text
    has_labels = source.class_names is not None
    problem = f"the labels of {source.name} do not match those of the teacher ({text})"
    problem = problem if has_labels else f"{source.name} has no labels"
    if config.distill_alpha < 1:
        raise UserError(
            f"--distill_alpha={config.distill_alpha:g}: {problem}. Use 1, or data with labels of the"
            " teacher's classes."
        )
    source.drop_labels(names)
    return [f"labels: not used, because {problem}"] if has_labels else []


def check(context: RunContext) -> None:
    """Checks that data, replicas, devices, paths and the run to resume match the settings."""
    for stage in stages(context.config).check:
        stage(context)


def _check_folder(context: RunContext) -> None:
    model_dir, source = context.config.model_dir, context.source
    if isinstance(source, FileSource) and os.path.realpath(source.root) == os.path.realpath(
        model_dir
    ):
        raise UserError(
            f"--model_dir={model_dir}: this directory is also the image folder, so a resumed run"
            " would use its own views.png as a training image. Choose another directory."
        )


def _check_devices(context: RunContext) -> None:
    devices.check_precision(context.config.precision, context.config.use_tpu)


def _check_compilation(context: RunContext) -> None:
    if context.config.jit_compile:
        devices.check_jit_compile(context.strategy)


def _check_start(context: RunContext) -> None:
    """Checks the run to resume or the initial weights, and that `model_dir` can be written to."""
    config, recorded = context.config, context.recorded
    if recorded.has_checkpoints:
        _check_resumed(config, context.source, recorded)
    elif config.checkpoint:
        weight_files.locate(config.checkpoint)
    elif config.train_mode == "finetune":
        raise UserError(
            "--train_mode=finetune: there is no pretrained encoder to start from. Set --checkpoint."
        )
    if context.is_chief:
        run_directory.check_writable(config.model_dir)


def _check_memory(context: RunContext) -> None:
    """Checks that training fits in memory. Logs a warning if it does not fit in the memory that is available."""
    config, accelerator = context.config, devices.accelerator_memory(context.config.use_tpu)
    if accelerator is None:
        parts, (total, available) = workers.count_workers(), memory.limits()
    else:  # The estimate was compared with few measurements on accelerators, so it is not a limit.
        parts, total, available = context.strategy.num_replicas_in_sync, math.inf, accelerator
    needed = memory.estimate(config, parts)
    if needed <= available:
        return
    # Of a run with checkpoints, perhaps nothing needs to be trained.
    is_impossible = needed > _MAX_MEMORY * total and not context.recorded.has_checkpoints
    limit = total if is_impossible else available
    name = "micro_batch_size" if config.micro_batch_size else "train_batch_size"
    remedy = f"a smaller --{name} or --image_size"
    if not (config.use_tpu or config.micro_batch_size):
        remedy += ", or set --micro_batch_size"
    problem = (
        f"--train_batch_size={config.train_batch_size}: training needs about {needed / 1e9:.1f} GB"
        f" of memory, but only {limit / 1e9:.1f} GB are available. Use {remedy}."
    )
    if is_impossible:
        raise UserError(problem)
    console.log(f"warning: {problem}")


def check_data(context: RunContext) -> None:
    """Checks that the splits that are used exist, and that the batch sizes match data and replicas."""
    config, source = context.config, context.source
    if uses_train_split(config):
        datasets.check_split(source, "train_split", config.train_split)
    if config.evaluates:
        if (
            not config.evaluates_last_step
            and config.eval_split == Config.eval_split
            and source.split_names == ["train"]
        ):
            raise UserError(
                f"--eval_epochs={config.eval_epochs}: {source.name} has only a train split. Use"
                " --mode=train_then_eval, which holds out some of its images, or set --train_split"
                " and --eval_split."
            )
        datasets.check_split(source, "eval_split", config.eval_split)
    _check_divisible(context, "eval_batch_size")
    if config.trains:
        _check_divisible(context, "train_batch_size")
        _check_divisible(context, "micro_batch_size")
        examples = source.num_examples(config.train_split)
        replicas = context.strategy.num_replicas_in_sync
        if config.train_batch_size > examples:
            raise UserError(
                f"--train_batch_size={config.train_batch_size}: --train_split={config.train_split}"
                f" has only {examples} examples. Use at most {examples // replicas * replicas}."
            )


def _check_divisible(context: RunContext, flag: str) -> None:
    size, replicas = getattr(context.config, flag), context.strategy.num_replicas_in_sync
    if size % replicas:
        raise UserError(
            f"--{flag}={size}: the value must be divisible by the number of replicas ({replicas})."
            f" Use {max(round(size / replicas), 1) * replicas}."
        )


def uses_train_split(config: Config) -> bool:
    """Returns whether training or an evaluation protocol reads the training split."""
    # `knn` may replace the head.
    probes = {"lbfgs", "knn"} & set(config.eval_protocols) or not config.has_linear_head
    return bool(config.trains or config.label_fraction < 1 or probes)


def count_trained_examples(context: RunContext) -> int:
    """Returns the number of images in `--eval_split` that were also used for training; see `count_overlap`."""
    config, source, recorded = context.config, context.source, context.recorded
    if not config.evaluates:
        return 0
    splits = []
    # Without labels, `contrastive` is the only protocol, which trains nothing.
    if uses_train_split(config) and (config.trains or source.num_classes is not None):
        splits.append(config.train_split)
    splits += weights_split(source, recorded.trained_on, recorded.network.get("train_split"))
    initial = recorded.initial_weights or {}
    splits += weights_split(source, initial.get("trained_on"), initial.get("train_split"))
    return count_overlap(source, "eval_split", config.eval_split, splits)


def weights_split(source: Source, trained_on: str | None, split: str | None) -> list[str]:
    """Returns the split that weights were trained on, or an empty list if it is not known to be in `source`."""
    return (
        [split]
        if trained_on and split and trained_on == computed_from.source_digest(source)
        else []
    )


def count_overlap(source: Source, flag: str, split: str, training_splits: list[str]) -> int:
    """Returns how many examples of a split are also in a training split, and logs a warning if there are any."""
    counts = ((source.overlap(split, other), other) for other in training_splits)
    count, other = max(counts, default=(0, ""))
    if count:
        console.log(
            f"warning: {count:,} of the {source.num_examples(split):,} images in --{flag}={split} are"
            f" also in the training split {other}, so the results are not those on new images"
        )
    return count


def _check_labels(context: RunContext) -> None:
    """Checks that the data has the labels that training and evaluation need."""
    config, source, names = context.config, context.source, set()
    if config.evaluates_last_step:
        names.update(evaluate.protocols(config, source))
    if config.trains and config.eval_epochs and not config.pretraining:
        names.add("linear_head")
    probes = {"lbfgs", "knn"} & names
    trains_on_labels = config.trains_on_labels
    if config.pretraining:
        trains_on_labels = simclr.LOSSES[config.contrastive_loss].needs_labels
    if source.num_classes is None:
        problem = f"{source.name} has no labels"
        remedy = "Use a data set with labels (in an image folder, one sub-folder per class)"
        if trains_on_labels:
            flag = "contrastive_loss" if config.pretraining else "train_mode"
            raise UserError(f"{as_flag(flag, getattr(config, flag))}: {problem}. {remedy}.")
        if probes:
            raise UserError(
                f"--eval_protocol={config.eval_protocol}: {problem}. {remedy}, or use"
                " --eval_protocol=contrastive."
            )
        if config.keep_best:
            raise UserError(
                f"--keep_best: this flag requires an accuracy, but {problem}. Remove the flag."
            )
        return
    if source.multi_label and config.label_fraction < 1:
        raise UserError(
            f"--label_fraction={config.label_fraction:g}: {source.name} has multiple labels per"
            " example, which this flag does not support. Remove the flag."
        )
    problem = f"no labels were found in this split of {source.name}"
    if (probes or (config.trains and trains_on_labels)) and not source.has_labels(
        config.train_split
    ):
        raise UserError(f"--train_split={config.train_split}: {problem}. Use a split with labels.")
    if (probes or "linear_head" in names) and not source.has_labels(config.eval_split):
        other = "--mode=train without --eval_epochs"
        other = "--eval_protocol=contrastive" if config.pretraining else other
        raise UserError(
            f"--eval_split={config.eval_split}: {problem}. Use a split with labels, or {other}."
        )
    if probes or (config.trains and ("linear_head" in names or config.eval_epochs)):
        _check_classes(config, source)
    if source.multi_label and probes:
        raise UserError(
            f"--eval_protocol={config.eval_protocol}: lbfgs and knn require one label per example,"
            f" but {source.name} has multiple labels per example. Use linear_head, or `python -m"
            " transfer linear`."
        )


def _check_classes(config: Config, source: Source) -> None:
    """Checks that there are several classes, and that the splits have some of them in common."""
    train, evaluation = (
        [name for name, count in source.class_counts(split).items() if count]
        for split in (config.train_split, config.eval_split)
    )
    if len(train) == 1 and evaluation:
        raise UserError(
            f"--train_split={config.train_split}: all images with a label are of the class"
            f" {train[0]}, so the accuracy would be meaningless. Use a split with several classes."
        )
    if train and evaluation and not set(train) & set(evaluation):
        raise UserError(
            f"--eval_split={config.eval_split}: none of its classes"
            f" ({console.join_first(evaluation)}) is in --train_split={config.train_split}"
            f" ({console.join_first(train)}). Use splits with the same classes."
        )


def _check_resumed(config: Config, source: Source, recorded: Recorded) -> None:
    """Checks that a resumed run has the settings and the data that it started with, and logs accepted changes."""
    changes = run_directory.setting_changes(config, recorded)
    fixed = [
        changes[name]
        for name in settings_with("identity", "network", "of_run", "order")
        if name in changes
    ]
    for changed, problem, remedy in (
        (
            fixed,
            f"--model_dir={config.model_dir}: the run was started with {', '.join(fixed)}",
            "Pass the same flags, choose another directory",
        ),
        (
            (data := run_directory.data_changes(config, source, recorded)),
            f"--dataset={config.dataset}: the data has changed since the run in"
            f" {config.model_dir} was started: {'; '.join(data)}",
            "Restore the data, choose another --model_dir",
        ),
    ):
        if changed and not config.allow_flag_changes:
            raise UserError(f"{problem}. {remedy}, or accept the change with --allow_flag_changes.")
        if changed:
            console.log(f"warning: {problem}; accepted because of --allow_flag_changes")
    for name in settings_with("length"):
        if name in changes:
            console.log(
                f"the run was started with {changes[name]}: the learning-rate schedule changes"
                " accordingly"
            )


def check_agreement(context: RunContext) -> None:
    """Checks that the settings and the data are the same on all workers."""
    config = context.config
    settings = {
        name: value
        for name, value in config.settings().items()
        if name not in settings_with("per_worker")
    }
    summary = [
        zlib.crc32(json.dumps(settings, sort_keys=True).encode()),
        context.source.num_examples(config.train_split),
    ]
    flags, examples = (
        sorted(set(values)) for values in workers.gather_integers(summary, context.strategy).T
    )
    if len(flags) > 1:
        raise UserError(
            "TF_CONFIG: the workers were started with different flags. Pass the same flags on all"
            " workers."
        )
    if len(examples) > 1:
        raise UserError(
            f"--dataset={config.dataset}: the workers have different numbers of training examples "
            f"({', '.join(map(str, examples))}). Provide the same data on all workers."
        )


def advice(context: RunContext) -> list[str]:
    """Returns one line for each problem with the classes, and for each training setting that is probably unsuitable."""
    lines: list[str] = []
    for stage in stages(context.config).advise:
        lines += stage(context.config, context.source)
    return lines


def _advise_on_classes(config: Config, source: Source) -> list[str]:
    lines, splits = [], []
    if uses_train_split(config):
        splits.append(config.train_split)
    evaluated = [config.eval_split] if config.evaluates else []
    for split in dict.fromkeys(splits + evaluated):
        counts = source.class_counts(split)
        missing = [name for name, number in counts.items() if not number]
        few = [f"{name} {number}" for name, number in counts.items() if 0 < number < _FEW_IMAGES]
        if missing:
            lines.append(
                f"{split} has no images of {len(missing)} of {len(counts)} classes"
                f" ({console.join_first(missing)})"
            )
        if few and split in splits and config.label_fraction == 1:
            lines.append(
                f"{split} has fewer than {_FEW_IMAGES} images of {len(few)} of {len(counts)} classes"
                f" ({console.join_first(few)}), which is hardly enough to learn them"
            )
    return lines


def _advise_on_training(config: Config, source: Source) -> list[str]:
    lines = []
    count = source.num_examples(config.train_split)
    steps = model_lib.count_steps(config, count)
    is_short = steps.train * config.train_batch_size < MIN_SEEN_IMAGES and count < _SMALL_FOLDER
    if is_short and config.pretraining and not config.checkpoint:
        name = "train_steps" if config.train_steps else "train_epochs"
        lines.append(
            f"--{name}={getattr(config, name)}: with {steps.train} steps, the network probably learns"
            f" little. Use at least {math.ceil(MIN_SEEN_IMAGES / config.train_batch_size):,} steps"
            f" ({math.ceil(MIN_SEEN_IMAGES / count)} epochs), or --train_epochs=0."
        )
    if steps.warmup > steps.train / 2:
        lines.append(
            f"--warmup_epochs={config.warmup_epochs:g}: the learning rate increases during"
            f" {min(steps.warmup, steps.train)} of {steps.train} steps. Use a smaller value, or"
            " train longer."
        )
    if (
        config.pretraining
        and config.has_linear_head
        and config.linear_head_learning_rate is None
        and config.optimizer != "adam"
        and config.learning_rate
        and count < _SMALL_DATA_SET
    ):
        lines.append(
            f"--linear_head_learning_rate is not set: with {count} images, the linear head is"
            " likely to diverge at the encoder's learning rate. Use"
            f" {_LINEAR_HEAD_LEARNING_RATE}, which does not affect the encoder."
        )
    if config.precision == "float32" and devices.has_bfloat16():
        lines.append(
            "--precision=float32: this GPU is faster in half precision. Consider"
            " --precision=mixed_bfloat16."
        )
    if config.pretraining and config.train_batch_size < _SMALL_BATCH:
        lines.append(
            f"--train_batch_size={config.train_batch_size}: each image is compared with few others."
            f" Use at least {_SMALL_BATCH}, with --micro_batch_size if memory is short."
        )
    return lines


def _advise_on_images(config: Config, source: Source) -> list[str]:
    lines = []
    side, aspect, chroma = _sample_images(config, source)
    if config.evaluates and aspect > 2 and config.eval_resize == "crop":
        lines.append(
            f"the longer side of the images is {aspect:.1f} times the shorter one (median), and"
            " evaluation uses only the center. If the subject is elsewhere, set"
            " --eval_resize=squash or pad."
        )
    distorts = config.uses_pretraining_augmentation and config.color_jitter_strength
    if distorts and isinstance(source, FileSource) and chroma <= _MAX_GRAY_CHROMA:
        lines.append(
            "the sampled images are gray, so saturation, hue and the conversion to gray do not"
            " change them"
        )
    lines += image_checks.describe_values(config, source)
    lines += image_checks.describe_pages(config, source)
    if config.image_size > 32 and config.image_size > 2 * side:
        lines.append(
            f"--image_size={config.image_size}: the images are much smaller (median of the shorter"
            f" side: {side:.0f} pixels). A smaller value is faster, and probably as accurate."
        )
    return lines


def _sample_images(config: Config, source: Source) -> tuple[float, float, float]:
    """Returns the medians of the shorter side, in pixels, and of the ratio of the sides, and the largest chroma.

    Reads a few training images. The chroma is the difference between color channels, in [0, 255].
    """

    def describe(key, item, label):
        image = source.decode(item)
        chroma = tf.reduce_max(image, -1) - tf.reduce_min(image, -1)
        shape = tf.shape(image)[:2]
        return tf.reduce_min(shape), tf.reduce_max(shape), tf.reduce_max(chroma)

    records = source.records(config.train_split).take(_SAMPLED_IMAGES)
    try:
        sides, longer, chroma = zip(*records.map(describe).as_numpy_iterator())
    except tf.errors.OpError:  # Training reports images that cannot be read.
        return math.inf, 1, math.inf
    return np.median(sides), np.median(np.divide(longer, sides)), max(chroma)


# --------------------------------------------------------------------------------------------------- stages


class Stages(NamedTuple):
    """The subjects of `complete`, `check` and `advice`, in order."""

    complete: tuple[Callable[[Config, Inputs], tuple[Config, list[str]]], ...]
    check: tuple[Callable[[RunContext], None], ...]
    advise: tuple[Callable[[Config, Source], list[str]], ...]


TRAINING = Stages(
    complete=(_training_splits, _length, _training_head, _white_level, _training_seed),
    check=(
        check_data,
        _check_labels,
        _check_folder,
        _check_devices,
        _check_compilation,
        _check_start,
        _check_memory,
    ),
    advise=(_advise_on_classes, _advise_on_training, _advise_on_images),
)
EVALUATION = Stages(
    complete=(
        _evaluation_splits,
        _evaluation_length,
        _evaluation_head,
        _white_level,
        _evaluation_seed,
    ),
    check=(check_data, _check_labels, _check_folder, _check_devices),
    advise=(_advise_on_classes,),
)


def stages(config: Config) -> Stages:
    """Returns the stages of a run that trains, or of an evaluation."""
    return TRAINING if config.trains else EVALUATION
