"""Pretrains, fine-tunes, evaluates and exports SimCLR models. `python run.py --help` lists all flags."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import sys

from runtime import console

if __name__ == "__main__":
    console.set_up()  # Must run before other modules store sys.stderr, which may be closed.

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
        _fail(f"--flagfile: a flag file cannot be read as text ({first_line(error)}). Save it as UTF-8.")
    if warnings.getvalue():  # absl warns only if a flag file includes itself, and then ignores that inclusion.
        _fail(f"--flagfile: {warnings.getvalue().strip()}. Remove the --flagfile line from that file.")
    if rest[1:]:
        _fail(f"{rest[1]!r} is not a flag. Write settings as --name=value.")
    return rest


def _fail(message):
    """Prints a user error and exits with status 2."""
    command_line.exit_with_error("run.py", message)


if __name__ == "__main__":  # --help and flag errors need not wait for TensorFlow to load.
    app.define_help_flags()
    parse_flags(sys.argv)
    command_line.run_command("run.py", config_lib.from_flags)

with command_line.reporting_errors("run.py"), tensorflow_startup.loading_tensorflow():
    import tensorflow as tf

    import evaluate
    import train
    from checkpoints import checkpoint_files, run_directory, weight_files
    from checkpoints.lock import Lock
    from export import saving
    from runtime import devices, hosts, progress, signals
    from sources import datasets, image_checks
    from sources.folders import FolderSource
    from sources.source import Source

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_FEWER_EXAMPLES = "Input dataset was expected to contain"  # error message of `tf.data.experimental.assert_cardinality`

# ---------------------------------------------------------------------------------------------------------- settings


def fill_defaults(config: config_lib.Config, source: Source, eval_split_given: bool) -> config_lib.Config:
    """Fills in defaults for the run directory, evaluation split, linear head and seed, and logs these choices."""
    if config.model_dir is None:
        config = config.replace(model_dir=config.default_model_dir())
        console.log(f"model_dir: {config.model_dir} (the same command resumes this run)")
    eval_split = datasets.choose_eval_split(source, config.eval_split, eval_split_given)
    if eval_split != config.eval_split and config.mode != "train":
        console.log(f"eval_split: {eval_split} ({source.name} has no {config.eval_split} split)")
    config = config.replace(eval_split=eval_split)
    if source.num_classes is None and config.pretraining and config.lineareval_while_pretraining:
        console.log(f"linear head: off ({source.name} has no labels)")
        config = config.replace(lineareval_while_pretraining=False, linear_head_learning_rate=None,
                                zero_init_logits_layer=False)
    if config.seed is None:
        stored = (run_directory.read_flags(config.model_dir) or {}).get("seed")
        if stored is None and config.mode != "eval" and checkpoint_files.list_steps(config.model_dir):
            raise UserError(f"--model_dir={config.model_dir}: the directory contains checkpoints, but no flags.json "
                            "that specifies the seed. Set --seed.")
        # Evaluations use a fixed seed, which makes them repeatable.
        new = 0 if config.mode == "eval" else random.SystemRandom().randrange(2**31)
        config = config.replace(seed=new if stored is None else stored)
    return config


def check(config: config_lib.Config, source: Source, strategy: tf.distribute.Strategy) -> None:
    """Raises `UserError` if the data, replicas or paths do not match the settings. Call this before writing files."""
    _check_data(config, source, strategy)
    if source.num_classes is None:
        _check_unlabeled(config, source)
    if source.multi_label and config.mode != "train" and {"lbfgs", "knn"} & set(evaluate.protocols(config, source)):
        raise UserError(f"--eval_protocol={config.eval_protocol}: lbfgs and knn require one label per example, but "
                        f"{source.name} has multiple labels. Use linear_head, or `python -m transfer linear`.")
    if isinstance(source, FolderSource) and os.path.realpath(source.root) == os.path.realpath(config.model_dir):
        raise UserError(f"--model_dir={config.model_dir}: this directory is also the image folder, so a resumed run "
                        "would use its own views.png as a training image. Choose another directory.")
    devices.check_precision(config.precision, config.use_tpu)
    if config.mode != "eval":
        _check_start(config)
        if devices.is_chief(strategy):
            run_directory.check_writable(config.model_dir)


def _check_data(config, source, strategy):
    """Checks that the splits exist and contain enough examples for the batch sizes."""
    datasets.check_split(source, "train_split", config.train_split)
    if config.mode != "train":
        datasets.check_split(source, "eval_split", config.eval_split)
    train.check_batch(config, source, strategy)


def _check_unlabeled(config, source):
    remedy = "Use a data set with labels (in an image folder, one sub-folder per class)"
    if not config.pretraining:
        raise UserError(f"--train_mode={config.train_mode}: --dataset={source.name} has no labels. {remedy}.")
    if config.mode != "train" and {"lbfgs", "knn"} & set(evaluate.protocols(config, source)):
        raise UserError(f"--eval_protocol={config.eval_protocol}: {source.name} has no labels. {remedy}, or use "
                        "--eval_protocol=contrastive.")


def _check_start(config):
    """Checks that a new run's initial weights exist."""
    if checkpoint_files.list_steps(config.model_dir):
        return
    if config.checkpoint:
        weight_files.locate(config.checkpoint)
    elif config.train_mode == "finetune":
        raise UserError("--train_mode=finetune: there is no pretrained encoder to start from. Set --checkpoint.")


