"""Pretrains, fine-tunes, evaluates and exports SimCLR models. `python run.py --help` lists all flags."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import math
import os
import random
import sys
from collections.abc import Collection

from runtime import console

if __name__ == "__main__":
    console.set_up()  # This call must precede imports that store sys.stderr, which may be closed.

from absl import app, flags

import config as config_lib
from runtime import command_line, tensorflow_startup
from runtime.errors import Stopped, UserError, first_line

config_lib.define_flags()
flags.adopt_module_key_flags(config_lib)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line with absl. On error, prints one line and exits with status 2."""
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stderr(warnings):
            rest = flags.FLAGS(argv)
    except flags.CantOpenFlagFileError as error:
        _fail(f"--flagfile: {str(error.__context__ or error)}. Check its path and permissions.")
    except flags.Error as error:
        _fail(config_lib.describe_parse_error(error))
    except ValueError as error:  # absl does not catch decoding errors in flag files.
        _fail(
            f"--flagfile: a flag file cannot be read as text ({first_line(error)}). Save it as"
            " UTF-8."
        )
    if warnings.getvalue():  # absl ignores a flag file that includes itself, and prints a warning.
        _fail(
            f"--flagfile: {warnings.getvalue().strip()}. Remove the --flagfile line from that file."
        )
    if rest[1:]:
        _fail(f"{rest[1]!r} is not a flag. Write settings as --name=value.")
    return rest


def _fail(message):
    """Prints a user error and exits with status 2."""
    command_line.exit_with_error("run.py", message)


if __name__ == "__main__":  # --help and flag errors need not wait for TensorFlow to load.
    if {"-h", "--help", "--helpshort", "--helpfull"} & set(sys.argv[1:]):
        console.log(f"{__doc__}\n\npython run.py [flags]\n{config_lib.format_help()}")
        sys.exit(0)
    parse_flags(sys.argv)
    command_line.run_command("run.py", config_lib.from_flags)
    if (ignored := config_lib.describe_ignored_flags()) is not None:
        console.log(ignored)
    console.log("loading TensorFlow")

with command_line.reporting_errors("run.py"), tensorflow_startup.loading_tensorflow():
    import numpy as np
    import tensorflow as tf

    import evaluate
    import model as model_lib
    import train
    from checkpoints import checkpoint_files, inspection, lock, run_directory, weight_files
    from export import saving
    from inference import gallery
    from runtime import devices, progress, signals, workers
    from sources import datasets, image_checks
    from sources.folders import FolderSource
    from sources.source import Source

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Below this number of images, the linear head requires its own learning rate.
_SMALL_DATA_SET = 20_000
_LINEAR_HEAD_LEARNING_RATE = 0.1  # This learning rate is stable on small data sets.
_SMALL_BATCH = 32  # Below this batch size, contrastive learning has too few negatives.
_SAMPLED_IMAGES = 32  # This is the number of images whose sizes are read.
# Error text of `tf.data.experimental.assert_cardinality`.
_FEWER_EXAMPLES = "Input dataset was expected to contain"

# ---------------------------------------------------------------------------------------------------------- settings


def adopt_network(config: config_lib.Config, given: Collection[str]) -> config_lib.Config:
    """Returns `config` with the network and the image size of the weights to evaluate or to fine-tune.

    These settings are read from the run in `--model_dir` if it exists, and otherwise from
    `--checkpoint`. An evaluation also uses the recorded `ft_proj_selector`. Settings listed in
    `given` do not change. All changes are logged.

    Raises:
      UserError: the checkpoint cannot be read, or its network is incompatible with other settings.
    """
    if config.mode != "eval" and config.train_mode != "finetune":
        return config
    recorded = run_directory.read_flags(config.model_dir) if config.model_dir else None
    if recorded is not None and config.checkpoint in (None, recorded.get("checkpoint")):
        network, path = recorded, config.model_dir
        if network.get("stem") == "auto" and "image_size" in network:
            network["stem"] = config_lib.Config(image_size=network["image_size"]).stem_name
    elif config.checkpoint is not None:
        network, path = (
            inspection.network_flags(
                weight_files.open_weights(config.checkpoint), with_head_input=True
            ),
            config.checkpoint,
        )
    else:
        return config
    # lineareval_while_pretraining is not inferred, because a linear head requires labels in the
    # data set. Fine-tuning trains a new classifier, which may have a different input.
    names = [*config_lib.settings_with("network"), "image_size"] + ["ft_proj_selector"] * (
        config.mode == "eval"
    )
    changes = {
        name: network[name]
        for name in names
        if name not in given
        and name in (network or {})
        and name != "lineareval_while_pretraining"
        and network[name] != getattr(config, name)
    }
    if (
        changes.get("stem")
        == config.replace(image_size=changes.get("image_size", config.image_size)).stem_name
    ):
        del changes["stem"]  # --stem=auto selects the stem of the checkpoint.
    if changes:
        console.log(f"network of {path}: {' '.join(config_lib.as_flags(changes))}")
    return config.replace(**changes)


