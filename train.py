"""Training: the outer loop around the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

import checkpoint
import data
import metrics
import model as model_lib
import progress
from config import UserError
from train_step import TrainStep

_SECONDS_PER_CALL = 1.0  # aim of one call to the device: long enough to hide the host, short enough to watch
_STEPS_PER_CALL_OF_HOSTS = 20
_PREVIEW_PAIRS = 8
_PREVIEW_PIXELS = 96  # least side length of one view in the preview


def make_run_steps(train_step):
    """Makes a function that takes several steps on the device: iterator, number of steps -> means of the metrics."""
    @tf.function
    def run_steps(iterator, steps):
        totals = tf.zeros([len(train_step.metric_names)])
        for _ in tf.range(steps):
            totals += train_step(next(iterator))
        return totals / tf.cast(steps, tf.float32)

    return run_steps


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training leaves behind."""

    model: object
    step: int
    checkpoint: str  # prefix of the last one
    images_per_second: float  # mean rate, without compilation and saving; 0 if nothing was left to train
    skipped_steps: int  # left out because gradients overflowed in float16, counted since the last resumption


class _Pace:
    """How many steps to hand to the device at once."""

    def __init__(self, fixed=None):
        """`fixed`: steps of every call; several hosts must take as many each, whatever their clocks say."""
        self._fixed = fixed
        self._seconds_per_step = None
        self.calls = 0

    def steps(self, most):
        """Steps of the next call: one at first, since it compiles, and then about `_SECONDS_PER_CALL`."""
        if self._fixed:
            return min(self._fixed, most)
        if self._seconds_per_step is None:
            return 1
        return int(np.clip(_SECONDS_PER_CALL / max(self._seconds_per_step, 1e-6), 1, most))

    def record(self, steps, seconds):
        """Notes how long a call took."""
        self.calls += 1
        if self.calls > 1:
            self._seconds_per_step = seconds / steps


def check_batch(config, source, strategy):
    """Batch sizes against data set and replicas. Raises `UserError`."""
    replicas = strategy.num_replicas_in_sync
    for flag in ("train_batch_size", "eval_batch_size"):
        size = getattr(config, flag)
        if size % replicas:
            nearest = max(round(size / replicas), 1) * replicas
            raise UserError(f"--{flag}={size} does not divide among {replicas} replicas: use {nearest}")
    if config.micro_batch_size % replicas:
        raise UserError(f"--micro_batch_size={config.micro_batch_size} does not divide among {replicas} replicas: it "
                        f"must be a multiple of {replicas} that divides --train_batch_size={config.train_batch_size}")
    examples = source.num_examples(config.train_split)
    if config.mode != "eval" and config.train_batch_size > examples:
        raise UserError(f"--train_batch_size={config.train_batch_size} is larger than the {examples} examples of "
                        f"--train_split={config.train_split}: use at most {examples // replicas * replicas}")


def build_training_state(config, source, strategy, directory):
    """A fresh or resumed `TrainingState`; says what was loaded."""
    with strategy.scope():
        keras.utils.set_random_seed(config.seed + 1)  # tf.data cannot take 0 beside a seed that is a tensor.
        model = model_lib.build_model(config, source.num_classes)
        if not config.pretraining:
            model.freeze(config.fine_tune_after_block)
        schedule = model_lib.build_schedule(config, source.num_examples(config.train_split))
        optimizer = model_lib.build_optimizer(config, schedule, model)
        state = checkpoint.TrainingState(model, optimizer, directory, config.keep_checkpoint_max)
        newest = checkpoint.latest(config.model_dir)
        if newest is not None:
            state.resume(newest)
            progress.say(f"resumed at step {state.step} from {newest}")
        else:
            _start_weights(config, model)
    return state


def _start_weights(config, model):
    """What a new run starts from: `--checkpoint`, a linear head of zeros."""
    if config.checkpoint:
        for line in checkpoint.warm_start(model, config.checkpoint):
            progress.say(line)
    if config.zero_init_logits_layer:
        for variable in model.supervised_head.variables:
            variable.assign(tf.zeros_like(variable))