# ------------------------------------------------------------------------------------------------------------- run


def main(config: config_lib.Config, eval_split_given: bool) -> None:
    """Trains, evaluates and exports according to `config`.

    Args:
      config: settings from the command line.
      eval_split_given: whether `--eval_split` was set. If not, the test split may be used instead of the default.

    Raises:
      UserError: the settings, data or files cannot be used.
      errors.Stopped: a signal requested a stop.
    """
    elapsed = progress.stopwatch()
    strategy = connect(config)
    is_chief = devices.is_chief(strategy)
    with signals.StopSignals() as stop, _translate_errors(config):
        with stop.interruptible():
            source = datasets.open_source(config.dataset, config.data_dir, config.follow_links)
        config = fill_defaults(config, source, eval_split_given)
        check(config, source, strategy)
        if config.mode == "eval":
            _prepare_source(config, source, strategy)
            _evaluate(config, source, strategy)
            return
        with Lock(config.model_dir) if is_chief else contextlib.nullcontext() as lock:
            _prepare_directory(config, source, strategy)
            _prepare_source(config, source, strategy)
            signals.safe_point()
            train.check_agreement(config, source, strategy)
            trained, results = train.train(config, source, strategy, stop, lock), {}
            check_lock = (lambda: None) if lock is None else lock.check
            if config.mode == "train_then_eval":
                results = evaluate.evaluate_and_write(
                    config, source, trained.model, strategy, trained.step, is_chief, check=check_lock)
            if is_chief:
                saved_model = saving.export_to_model_dir(
                    config, source.class_names, trained.checkpoint, results, source.multi_label, check_lock)
                console.log(_summary(config, source, trained, results, saved_model, elapsed()))
            hosts.barrier(strategy)  # If one host exits early, collective operations fail on the others.


def connect(config: config_lib.Config) -> tf.distribute.Strategy:
    """Waits for the other hosts, if any, and returns the distribution strategy."""
    hosts.check_multi_host_settings(config.use_tpu, config.mode, config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    # Exit this context before TensorFlow connects to other hosts and installs its own signal handlers.
    with signals.StopSignals() as stop, stop.interruptible():
        hosts.wait_for_hosts()
    return devices.make_strategy(config.use_tpu, config.tpu_address, config.tpu_zone, config.gcp_project)


@contextlib.contextmanager
def _translate_errors(config):
    """Translates data, host, memory and file errors that occur during a run into `UserError` or `Stopped`."""
    again = "run the same command again to resume from the newest checkpoint"
    try:
        yield
    except (tf.errors.OpError, OSError, MemoryError) as error:
        reason = first_line(error)
        # Check for a full disk and exhausted memory first, since both can also occur while data is read.
        if _is_full_disk(error):
            raise UserError(f"--model_dir={config.model_dir}: a disk is full ({reason}). Free some space, and {again}."
                            ) from error
        if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)) or "OOM when allocating" in str(error):
            flag = "eval_batch_size" if config.mode == "eval" else "train_batch_size"
            remedy = f"a smaller --{flag}" if config.mode == "eval" else f"--micro_batch_size, or a smaller --{flag}"
            raise UserError(f"--{flag}={getattr(config, flag)}: out of memory ({reason}). Use {remedy}.") from error
        if "IteratorGetNext" in str(error) or isinstance(error, tf.errors.DataLossError) or (
                isinstance(error, tf.errors.FailedPreconditionError) and _FEWER_EXAMPLES in str(error)):
            raise UserError(f"--dataset={config.dataset}: the data can no longer be read ({reason}). Repair or restore "
                            f"it, and {again}.") from error
        if hosts.is_lost_host(error):
            raise Stopped("another host has stopped or is unreachable. Check its output, then run the same command "
                          "again on all hosts to resume from the newest checkpoint.") from error
        if isinstance(error, (OSError, tf.errors.PermissionDeniedError, tf.errors.NotFoundError)):
            raise UserError(f"--model_dir={config.model_dir}: a file can no longer be read or written ({reason}). Fix "
                            f"the cause, and {again}.") from error
        raise


