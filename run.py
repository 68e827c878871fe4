"""Pretrains, fine-tunes, evaluates and exports SimCLR models. `python run.py --help` lists all flags."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Collection

from runtime import command_line, console, tensorflow_startup

with command_line.reporting_errors("run.py"):
    import config as config_lib

    SETTINGS = config_lib.read_command_line(__doc__, sys.argv[1:]) if __name__ == "__main__" else ()
    tensorflow_startup.start()

import tensorflow as tf

import checks
import evaluate
import model as model_lib
import train
from checkpoints import inspection, lock, run_directory, weight_files
from checkpoints.run_context import RunContext
from export import saving
from inference import gallery
from runtime import devices, progress, signals, workers
from runtime.errors import UserError
from sources import datasets, image_checks
from sources.files import FileSource


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
    elapsed, strategy = progress.stopwatch(), connect(config)
    with signals.StopSignals() as stop, contextlib.ExitStack() as stack:
        context = prepare(config, given, strategy, stop)
        first = _evaluated_first(context.config)
        stack.enter_context(image_checks.naming_unusable(context.source, first))
        if not config.trains:
            evaluate_run(_prepare_source(context))
            return
        if context.is_chief:
            run_lock = stack.enter_context(lock.Lock(context.config.model_dir))
            context = context.replace(lock=run_lock)
        train_and_evaluate(context, elapsed)
        # If one worker exits early, collective operations fail on the others.
        workers.barrier(strategy)


def connect(config: config_lib.Config) -> tf.distribute.Strategy:
    """Waits for the other workers, if any, and returns the distribution strategy."""
    if config.cluster == "slurm":
        workers.use_slurm_cluster()  # All functions below read TF_CONFIG.
    checks.before_connecting(config)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    # Exit this context before TensorFlow connects to other workers and installs its own signal
    # handlers.
    with signals.StopSignals() as stop, stop.interruptible():
        workers.wait_for_workers(devices.has_gpu())
    return devices.make_strategy(
        config.use_tpu, config.tpu_address, config.tpu_zone, config.gcp_project, config.collective
    )


def prepare(
    config: config_lib.Config,
    given: Collection[str],
    strategy: tf.distribute.Strategy,
    stop: signals.StopSignals,
) -> RunContext:
    """Completes the settings, opens the data, and checks both before anything is written."""
    if config.model_dir is None:
        # The name of a new run depends only on the given settings, so the run is found even if its
        # initial checkpoint was deleted.
        named = config
        if not config.trains:
            named, _ = checks.adopt(config, given, inspection.read_recorded(config))
        config = config.replace(model_dir=named.default_model_dir())
        console.log(f"model_dir: {config.model_dir} (the same command resumes this run)")
    if not config.trains:
        # A run that starts from the same --checkpoint may be about to write its settings.
        evaluate.wait_for_run(
            config.model_dir, config.eval_timeout, only_if_locked=config.checkpoint is not None
        )
    recorded = inspection.read_recorded(config)
    config, lines = checks.adopt(config, given, recorded)
    with stop.interruptible():
        source = datasets.open_configured(config, may_prepare="dataset" in given)
    if config.weights_flag == "teacher":
        lines += checks.adopt_classes(config, source, recorded)
    new_seed = random.SystemRandom().randrange(2**31)
    inputs = checks.Inputs(source, given, recorded, new_seed, strategy.num_replicas_in_sync)
    config, more_lines = checks.complete(config, inputs)
    source.conversion = config.conversion  # --white_level=auto is now known.
    console.log_lines(lines + more_lines)
    is_chief = devices.is_chief(strategy)
    context = RunContext(config, source, strategy, is_chief, stop, recorded=recorded)
    checks.check(context)
    return context


def train_and_evaluate(context: RunContext, elapsed: Callable[[], float]) -> None:
    """Trains, with `--mode=train_then_eval` also evaluates, and exports. `elapsed` returns seconds since the start."""
    _prepare_directory(context)
    context = _prepare_source(context)
    # Reports too few labels before training.
    labeled_source = evaluate.select_labels(context.config, context.source)
    signals.safe_point()
    checks.check_agreement(context)
    trained, results = train.train(context), {}
    if context.config.mode == "train_then_eval":
        labeled = context.replace(source=labeled_source)
        results = evaluate.evaluate_and_write(labeled, trained.model, trained.step)
    if context.is_chief:
        _finish(context, trained, results, elapsed())


def _evaluated_first(config: config_lib.Config) -> Callable[[FileSource], list[str]]:
    """Returns a function that lists all images of a source, those of the evaluation split first."""
    splits = [config.eval_split, "all"] if config.evaluates else ["all"]
    return lambda source: [path for split in splits for path in source.labeled_paths(split)[0]]


def _prepare_source(context: RunContext) -> RunContext:
    """Checks all images, restricts the training split according to `--label_fraction`, and logs the inputs.

    Pretraining and distillation use all images. For their evaluation, see `evaluate.select_labels`.
    If distillation uses labels, those outside the fraction are hidden.
    Returns the context with the number of evaluated images that were also used for training.
    """
    config, source = context.config, context.source
    image_checks.check_images(config, source, context.strategy)
    if config.drops_unlabeled and checks.uses_train_split(config):
        source.drop_unlabeled(config.train_split)
    if config.label_fraction < 1 and config.trains_on_labels:
        hide = not config.drops_unlabeled
        source.restrict(config.train_split, config.label_fraction, config.label_seed, hide)
    checks.check_data(context)  # Examples may have been removed.
    context = context.replace(trained_examples=checks.count_trained_examples(context))
    if not context.is_chief:
        return context
    console.log(f"device: {devices.describe(context.strategy)}")
    splits = {}
    if config.trains:
        splits["training"] = config.train_split
    if config.evaluates:
        splits["evaluation"] = config.eval_split
    line = f"data: {source.name}"
    for purpose, split in splits.items():
        line += f", {source.num_examples(split):,} images for {purpose} ({split})"
    line += f", {source.num_classes or 'no'} classes"
    if classes := source.class_counts([*splits.values()][0]):
        line += ": " + console.join_first([f"{name} {count}" for name, count in classes.items()])
    console.log(line)
    for line in checks.advice(context):
        console.log(f"warning: {line}")
    return context


def _prepare_directory(context: RunContext) -> None:
    """Cleans up the run directory, and checks that no other process has started a run in it."""
    model_dir = context.config.model_dir
    if not context.is_chief:
        return
    run_directory.remove_temporary_files(model_dir)
    if run_directory.read_run(model_dir).settings != context.recorded.settings:
        raise UserError(
            f"--model_dir={model_dir}: another process has started a run in this directory. Run the"
            " same command again, or choose another directory."
        )


def evaluate_run(context: RunContext) -> None:
    """Evaluates the weights in `--checkpoint`, or evaluates and exports checkpoints of the run in `--model_dir`.

    Results of weights that are not the run's are written to a sub-directory.
    """
    config, settings = context.config, context.recorded.settings
    if config.checkpoint in (None, settings.get("checkpoint")):
        last_step = config.train_steps
        if not last_step:
            split = settings.get("train_split", config.train_split)
            num_examples = datasets.check_split(context.source, "train_split", split)
            last_step = model_lib.count_steps(config, num_examples).train
        context = context.replace(config=config.replace(checkpoint=None))
        directory = evaluate.results_dir(config)
        export = functools.partial(saving.export_to_model_dir, context.config, directory)
        evaluate.evaluate_checkpoints(context, last_step, export)
        return
    if config.keep_best:
        console.log(
            "--keep_best has no effect, because only the weights in --checkpoint are evaluated"
        )
    file, config = weight_files.open_weights(config.checkpoint), config.replace(keep_best=False)
    has_run = settings or context.recorded.has_checkpoints
    if has_run and not run_directory.contains(config.model_dir, file.path):
        config = config.replace(eval_name=config.eval_name or f"other_{file.digest()[:8]}")
        console.log(
            f"results: {evaluate.results_dir(config)} (the weights in {config.checkpoint} are not"
            f" those of the run in {config.model_dir})"
        )
    evaluate.evaluate_weights(context.replace(config=config))


def _finish(
    context: RunContext, trained: train.TrainingResult, results: dict[str, float], seconds: float
) -> None:
    """Exports the SavedModel, writes the gallery, and logs a summary of the run."""
    config, source, log = context.config, context.source, trained.log
    if results:
        log.add_results(trained.step, results)
    saved_model = saving.export_to_model_dir(
        config, config.model_dir, trained.checkpoint, results, context.check_lock
    )
    gallery_path = None
    if config.mode == "train_then_eval" and isinstance(source, FileSource):
        gallery_path = gallery.write_for_run(
            saved_model,
            source,
            config.train_split,
            config.model_dir,
            config.seed,
            context.check_lock,
        )
    result_file = os.path.join(evaluate.results_dir(config), "result.json")
    rows = {
        "steps": trained.step,
        "time": console.format_duration(seconds),
        "images/s": log.images_per_second and f"{log.images_per_second:.0f}",
        "skipped steps (overflow)": log.skipped_steps,
        "checkpoint": trained.checkpoint,
        "SavedModel": saved_model,
        "results": results and result_file,
        "gallery": gallery_path,
        "run directory": config.model_dir,
    }
    others = {name: value for name, value in rows.items() if value}
    evaluate.log_results(context, f"{config.network_name} on {source.name}", results, others)


if __name__ == "__main__":
    command_line.run_command("run.py", lambda: main(*SETTINGS))
