"""One run from settings to summary: data set, checks, and dispatch by mode."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import tempfile
import warnings
import zlib

import absl.logging
import tensorflow as tf

import checkpoint
import data
import devices
import evaluate
import export
import metrics
import progress
import train
import weights
from config import UserError

_SETTINGS_OF_A_HOST = {"model_dir", "data_dir", "log_seconds", "shuffle_buffer_mb"}  # may differ among hosts

# Deprecations inside the libraries are not for the user to mend.
tf.get_logger().setLevel("ERROR")
absl.logging.set_verbosity(absl.logging.ERROR)
warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets")

# ----------------------------------------------------------------------------------------------------- the settings


def complete(config, source, eval_split_given):
    """Fills in what the command line left open, saying so: directory, evaluation split, linear head, seed."""
    if config.model_dir is None:
        config = config.replace(model_dir=config.default_model_dir())
        progress.say(f"model_dir: {config.model_dir} (the same command resumes there)")
    eval_split = data.choose_eval_split(source, config.eval_split, eval_split_given)
    if eval_split != config.eval_split and config.mode != "train":
        progress.say(f"eval_split: {eval_split} ({source.name} has no {config.eval_split})")
    config = config.replace(eval_split=eval_split)
    if source.num_classes is None and config.pretraining and config.lineareval_while_pretraining:
        progress.say(f"linear head: off ({source.name} has no labels)")
        config = config.replace(lineareval_while_pretraining=False, linear_head_learning_rate=None,
                                zero_init_logits_layer=False)
    if config.seed is None:
        known = metrics.read_json(os.path.join(config.model_dir, "flags.json")) or {}
        config = config.replace(seed=known.get("seed", random.SystemRandom().randrange(2**31)))
    return config


def check(config, source, strategy):
    """What can be wrong with data, replicas and places, before anything is built or written. Raises `UserError`."""
    data.check_split(source, "train_split", config.train_split)
    if config.mode != "train":
        data.check_split(source, "eval_split", config.eval_split)
    if source.num_classes is None:
        _check_unlabelled(config, source)
    train.check_batch(config, source, strategy)
    devices.check_precision(config)
    if config.mode != "eval":
        _check_start(config)
        if devices.is_chief(strategy):
            _check_writable(config.model_dir)


def check_agreement(config, source, strategy):
    """Whether all hosts run the same settings, on the same data, from the same checkpoint. Raises `UserError`."""
    newest = checkpoint.latest(config.model_dir)
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in _SETTINGS_OF_A_HOST}
    mine = [zlib.crc32(json.dumps(settings, sort_keys=True).encode()), source.num_examples(config.train_split),
            -1 if newest is None else checkpoint.step_of(newest)]
    gathered = devices.gather_from_hosts(mine, strategy)
    flags, examples, steps = ([str(value) for value in values] for values in gathered.T)
    if len(set(flags)) > 1:
        raise UserError("the hosts of TF_CONFIG were started with different flags: give all of them the same")
    if len(set(examples)) > 1:
        raise UserError(f"--dataset={config.dataset}: the hosts find different numbers of training examples "
                        f"({', '.join(examples)}): give all of them the same data")
    if len(set(steps)) > 1:
        raise UserError(f"--model_dir={config.model_dir}: the hosts find different checkpoints (steps "
                        f"{', '.join(steps)}; -1: none): it must be on storage that all of them see")


def _check_unlabelled(config, source):
    remedy = "sort its images into one sub-folder a class"
    if not config.pretraining:
        raise UserError(f"--train_mode={config.train_mode} needs labels, and --dataset={source.name} has none: "
                        f"{remedy}")
    if config.mode != "train" and {"lbfgs", "knn"} & set(evaluate.protocols(config, source)):
        raise UserError(f"--eval_protocol={config.eval_protocol} needs labels, and {source.name} has none: {remedy}, "
                        "or use --eval_protocol=contrastive")


def _check_start(config):
    """A new run has what it starts from."""
    if checkpoint.latest(config.model_dir) is not None:
        return
    if config.checkpoint:
        weights.locate(config.checkpoint)
    elif config.train_mode == "finetune":
        raise UserError("--train_mode=finetune needs --checkpoint, the pretrained encoder to start from")


def _check_writable(model_dir):
    try:
        tf.io.gfile.makedirs(model_dir)
        if "://" not in model_dir:
            with tempfile.TemporaryFile(dir=model_dir):
                return
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"--model_dir={model_dir} cannot be written to ({reason}): choose another") from error


# ------------------------------------------------------------------------------------------------------------- run


def run(config, eval_split_given):
    """Does what `config` says. Raises `UserError` for what the user can mend.

    Args:
      config: settings as given.
      eval_split_given: whether `eval_split` was set, so that it must exist.
    """
    elapsed = progress.stopwatch()
    devices.check_hosts(config)
    strategy = devices.make_strategy(config)
    source = data.open_source(config.dataset, config.data_dir)
    config = complete(config, source, eval_split_given)
    check(config, source, strategy)
    if config.label_fraction < 1:
        source.restrict(config.train_split, config.label_fraction, config.label_seed)
        train.check_batch(config, source, strategy)
    try:
        check_agreement(config, source, strategy)
        _run(config, source, strategy, elapsed)
        # Whoever leaves is missed: nobody does before all are done.
        devices.gather_from_hosts([0], strategy)
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if devices.count_hosts() == 1:
            raise
        raise UserError("another host has stopped or cannot be reached any more: see what it says, then start all "
                        "hosts anew; they resume from the newest checkpoint") from error


def _run(config, source, strategy, elapsed):
    """What `run` does once all is checked."""
    chief = devices.is_chief(strategy)
    if config.mode == "eval" and config.checkpoint and checkpoint.latest(config.model_dir) is None:
        results = evaluate.evaluate_start(config, source, strategy, chief)
        if chief:
            rows = [*evaluate.result_rows(results), None,
                    ("results", os.path.join(evaluate.results_dir(config), "result.json"))]
            progress.say(progress.table(f"{config.network_name} on {source.name}", rows))
        return
    if config.mode == "eval":
        evaluate.evaluate_continuously(config, source, strategy, chief)
        return
    trained = train.train(config, source, strategy, chief)
    results = {}
    if config.mode == "train_then_eval":
        results = evaluate.evaluate_and_write(config, source, trained.model, strategy, trained.step, chief)
    if chief:
        saved_model = export.export_to_model_dir(config, source.class_names, trained.checkpoint, results)
        progress.say(_summary(config, source, trained, results, saved_model, elapsed()))


def _summary(config, source, trained, results, saved_model, seconds):
    """The table at the end of a run."""
    rows = evaluate.result_rows(results)
    rows += [None] if rows else []
    rows += [("steps", trained.step), ("time", progress.duration(seconds))]
    rows += [("images/s", f"{trained.images_per_second:.0f}")] if trained.images_per_second else []
    rows += [("skipped steps (overflow)", trained.skipped_steps)] if trained.skipped_steps else []
    rows += [("checkpoint", trained.checkpoint), ("SavedModel", saved_model)]
    rows += [("results", os.path.join(evaluate.results_dir(config), "result.json"))] if results else []
    rows += [("flags, views, events", config.model_dir)]
    return progress.table(f"{config.network_name} on {source.name}", rows)