def _adopt_last_step(config, given, recorded):
    """Returns an evaluation's settings with the last step of the run in `model_dir` as `train_steps`.

    `recorded` contains the settings of the run. If the user set a different training length, it is
    kept.
    """
    last_step = run_directory.read_last_step(config.model_dir)
    names = (*config_lib.settings_with("length"), "train_batch_size")
    if last_step is None or any(
        name in given and getattr(config, name) != recorded.get(name) for name in names
    ):
        return config
    return config.replace(train_steps=last_step)


def fill_defaults(
    config: config_lib.Config, source: Source, given: Collection[str]
) -> config_lib.Config:
    """Returns `config` with the run directory, network, splits, linear head and seed filled in. Logs these choices.

    `given` lists the settings that the user set.
    """
    if config.model_dir is None:
        # The name depends only on the given settings, so a run is found even if its initial
        # checkpoint was deleted.
        config = config.replace(model_dir=config.default_model_dir())
        console.log(f"model_dir: {config.model_dir} (the same command resumes this run)")
    if config.mode == "eval":
        # A run that starts from the same --checkpoint may be about to write its settings.
        evaluate.wait_for_run(
            config.model_dir, config.eval_timeout, only_if_locked=config.checkpoint is not None
        )
    config = adopt_network(config, given)
    recorded = run_directory.read_flags(config.model_dir) or {}
    if config.mode == "eval":
        config = _adopt_last_step(config, given, recorded)
    train_split, eval_split = datasets.choose_splits(
        source, config.train_split, config.eval_split, given, hold_out=config.mode != "train"
    )
    if config.mode != "eval" and "train_split" not in given:
        # A resumed run keeps its training split.
        train_split = recorded.get("train_split", train_split)
    if eval_split == datasets.HELD_OUT_SPLITS[1] and "eval_split" not in given:
        console.log(
            f"train_split: {train_split}, eval_split: {eval_split} ({source.name} has only a train"
            " split, so a fifth of its images is held out for evaluation)"
        )
        _warn_if_trained_on_held_out_images(config)
    elif eval_split != config.eval_split and config.evaluates:
        console.log(f"eval_split: {eval_split} ({source.name} has no {config.eval_split} split)")
    config = config.replace(train_split=train_split, eval_split=eval_split)
    reason = _reason_for_no_linear_head(config, source, recorded) if config.pretraining else None
    if reason:
        console.log(f"linear head: off ({reason})")
        config = config.replace(
            lineareval_while_pretraining=False,
            linear_head_learning_rate=None,
            zero_init_logits_layer=False,
        )
    if config.seed is None:
        stored = recorded.get("seed")
        if (
            stored is None
            and config.mode != "eval"
            and checkpoint_files.list_steps(config.model_dir)
        ):
            raise UserError(
                f"--model_dir={config.model_dir}: the directory contains checkpoints, but no"
                " flags.json that specifies the seed. Set --seed."
            )
        # Evaluations use a fixed seed, which makes them repeatable.
        new = 0 if config.mode == "eval" else random.SystemRandom().randrange(2**31)
        config = config.replace(seed=new if stored is None else stored)
    return config


