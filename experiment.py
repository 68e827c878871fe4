"""One run from settings to summary: strategy, data set, checks, and dispatch by mode."""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
import warnings

import absl.logging
import tensorflow as tf

import checkpoint
import data
import evaluate
import export
import metrics
import progress
import train
from config import UserError

_TPU_PORT, _TPU_SECONDS = 8470, 30
_BFLOAT16_CAPABILITY = (8, 0)  # Nvidia's Ampere

# Deprecations inside the libraries are not for the user to mend.
tf.get_logger().setLevel("ERROR")
absl.logging.set_verbosity(absl.logging.ERROR)
warnings.filterwarnings("ignore", module="tensorflow|tf_keras|tensorflow_datasets")
if "TF_CONFIG" not in os.environ:  # With several hosts, collective operations must be set up before the runtime starts.
    tf.config.list_logical_devices()

# ------------------------------------------------------------------------------------------------------- strategy


def make_strategy(config):
    """Where to compute: a TPU, several hosts (TF_CONFIG), several GPUs, or one device. Raises `UserError`."""
    if config.use_tpu:
        return _tpu_strategy(config)
    if count_hosts() > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def count_hosts():
    """Number of training hosts that TF_CONFIG names. Raises `UserError` if it cannot be read."""
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        cluster = json.loads(text).get("cluster", {})
        return max(sum(len(cluster.get(task, [])) for task in ("chief", "worker")), 1)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"TF_CONFIG={text[:80]} is not the JSON that TensorFlow asks for ({error}): see README, "
                        "'Several devices'") from error


def _tpu_strategy(config):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=config.tpu_address, zone=config.tpu_zone, project=config.gcp_project)
        _check_reachable(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:  # The resolver asks Google's services, which fail in many ways; the remedy is the same.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise UserError(f"--use_tpu: no TPU could be reached ({reason}); check --tpu_name, or leave --use_tpu out") \
            from error
    return tf.distribute.TPUStrategy(resolver)


def _check_reachable(address):
    """Raises OSError if nobody answers at grpc://host:port, where TensorFlow would wait for ever."""
    if address.startswith("grpc://"):
        host, _, port = address[len("grpc://"):].partition(":")
        socket.create_connection((host, int(port or _TPU_PORT)), timeout=_TPU_SECONDS).close()


def is_chief(strategy):
    """Whether this process's files are those that remain."""
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_type in (None, "", "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and not resolver.task_id and not has_chief


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
    if config.seed is None and count_hosts() > 1:
        raise UserError("--seed must be given with several hosts, the same for all: add --seed=1")
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
    _check_precision(config)
    if config.mode != "eval":
        _check_start(config)
        _check_writable(config.model_dir)


def _check_precision(config):
    """Whether the GPUs, if there are any, know the arithmetic that is asked for."""
    if config.precision != "mixed_bfloat16" or config.use_tpu:
        return
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", _BFLOAT16_CAPABILITY) < _BFLOAT16_CAPABILITY:
            raise UserError(f"--precision=mixed_bfloat16: {details.get('device_name', 'a GPU')} does not know "
                            "bfloat16 (compute capability 8.0 does): use mixed_float16 or float32")


def _check_unlabelled(config, source):
    remedy = "sort its images into one sub-folder a class"
    if not config.pretraining:
        raise UserError(f"--train_mode=finetune needs labels, and --dataset={source.name} has none: {remedy}")
    if config.mode != "train" and {"lbfgs", "knn"} & set(evaluate.protocols(config, source)):
        raise UserError(f"--eval_protocol={config.eval_protocol} needs labels, and {source.name} has none: {remedy}, "
                        "or use --eval_protocol=contrastive")


def _check_start(config):
    """A new run has what it starts from."""
    if checkpoint.latest(config.model_dir) is not None:
        return
    if config.checkpoint:
        checkpoint.resolve(config.checkpoint)
    elif not config.pretraining:
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
    strategy = make_strategy(config)
    source = data.open_source(config.dataset, config.data_dir)
    config = complete(config, source, eval_split_given)
    check(config, source, strategy)
    chief = is_chief(strategy)
    if config.mode == "eval":
        evaluate.evaluate_continuously(config, source, strategy, chief)
        return
    trained = train.train(config, source, strategy, chief)
    results = {}
    if config.mode == "train_then_eval":
        results = evaluate.evaluate_and_write(config, source, trained.model, strategy, trained.step, chief)
    if chief:
        saved_model = export.export_to_model_dir(config, source.num_classes, trained.checkpoint)
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