def _is_full_disk(error):
    """Returns whether an error means that a disk is full or a quota is exceeded."""
    if isinstance(error, OSError):
        return error.errno in _FULL_DISK
    # TensorFlow raises the same exception class, without errno, for a full disk and for exhausted memory. Only the
    # operating system's message differs.
    return isinstance(error, tf.errors.ResourceExhaustedError) and any(
        os.strerror(code) in str(error) for code in _FULL_DISK)


def _prepare_source(config, source, strategy):
    """Checks all images, and restricts the training split according to `--label_fraction`."""
    image_checks.check_images(config, source, devices.is_chief(strategy))
    if config.label_fraction < 1:
        source.restrict(config.train_split, config.label_fraction, config.label_seed)
    _check_data(config, source, strategy)  # Check again, since fewer examples may remain.


def _evaluate(config, source, strategy):
    """Evaluates the weights in `--checkpoint`, or every checkpoint of the run in `--model_dir`."""
    is_chief = devices.is_chief(strategy)
    initial_checkpoint = (run_directory.read_flags(config.model_dir) or {}).get("checkpoint")
    if not config.checkpoint or config.checkpoint == initial_checkpoint:
        evaluate.evaluate_continuously(config, source, strategy, is_chief)
        return
    results = evaluate.evaluate_checkpoint(config, source, strategy, is_chief)
    if is_chief:
        rows = [*evaluate.result_rows(results), None,
                ("results", os.path.join(evaluate.results_dir(config), "result.json"))]
        console.log(console.format_table(f"{config.network_name} on {source.name}", rows))


def _prepare_directory(config, source, strategy):
    """Repairs the run directory and checks that a run with these settings can be resumed or started in it."""
    if devices.is_chief(strategy):
        run_directory.remove_temporary_files(config.model_dir)
        checkpoint_files.repair(config.model_dir)
    hosts.barrier(strategy)  # The other hosts must not read the checkpoints before the repair.
    if checkpoint_files.latest_checkpoint(config.model_dir) is not None:
        run_directory.check_flags(config)
        run_directory.check_data(config, source)
    else:
        run_directory.check_no_user_files(config.model_dir)


def _summary(config, source, trained, results, saved_model, seconds):
    """Returns the table to print at the end of a run."""
    rows = evaluate.result_rows(results)
    rows += [None] if rows else []
    rows += [("steps", trained.step), ("time", console.format_duration(seconds))]
    rows += [("images/s", f"{trained.images_per_second:.0f}")] if trained.images_per_second else []
    rows += [("skipped steps (overflow)", trained.skipped_steps)] if trained.skipped_steps else []
    rows += [("checkpoint", trained.checkpoint), ("SavedModel", saved_model)]
    rows += [("results", os.path.join(evaluate.results_dir(config), "result.json"))] if results else []
    rows += [("run directory", config.model_dir)]
    return console.format_table(f"{config.network_name} on {source.name}", rows)


def run_from_flags(argv: list[str]) -> None:
    """Calls `main` with the parsed flags, and reports errors as one-line messages."""
    del argv
    with command_line.reporting_errors("run.py"):
        config = config_lib.from_flags()
        with tensorflow_startup.loading_tensorflow():
            devices.start_runtime(config.use_tpu)
        main(config, eval_split_given=flags.FLAGS["eval_split"].present > 0)


if __name__ == "__main__":
    app.run(run_from_flags, flags_parser=parse_flags)