def _reason_for_no_linear_head(config, source, recorded):
    """Returns the reason why pretraining has no linear head, or None if it has one.

    `recorded` contains the settings of the run in `model_dir`. It is empty if there is no run.
    """
    if not config.lineareval_while_pretraining:
        return "--nolineareval_while_pretraining"
    if source.num_classes is None:
        return f"{source.name} has no labels"
    has_head = (
        recorded.get("lineareval_while_pretraining")
        if recorded.get("train_mode") == "pretrain"
        else None
    )
    if config.mode == "eval":
        is_own_run = config.checkpoint in (None, recorded.get("checkpoint"))
        return "the run has none" if is_own_run and has_head is False else None
    if has_head and checkpoint_files.list_steps(config.model_dir):
        return None  # A resumed run keeps its linear head.
    datasets.check_split(source, "train_split", config.train_split)
    if source.has_labels(config.train_split):
        return None
    return f"no labels were found in {config.train_split} of {source.name}"


def _warn_if_trained_on_held_out_images(config):
    """Logs a warning if the weights to evaluate were trained on a split that may contain the evaluation images."""
    trained = run_directory.read_flags(config.model_dir) or {}
    if config.mode == "eval" and config.checkpoint not in (None, trained.get("checkpoint")):
        trained = dataclasses.asdict(inspection.inspect_checkpoint(config.checkpoint).config)
    if (
        trained.get("dataset") == config.dataset
        and trained.get("train_split") != datasets.HELD_OUT_SPLITS[0]
    ):
        console.log(
            f"warning: these weights were trained on the split {trained.get('train_split')}, which"
            " may contain images that are now held out. For an unbiased evaluation, use images"
            " that are not in this split."
        )


def check(config: config_lib.Config, source: Source, strategy: tf.distribute.Strategy) -> None:
    """Raises `UserError` if the data, replicas or paths do not match the settings. Call this before writing files."""
    _check_data(config, source, strategy)
    if source.num_classes is None:
        _check_unlabeled(config, source)
    else:
        _check_labels(config, source)
    if (
        source.multi_label
        and config.mode != "train"
        and {"lbfgs", "knn"} & set(evaluate.protocols(config, source))
    ):
        raise UserError(
            f"--eval_protocol={config.eval_protocol}: lbfgs and knn require one label per example,"
            f" but {source.name} has multiple labels per example. Use linear_head, or `python -m"
            " transfer linear`."
        )
    if isinstance(source, FolderSource) and os.path.realpath(source.root) == os.path.realpath(
        config.model_dir
    ):
        raise UserError(
            f"--model_dir={config.model_dir}: this directory is also the image folder, so a resumed"
            " run would use its own views.png as a training image. Choose another directory."
        )
    devices.check_precision(config.precision, config.use_tpu)
    if config.jit_compile and config.mode != "eval":
        devices.check_jit_compile(strategy)
    if config.mode != "eval":
        _check_start(config)
        if devices.is_chief(strategy):
            run_directory.check_writable(config.model_dir)


def _check_data(config, source, strategy):
    """Checks that the splits that are used exist and contain enough examples for the batch sizes."""
    # `knn` may replace the head.
    probes = {"lbfgs", "knn"} & set(config.eval_protocols) or not config.has_linear_head
    if config.mode != "eval" or config.label_fraction < 1 or probes:
        datasets.check_split(source, "train_split", config.train_split)
    if (
        config.mode == "train"
        and config.eval_epochs
        and config.eval_split == config_lib.Config.eval_split
        and (source.split_names == ["train"])
    ):
        raise UserError(
            f"--eval_epochs={config.eval_epochs}: {source.name} has only a train split. Use"
            " --mode=train_then_eval, which holds out a fifth of its images, or set --train_split"
            " and --eval_split."
        )
    if config.evaluates:
        datasets.check_split(source, "eval_split", config.eval_split)
    train.check_batch(config, source, strategy)


def _check_unlabeled(config, source):
    remedy = "Use a data set with labels (in an image folder, one sub-folder per class)"
    if not config.pretraining:
        raise UserError(
            f"--train_mode={config.train_mode}: --dataset={source.name} has no labels. {remedy}."
        )
    if config.mode != "train" and {"lbfgs", "knn"} & set(evaluate.protocols(config, source)):
        raise UserError(
            f"--eval_protocol={config.eval_protocol}: {source.name} has no labels. {remedy}, or use"
            " --eval_protocol=contrastive."
        )
    if config.keep_best:
        raise UserError(
            f"--keep_best: this flag requires an accuracy, but {source.name} has no labels. Remove"
            " the flag."
        )