def write_preview(config, source, directory, writer):
    """Writes a grid of augmented views, an image a column, to views.png and to TensorBoard."""
    pairs = min(_PREVIEW_PAIRS, source.num_examples(config.train_split))
    views, _ = next(iter(data.build_view_pairs(config, source, config.train_split, config.seed, pairs)))
    if config.distorts_views:
        images = model_lib.blurred_views(views, config, config.seed, 0)
    else:
        images = views
    enlarged = -(-_PREVIEW_PIXELS // config.image_size)
    images = tf.repeat(tf.repeat(images, enlarged, axis=1), enlarged, axis=2)
    images = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]], constant_values=1.0)
    rows = tf.split(images, images.shape[0] // pairs)
    grid = tf.concat([tf.concat(tf.unstack(row), axis=1) for row in rows], axis=0)
    grid = tf.image.convert_image_dtype(grid, tf.uint8, saturate=True)
    tf.io.write_file(os.path.join(directory, "views.png"), tf.io.encode_png(grid))
    with writer.as_default(step=0):
        tf.summary.image("views", grid[tf.newaxis])


def train(config, source, strategy, is_chief) -> Trained:
    """Trains to the last step, from the newest checkpoint of `config.model_dir` if there is one.

    Args:
      config: settings, with `seed` and `model_dir` filled in.
      source: the data set.
      strategy: that of this process.
      is_chief: whether this process's files are to remain.
    """
    steps = model_lib.count_steps(config, source.num_examples(config.train_split))
    # All hosts must take part in saving; what the others write goes with them.
    with tempfile.TemporaryDirectory() as scratch:
        directory = config.model_dir if is_chief else scratch
        state = build_training_state(config, source, strategy, directory)
        # Not before: settings that do not fit the run in this directory must not replace its own.
        metrics.write_json(os.path.join(directory, "flags.json"), dataclasses.asdict(config))
        metrics.write_json(os.path.join(directory, "classes.json"), source.class_names)
        writer = tf.summary.create_file_writer(os.path.join(directory, "train"))
        if state.step == 0 and is_chief:
            write_preview(config, source, directory, writer)
        return _run(config, source, strategy, is_chief, steps, state, writer)


@contextlib.contextmanager
def _profile(directory, first, last, is_chief):
    """Writes a TensorBoard profile of what is done within it, the steps `first` to `last`; the chief says where."""
    with tf.profiler.experimental.Profile(directory):
        yield
    if is_chief:
        progress.say(f"profile of steps {first} to {last}: {directory}/plugins/profile (tensorboard --logdir "
                     f"{directory})")


def _run(config, source, strategy, is_chief, steps, state, writer):
    """The outer loop: run some steps, log, and save whenever a checkpoint is due."""
    several_hosts = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    pace, bag = _Pace(_STEPS_PER_CALL_OF_HOSTS if several_hosts else None), metrics.MetricBag()
    bar = progress.Progress(state.step, steps.train, config.train_batch_size, config.log_seconds, is_chief)
    prefix, logged = checkpoint.latest(config.model_dir), time.monotonic()
    if state.step < steps.train:
        run_steps, iterator, names = _prepare(config, source, strategy, state)
    step, skipped = state.step, 0.0
    to_profile = min(config.profile_steps, steps.checkpoint, steps.train - step - 1)
    while step < steps.train:
        due = min(steps.train, step + steps.checkpoint - step % steps.checkpoint)
        count, profiled = pace.steps(due - step), contextlib.nullcontext()
        if pace.calls and 0 < to_profile <= due - step:
            count, to_profile = to_profile, 0
            profiled = _profile(os.path.join(state.directory, "train"), step + 1, step + count, is_chief)
        watch = progress.stopwatch()
        with profiled:
            means = dict(zip(names, run_steps(iterator, tf.constant(count)).numpy().tolist()))
        step += count
        skipped += count * means.get("train/skipped_steps", 0.0)
        bar.update(step, watch(), means, timed=pace.calls > 0)
        pace.record(count, watch())
        bag.add(means, count)
        if step == due or time.monotonic() - logged > config.log_seconds:
            metrics.write_scalars(writer, step, bag.means())
            bag.clear()
            logged = time.monotonic()
        if step == due:
            prefix = state.save()
    bar.close()
    return Trained(state.model, step, prefix, bar.images_per_second, round(skipped))


def _prepare(config, source, strategy, state):
    """The function that takes steps, the data from the present step on, and the names of the metrics."""
    train_step = TrainStep(model=state.model, optimizer=state.optimizer, config=config,
                           num_classes=source.num_classes, seed=config.seed, strategy=strategy)
    batch = config.train_batch_size // strategy.num_replicas_in_sync
    dataset = data.distribute(strategy, lambda context, _: data.build_train_dataset(
        config, source, config.seed, batch, state.step, context))
    return make_run_steps(train_step), iter(dataset), train_step.metric_names