def _check_labels(config, source):
    """Checks that the splits of a labeled data set have labels if they are needed."""
    names = set(evaluate.protocols(config, source)) if config.mode != "train" else set()
    if config.eval_epochs and not config.pretraining:
        names.add("linear_head")
    remedy = f"no labels were found in this split of {source.name}. Use a split with labels"
    uses_train_labels = not config.pretraining and config.mode != "eval" or {"lbfgs", "knn"} & names
    if uses_train_labels and not source.has_labels(config.train_split):
        raise UserError(f"--train_split={config.train_split}: {remedy}.")
    if {"linear_head", "lbfgs", "knn"} & names and not source.has_labels(config.eval_split):
        alternative = ", or --eval_protocol=contrastive" if config.pretraining else ""
        raise UserError(f"--eval_split={config.eval_split}: {remedy}{alternative}.")


def unsuitable_settings(config: config_lib.Config, source: Source) -> list[str]:
    """Returns one line for each training setting that is probably unsuitable for the data."""
    count = source.num_examples(config.train_split)
    steps, lines = model_lib.count_steps(config, count), []
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
            f" likely to diverge at the encoder's learning rate. Use {_LINEAR_HEAD_LEARNING_RATE},"
            " which does not affect the encoder."
        )
    if config.pretraining and config.train_batch_size < _SMALL_BATCH:
        lines.append(
            f"--train_batch_size={config.train_batch_size}: each image is compared with few others."
            f" Use at least {_SMALL_BATCH}, with --micro_batch_size if memory is short."
        )
    if config.image_size > 32 and config.image_size > 2 * (side := _median_side(config, source)):
        lines.append(
            f"--image_size={config.image_size}: the images are much smaller (median of the shorter"
            f" side: {side:.0f} pixels). A smaller value is faster, and probably as accurate."
        )
    return lines


def _median_side(config, source):
    """Returns the median length of the shorter side of a few training images, in pixels. Call `check_images` first."""
    records = source.records(config.train_split).take(_SAMPLED_IMAGES)
    sides = records.map(lambda key, item, label: tf.reduce_min(tf.shape(source.decode(item))[:2]))
    try:
        return np.median(list(sides.as_numpy_iterator()))
    except tf.errors.OpError:  # Training reports images that cannot be read.
        return math.inf


def _check_start(config):
    """Checks that a new run's initial weights exist."""
    if checkpoint_files.list_steps(config.model_dir):
        return
    if config.checkpoint:
        weight_files.locate(config.checkpoint)
    elif config.train_mode == "finetune":
        raise UserError(
            "--train_mode=finetune: there is no pretrained encoder to start from. Set --checkpoint."
        )


# ------------------------------------------------------------------------------------------------------------- run


def main(config: config_lib.Config, given: Collection[str] = ()) -> None:
    """Trains, evaluates and exports according to `config`.

    Args:
      config: settings from the command line.
      given: names of the settings that the user set. Other settings may be adapted to the data and
        the checkpoint.

    Raises:
      UserError: the settings are invalid, or the data or other files cannot be used.
      errors.Stopped: the process received a stop signal.
    """
    elapsed = progress.stopwatch()
    strategy = connect(config)
    is_chief = devices.is_chief(strategy)
    with signals.StopSignals() as stop, _translate_errors(config):
        with stop.interruptible():
            source = datasets.open_source(config.dataset, config.data_dir, config.follow_links)
        config = fill_defaults(config, source, given)
        check(config, source, strategy)
        if config.mode == "eval":
            _prepare_source(config, source, strategy)
            _evaluate(config, source, strategy)
            return
        with lock.Lock(config.model_dir) if is_chief else contextlib.nullcontext() as run_lock:
            _prepare_directory(config, source, strategy)
            _prepare_source(config, source, strategy)
            # Reports too few labels before training.
            labeled_source = evaluate.select_labels(config, source)
            signals.safe_point()
            train.check_agreement(config, source, strategy)
            check_lock = (lambda: None) if run_lock is None else run_lock.check
            make_evaluator = functools.partial(
                _make_evaluator, config, source, strategy, is_chief, check_lock
            )
            trained, results = (
                train.train(config, source, strategy, stop, run_lock, make_evaluator),
                {},
            )
            if config.mode == "train_then_eval":
                results = evaluate.evaluate_and_write(
                    config,
                    labeled_source,
                    trained.model,
                    strategy,
                    trained.step,
                    is_chief,
                    check=check_lock,
                )
            if is_chief:
                if results:
                    trained.log.add_results(trained.step, results)
                saved_model = saving.export_to_model_dir(
                    config, config.model_dir, trained.checkpoint, results, check_lock
                )
                gallery_path = _write_gallery(config, source, saved_model, check_lock)
                console.log(
                    _summary(config, source, trained, results, saved_model, gallery_path, elapsed())
                )
            # If one worker exits early, collective operations fail on the others.
            workers.barrier(strategy)


def _make_evaluator(config, source, strategy, is_chief, check_lock, model):
    """Returns the `Evaluator` for `--eval_epochs`."""
    return evaluate.Evaluator(
        evaluate.config_during_training(config, source),
        source,
        model,
        strategy,
        is_chief,
        check=check_lock,
    )


def _log_inputs(config, source, strategy):
    """Logs the device, the data, and warnings about settings that are unsuitable for the data."""
    console.log(f"device: {devices.describe(strategy)}")
    splits = [(config.train_split, "training")] if config.mode != "eval" else []
    splits += [(config.eval_split, "evaluation")] if config.evaluates else []
    counts = ", ".join(
        f"{source.num_examples(split):,} images for {purpose} ({split})"
        for split, purpose in splits
    )
    console.log(f"data: {source.name}, {counts}, {source.num_classes or 'no'} classes")
    for warning in unsuitable_settings(config, source) if config.mode != "eval" else ():
        console.log(f"warning: {warning}")


def connect(config: config_lib.Config) -> tf.distribute.Strategy:
    """Waits for the other workers, if any, and returns the distribution strategy."""
    if config.cluster == "slurm":
        workers.use_slurm_cluster()  # All functions below read TF_CONFIG.
    workers.check_multi_worker_settings(config.use_tpu, config.mode, config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    # Exit this context before TensorFlow connects to other workers and installs its own signal
    # handlers.
    with signals.StopSignals() as stop, stop.interruptible():
        workers.wait_for_workers()
    return devices.make_strategy(
        config.use_tpu, config.tpu_address, config.tpu_zone, config.gcp_project
    )


@contextlib.contextmanager
def _translate_errors(config):
    """Translates errors from data, lost workers, memory and files into `UserError` or `Stopped`."""
    again = "run the same command again to resume from the newest checkpoint"
    try:
        yield
    except (tf.errors.OpError, OSError, MemoryError) as error:
        reason = first_line(error)
        # Check for a full disk and exhausted memory first, since both can also occur while data is
        # read.
        if _is_full_disk(error):
            raise UserError(
                f"--model_dir={config.model_dir}: a disk is full ({reason}). Free up some space,"
                f" and {again}."
            ) from error
        if isinstance(
            error, (tf.errors.ResourceExhaustedError, MemoryError)
        ) or "OOM when allocating" in str(error):
            flag = "eval_batch_size" if config.mode == "eval" else "train_batch_size"
            remedy = (
                f"a smaller --{flag}"
                if config.mode == "eval"
                else f"--micro_batch_size, or a smaller --{flag}"
            )
            raise UserError(
                f"--{flag}={getattr(config, flag)}: out of memory ({reason}). Use {remedy}."
            ) from error
        if (
            "IteratorGetNext" in str(error)
            or isinstance(error, tf.errors.DataLossError)
            or (
                isinstance(error, tf.errors.FailedPreconditionError)
                and _FEWER_EXAMPLES in str(error)
            )
        ):
            raise UserError(
                f"--dataset={config.dataset}: the data can no longer be read ({reason}). Repair or"
                f" restore the data, and {again}."
            ) from error
        if workers.is_lost_worker(error):
            raise Stopped(
                "another worker has stopped or is unreachable. Check its output, then run the same"
                " command again on all workers to resume from the newest checkpoint."
            ) from error
        if isinstance(error, (OSError, tf.errors.PermissionDeniedError, tf.errors.NotFoundError)):
            raise UserError(
                f"--model_dir={config.model_dir}: a file can no longer be read or written"
                f" ({reason}). Fix the cause, and {again}."
            ) from error
        raise


def _is_full_disk(error):
    """Returns whether an error means that a disk is full or a quota is exceeded."""
    if isinstance(error, OSError):
        return error.errno in _FULL_DISK
    # TensorFlow raises the same exception class, without errno, for a full disk and for exhausted
    # memory. Only the operating system's message differs.
    return isinstance(error, tf.errors.ResourceExhaustedError) and any(
        os.strerror(code) in str(error) for code in _FULL_DISK
    )


def _prepare_source(config, source, strategy):
    """Checks all images, and restricts the training split according to `--label_fraction`.

    Pretraining uses all images. For its evaluation, see `evaluate.select_labels`.
    """
    image_checks.check_images(config, source, devices.is_chief(strategy))
    if config.label_fraction < 1 and not config.pretraining:
        source.restrict(config.train_split, config.label_fraction, config.label_seed)
    # Check the split sizes again, since examples may have been removed.
    _check_data(config, source, strategy)
    if devices.is_chief(strategy):
        _log_inputs(config, source, strategy)


def _evaluate(config, source, strategy):
    """Evaluates the weights in `--checkpoint`, or evaluates and exports all checkpoints of the run in `--model_dir`."""
    is_chief = devices.is_chief(strategy)
    initial_checkpoint = (run_directory.read_flags(config.model_dir) or {}).get("checkpoint")
    if not config.checkpoint or config.checkpoint == initial_checkpoint:
        export = functools.partial(saving.export_to_model_dir, config, evaluate.results_dir(config))
        evaluate.evaluate_continuously(config, source, strategy, is_chief, export)
        return
    results = evaluate.evaluate_checkpoint(config, source, strategy, is_chief)
    if is_chief:
        rows = [
            *evaluate.result_rows(results),
            None,
            ("results", os.path.join(evaluate.results_dir(config), "result.json")),
        ]
        console.log(console.format_table(f"{config.network_name} on {source.name}", rows))


def _prepare_directory(config, source, strategy):
    """Repairs the run directory and checks that a run with these settings can be resumed or started in it."""
    if devices.is_chief(strategy):
        run_directory.remove_temporary_files(config.model_dir)
        checkpoint_files.repair(config.model_dir)
    # The other workers must not read checkpoints before the chief has repaired them.
    workers.barrier(strategy)
    if checkpoint_files.latest_checkpoint(config.model_dir) is not None:
        run_directory.check_flags(config)
        run_directory.check_data(config, source)
    else:
        run_directory.check_no_user_files(config.model_dir)


def _write_gallery(config, source, saved_model, check):
    """Writes the gallery of an image folder. Returns the path of the page, or None if it was not written."""
    is_folder = config.mode == "train_then_eval" and isinstance(source, FolderSource)
    if not is_folder or config.gallery is False:
        return None
    return gallery.write_for_run(
        saved_model, source, config.train_split, config.model_dir, config.seed, check
    )


def _summary(config, source, trained, results, saved_model, gallery_path, seconds):
    """Returns the table to print at the end of a run."""
    rows = evaluate.result_rows(results)
    rows += [None] if rows else []
    rows += [("steps", trained.step), ("time", console.format_duration(seconds))]
    rows += [("images/s", f"{trained.images_per_second:.0f}")] if trained.images_per_second else []
    rows += [("skipped steps (overflow)", trained.skipped_steps)] if trained.skipped_steps else []
    rows += [("checkpoint", trained.checkpoint), ("SavedModel", saved_model)]
    rows += (
        [("results", os.path.join(evaluate.results_dir(config), "result.json"))] if results else []
    )
    rows += [("gallery", gallery_path)] if gallery_path else []
    rows += [("run directory", config.model_dir)]
    return console.format_table(f"{config.network_name} on {source.name}", rows)


def run_from_flags(argv: list[str]) -> None:
    """Calls `main` with the parsed flags, and reports errors as one-line messages."""
    del argv
    with command_line.reporting_errors("run.py"):
        config = config_lib.from_flags()
        with tensorflow_startup.loading_tensorflow():
            devices.start_runtime(config.use_tpu, config.cluster)
        main(config, config_lib.given_flags())


if __name__ == "__main__":
    app.run(run_from_flags, flags_parser=parse_flags)
