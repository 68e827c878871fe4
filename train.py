"""Training step and training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable

import tensorflow as tf
import tf_keras as keras

import data
import evaluate
import metrics
import model as model_lib
import simclr
from checkpoints import checkpoint_files, inspection, restoring, run_directory, weight_files
from checkpoints.run_directory import Recorded, RunContext
from checkpoints.training_log import TrainingLog
from checkpoints.training_state import TrainingState
from config import Config
from large_batch import micro_batches
from runtime import console, devices, progress, replicas, storage, workers
from runtime.errors import TrainingDiverged, UserError, first_line
from sources import image_checks
from sources.source import Source

# This hides the overhead of device calls, but is short enough to show progress.
_SECONDS_PER_CALL = 1.0
_TPU_CALLS = 10.0  # Calls of a TPU, which may be on another machine, take this many times as long.
_PREVIEW_EXAMPLES = 8
_PREVIEW_PIXELS = 96  # minimum side length of a view in the preview
_MIN_LOSS_SCALE = 1.0  # Keras's LossScaleOptimizer does not reduce the loss scale below this value.


# ------------------------------------------------------------------------------------------------------- step


class TrainStep:
    """Training step on one replica's share of a batch (paper, Algorithm 1).

    Call the step in replica context, inside a `tf.function`. `simclr` defines the views and the
    terms of the loss; this class differentiates their sum and updates the variables.
    """

    def __init__(
        self,
        model: model_lib.Model,
        optimizer: keras.optimizers.legacy.Optimizer,
        config: Config,
        strategy: tf.distribute.Strategy,
        teacher: model_lib.Model | None = None,
    ):
        """Creates the step.

        Args:
          model: a built model.
          optimizer: created by `model.build_optimizer`; its `iterations` variable counts the steps.
          config: settings with `seed` set.
          strategy: the strategy whose replicas share a batch.
          teacher: see `simclr.per_image`.
        """
        self.model, self.optimizer, self.config, self.strategy = model, optimizer, config, strategy
        self.teacher = teacher
        # number of images in a batch on this replica
        self.rows = config.train_batch_size // strategy.num_replicas_in_sync

    # AutoGraph is slow, and this method does not need it.
    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, images: tuple[tf.Tensor, ...], labels: tf.Tensor, seeds: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Runs the step.

        Args:
          images: for each view, [n, h, w, 3] in [0, 1]; see `simclr.views`.
          labels: int [n], or [n, classes] with values 1, 0 and -1 (unknown).
          seeds: int [n, 2], the seeds of the examples; only with `--augment_on=device`.

        Returns:
          See `update`.
        """
        images = self.views(images, seeds)
        with tf.GradientTape() as tape:
            h, z, terms, metrics = self.per_image(images, labels)
            batch_terms, batch_metrics = self.over_batch(h, z, labels)
            terms, metrics = {**batch_terms, **terms}, {**batch_metrics, **metrics}
            loss = self.replica_loss(terms)
        gradients = tape.gradient(
            loss, self.model.trainable_variables, unconnected_gradients="zero"
        )
        return self.update(gradients, terms, metrics)

    def views(
        self, images: tuple[tf.Tensor, ...], seeds: tf.Tensor | None = None, first_row: int = 0
    ) -> list[tf.Tensor]:
        """Calls `simclr.views`. `first_row` is the row of the first image in this replica's batch."""
        first_row += replicas.row_offset(self.rows, self.strategy)
        return simclr.views(images, self.config, self.optimizer.iterations, seeds, first_row)

    def per_image(self, images: list[tf.Tensor], labels: tf.Tensor) -> tuple:
        """Calls `simclr.per_image`."""
        return simclr.per_image(self.model, images, labels, self.config, self.teacher)

    def over_batch(self, h: tf.Tensor, z: tf.Tensor, labels: tf.Tensor) -> tuple:
        """Calls `simclr.over_batch`."""
        return simclr.over_batch(h, z, labels, self.config, self.strategy)

    def replica_loss(self, terms: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the loss that this replica differentiates: the sum of the terms.

        The loss is divided by the number of replicas, because gradients are summed over replicas.
        With float16, the loss is also multiplied by the loss scale.
        """
        loss = add(terms.values()) / self.strategy.num_replicas_in_sync
        return self.optimizer.get_scaled_loss(loss) if scales_loss(self.config) else loss

    def update(
        self, gradients: list[tf.Tensor], terms: dict[str, tf.Tensor], metrics: dict[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Adds the weight decay, and updates the variables.

        Args:
          gradients: gradients of `replica_loss` with respect to the trainable variables.
          terms: scalars that add up to the loss, without the weight decay.
          metrics: other scalars to report.

        Returns:
          A dict of float32 scalars, averaged over the replicas. `is_finite` is 1 if losses and
          gradients are finite on all replicas. A step skipped because of float16 gradient overflow
          counts as finite as long as the loss scale can still be reduced.
        """
        variables, optimizer, config = self.model.trainable_variables, self.optimizer, self.config
        with tf.GradientTape() as tape:
            decay = model_lib.add_weight_decay(self.model, config.weight_decay, config.optimizer)
            decay_loss = self.replica_loss({"weight_decay": decay})
        gradients = [
            gradient if decay_gradient is None else gradient + decay_gradient
            for gradient, decay_gradient in zip(gradients, tape.gradient(decay_loss, variables))
        ]
        if scales_loss(config):
            gradients = optimizer.get_unscaled_gradients(gradients)
        terms = {**terms, "weight_decay": decay}
        scalars = {**terms, **metrics, "total_loss": add(terms.values())}
        learning_rate = optimizer.learning_rate(optimizer.iterations)
        is_finite = all_finite([*terms.values(), *gradients])
        scale = tf.identity(optimizer.loss_scale) if scales_loss(config) else None
        with tf.control_dependencies([] if scale is None else [scale]):
            update = optimizer.apply_gradients(zip(gradients, variables))
        if scale is not None:
            with tf.control_dependencies([update]):
                # A skipped step resets Keras's counter of consecutive steps with finite gradients,
                # without increasing the loss scale.
                is_skipped = tf.equal(optimizer.dynamic_counter, 0) & (
                    optimizer.loss_scale <= scale
                )
            scalars.update(loss_scale=scale, skipped_steps=is_skipped)
            is_finite |= all_finite([*terms.values()]) & is_skipped & (scale > _MIN_LOSS_SCALE)
        scalars = {f"train/{name}": value for name, value in scalars.items()}
        scalars.update(learning_rate=learning_rate, is_finite=is_finite)
        return replicas.mean(
            {name: tf.cast(value, tf.float32) for name, value in scalars.items()}, self.strategy
        )

    def compiled(self, function: Callable) -> Callable:
        """Returns `function`, which `strategy.run` receives. XLA compiles the result; see `devices.compiles_step`."""
        if not devices.compiles_step(self.config.jit_compile, self.strategy):
            return function
        return tf.function(function, jit_compile=True, autograph=False)


def scales_loss(config: Config) -> bool:
    """Returns whether the loss is scaled to keep float16 gradients from underflowing."""
    return config.precision == "mixed_float16"


def add(terms: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars, in float64 if any of them is float64, otherwise in float32."""
    terms = [tf.zeros([]), *terms]
    dtype = tf.float64 if any(term.dtype == tf.float64 for term in terms) else tf.float32
    return tf.add_n([tf.cast(term, dtype) for term in terms])


@replicas.compiled_on_gpus
def all_finite(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns whether all elements of all tensors are finite, as a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


_all_finite = tf.function(all_finite, autograph=False)


def make_run_steps(step: TrainStep) -> Callable:
    """Builds a function that runs multiple steps per device call.

    Args:
      step: the training step of one replica.

    Returns:
      A function that takes an iterator over distributed batches and a number of steps, and returns
      the means of the scalars, whose names are those that the step returns, and the number of steps
      before the first non-finite step.
    """
    strategy, compiled = step.strategy, step.compiled(step)
    scalar_sum = micro_batches.ScalarSum(tf.float32)

    def one_step(batch):
        if step.config.micro_batch_size:
            results = micro_batches.train_step(step, batch, step.per_image, step.over_batch)
        else:
            results = strategy.run(compiled, args=batch)
        # All replicas return the same scalars.
        scalars = {
            name: strategy.experimental_local_results(value)[0] for name, value in results.items()
        }
        is_finite = scalars.pop("is_finite") == 1
        return scalar_sum.pack(scalars), is_finite

    @tf.function(autograph=False)
    def run_steps(batches, steps):
        def add_step(index, total, num_finite_steps):
            scalars, is_finite = one_step(next(batches))
            num_finite_steps += tf.cast(is_finite & (num_finite_steps == index), tf.int32)
            return index + 1, total + scalars, num_finite_steps

        _, total, num_finite_steps = tf.while_loop(
            lambda index, *_: index < steps,
            add_step,
            (0, scalar_sum.zeros(), 0),
            parallel_iterations=1,  # If an image cannot be read, all earlier steps are complete.
        )
        return total / tf.cast(steps, tf.float32), num_finite_steps

    def run(batches, steps):
        means, num_finite_steps = run_steps(batches, steps)
        return scalar_sum.unpack(means.numpy().tolist()), num_finite_steps

    return run


# ------------------------------------------------------------------------------------------------------- loop


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of `train`.

    Attributes:
      model: the trained model.
      step: number of completed steps.
      checkpoint: prefix of the last checkpoint.
      log: the log of the run.
    """

    model: model_lib.Model
    step: int
    checkpoint: str
    log: TrainingLog


class _StepsPerCall:
    """Number of steps per device call: 1 until the speed is known, and then as many as fit into about one second.

    On TPUs, a call takes up to ten seconds.
    """

    def __init__(self, use_tpu: bool):
        self._seconds = _SECONDS_PER_CALL * (_TPU_CALLS if use_tpu else 1)
        self._seconds_per_step: float | None = None
        self.count = 1
        self.is_compiled = False

    def record(self, steps: int, seconds: float) -> None:
        """Records the duration of a call."""
        if self.is_compiled:
            self._seconds_per_step = seconds / steps
        self.is_compiled = True

    def agree(self, stop: bool, strategy: tf.distribute.Strategy) -> bool:
        """Agrees with the other workers on how many steps to run next. Returns whether `stop` is true on any worker."""
        proposal = (
            1
            if self._seconds_per_step is None
            else max(int(self._seconds / self._seconds_per_step), 1)
        )
        stops, proposals = workers.gather_integers([int(stop), proposal], strategy).T
        self.count = int(proposals.min())
        return bool(stops.any())


def build_training_state(context: RunContext, directory: str) -> TrainingState:
    """Builds the `TrainingState` of a new or resumed run, and logs which weights were loaded."""
    config, source = context.config, context.source
    with context.strategy.scope():
        # tf.data rejects seed tensors if the global seed is 0.
        keras.utils.set_random_seed(config.seed + 1)
        model = model_lib.build_model(config, source.num_classes)
        if not config.pretraining:
            model.freeze(config.fine_tune_after_block)
        num_examples = source.num_examples(config.train_split)
        schedule = model_lib.build_schedule(config, num_examples)
        optimizer = model_lib.build_optimizer(config, schedule, model)
        state = TrainingState(model, optimizer, directory, config.keep_checkpoint_max)
        restored = state.restore_newest(config.model_dir, context.strategy)
        if restored is not None:
            is_finished = state.step >= model_lib.count_steps(config, num_examples).train
            flag = "train_steps" if config.train_steps else "train_epochs"
            hint = f"; the run is finished (to train longer, increase --{flag})"
            console.log(f"resumed at step {state.step} from {restored}{hint * is_finished}")
            state.initial_weights = context.recorded.initial_weights
        else:
            state.initial_weights = _initialize_weights(context, model)
    return state


def _initialize_weights(context: RunContext, model: model_lib.Model) -> dict | None:
    """Loads the weights from `--checkpoint` into a new run's model, and zeros the linear head if requested.

    Returns:
      The path and the digest of the loaded weights. A run that was stopped before its first
      checkpoint starts from the same weights again, even if `--checkpoint` is a directory with newer
      ones.
    """
    config, recorded, initial_weights = context.config, context.recorded, None
    if config.checkpoint:
        path = _weights_path(config, recorded)
        required = (
            ("encoder", "projection head")
            if not config.pretraining and config.linear_head_on_projections
            else ("encoder",)
        )
        loaded = restoring.warm_start(model, path, required, context.source.class_names)
        initial_weights = _describe_weights(loaded.file)
        console.log_lines(loaded.lines)
        if not (
            config.pretraining
            or config.zero_init_logits_layer
            or "linear head" in loaded.not_loaded
        ):
            console.log(
                "classifier: initialized from the checkpoint's linear head, which was trained with"
                " labels; pass --zero_init_logits_layer to start from zeros instead"
            )
    if config.zero_init_logits_layer:
        for variable in model.supervised_head.variables:
            variable.assign(tf.zeros_like(variable))
    return initial_weights


def load_teacher(context: RunContext) -> tuple[model_lib.Model, dict]:
    """Loads the network in `--teacher`. Also returns its description for `Recorded.initial_weights`."""
    config = context.config
    path = _weights_path(config, context.recorded)
    with context.strategy.scope():
        model, info = restoring.open_network(path, flag="--teacher", precision=config.precision)
    console.log(f"teacher: {info.config.network_name} from {info.file.path}")
    return model, _describe_weights(info.file)


def _describe_weights(file: weight_files.WeightFile) -> dict:
    """Returns the value of `Recorded.initial_weights` for the weights in `file`."""
    origin = inspection.read_origin(file)
    names = ("trained_on", "train_split")
    return dict(
        path=file.location, digest=file.digest(), **{name: origin.get(name) for name in names}
    )


def _weights_path(config: Config, recorded: Recorded) -> str:
    """Returns the path of the weights that a run uses, which are those of its first start."""
    weights, flag = recorded.initial_weights, config.weights_flag
    is_same = recorded.settings.get(flag) == config.weights and not config.allow_flag_changes
    if weights is None or not is_same:
        return config.weights
    for path in (config.weights, weights["path"]):
        with contextlib.suppress(UserError):
            file = weight_files.open_weights(path)
            if file.digest() == weights["digest"]:
                return file.location
    raise UserError(
        f"--{flag}={config.weights}: the weights that the run in {config.model_dir} uses"
        f" ({weights['path']}) have changed or were deleted. Restore them, choose another"
        " --model_dir, or accept the change with --allow_flag_changes."
    )


def _log_header(
    config: Config,
    model: model_lib.Model,
    steps: model_lib.Steps,
    num_examples: int,
    directory: str,
    strategy: tf.distribute.Strategy,
) -> None:
    """Logs the network and the schedule of a run that is about to train."""
    weights = sum(variable.shape.num_elements() for variable in model.trainable_variables) / 1e6
    micro_batches = (
        f" in micro-batches of {config.micro_batch_size}" if config.micro_batch_size else ""
    )
    console.log(
        f"network: {config.network_name}, {weights:.1f} million trainable parameters,"
        f" {config.image_size} x {config.image_size} pixels, batch size"
        f" {config.train_batch_size}{micro_batches}"
    )
    peak = model_lib.build_schedule(config, num_examples).peak
    console.log(
        f"training: {steps.train} steps"
        f" ({steps.train * config.train_batch_size / num_examples:.3g} epochs), learning rate"
        f" {peak:.3g} after {steps.warmup} warm-up steps; examples: {directory}/views.png"
    )
    total = model.count_params()
    # A checkpoint also contains the optimizer's values for each trainable weight.
    slots = weights * 1e6 * (2 if config.optimizer == "adam" else 1)
    count = min(config.keep_checkpoint_max, math.ceil(steps.train / steps.checkpoint))
    size = 4e-9 * (count * (total + slots) + (1 + config.keep_best) * total)
    console.log(f"disk space: {size:.1f} GB for the SavedModel and checkpoints ({count})")
    if config.mode == "train" and not config.eval_epochs:
        console.log("nothing will be evaluated; --mode=train_then_eval evaluates the last step")
    if levels := metrics.chance_levels(config, config.train_batch_size):
        text = ", ".join(f"{name} {value:.3g}" for name, value in levels.items())
        console.log(f"chance level during training: {text}")
    is_compiled = devices.compiles_step(config.jit_compile, strategy)
    console.log("compiling the training step" + " with XLA" * is_compiled)


def train_dataset(context: RunContext, start_step: int) -> tf.distribute.DistributedDataset:
    """Returns the infinite distributed training dataset, starting at `start_step`."""
    config, strategy = context.config, context.strategy
    batch_size = config.train_batch_size // strategy.num_replicas_in_sync
    return data.distribute(
        strategy,
        lambda input_context, _: data.build_train_dataset(
            config, context.source, config.seed, batch_size, start_step, input_context
        ),
    )


def _fit(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes an image to fit into a square, and pads it. Returns float32 [size, size, 3] in [0, 1]."""
    shape = [max(1, round(side * size / max(image.shape[:2]))) for side in image.shape[:2]]
    resized = tf.image.convert_image_dtype(
        tf.cast(tf.image.resize(image, shape, antialias=True), tf.uint8), tf.float32
    )
    return tf.image.resize_with_crop_or_pad(resized, size, size)


def write_preview(
    config: Config, source: Source, directory: str, writer: tf.summary.SummaryWriter
) -> None:
    """Writes a grid of images to views.png and to TensorBoard. Each column shows an image with its views below it."""
    count = min(_PREVIEW_EXAMPLES, source.num_examples(config.train_split))
    images, _ = next(
        iter(data.build_view_pairs(config, source, config.train_split, config.seed, count))
    )
    originals = [
        _fit(source.decode(item), config.image_size)
        for _, item, _ in source.records(config.train_split).take(count)
    ]
    rows = [tf.stack(originals), *simclr.views(images, config, 0)]
    scale = -(-_PREVIEW_PIXELS // config.image_size)
    images = tf.concat([tf.cast(row, tf.float32) for row in rows], 0)
    images = tf.repeat(tf.repeat(images, scale, axis=1), scale, axis=2)
    images = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]], constant_values=1.0)
    rows = tf.split(images, len(rows))
    grid = tf.concat([tf.concat(tf.unstack(row), axis=1) for row in rows], axis=0)
    grid = tf.image.convert_image_dtype(grid, tf.uint8, saturate=True)
    storage.write_bytes(os.path.join(directory, "views.png"), tf.io.encode_png(grid).numpy())
    with writer.as_default(step=0):
        tf.summary.image("views", grid[tf.newaxis])


def train(context: RunContext) -> TrainingResult:
    """Trains to the last step, resuming from the newest checkpoint in `model_dir` if there is one.

    The lock is checked before every save. All workers save a checkpoint and raise `errors.Stopped`
    when any of them receives a signal.

    Raises:
      UserError: a loss, gradient or weight is NaN or Inf; a checkpoint cannot be written; or
        `model_dir` was removed or replaced.
    """
    config, strategy, is_chief = context.config, context.strategy, context.is_chief
    num_examples = context.source.num_examples(config.train_split)
    steps = model_lib.count_steps(config, num_examples)
    with (
        # All workers must take part in saving, but only the chief's files are kept.
        contextlib.nullcontext(config.model_dir)
        if is_chief
        else tempfile.TemporaryDirectory() as directory,
        contextlib.ExitStack() as stack,
    ):
        state = build_training_state(context, directory)
        step = state.step
        checkpoint = checkpoint_files.checkpoint_prefix(config.model_dir, step) if step else None
        teacher = None
        if config.train_mode == "distill" and step < steps.train:
            teacher, state.initial_weights = load_teacher(context)
        context.check_lock()
        # Write only after restoring has succeeded, since invalid settings must not replace the
        # run's own settings.
        run_directory.write_start(context, directory, steps.train, state.initial_weights)
        state.prune()  # The process may have been stopped after it saved the newest checkpoint.
        log = TrainingLog(directory, step, config, steps.train, num_examples, is_chief)
        stack.callback(log.close)
        if step == 0 and is_chief:
            write_preview(config, context.source, directory, log.writer)
        if step < steps.train:
            if is_chief:
                _log_header(config, state.model, steps, num_examples, directory, strategy)
            batches = iter(train_dataset(context, step))
            step_function = TrainStep(state.model, state.optimizer, config, strategy, teacher)
            run_steps = make_run_steps(step_function)
        evaluations = stack.enter_context(_Evaluations(context, steps, state.model, log))
        if step:
            # The process may have been stopped before this evaluation was complete.
            evaluations.run_if_due(step)
        steps_per_call = _StepsPerCall(config.use_tpu)
        while step < steps.train:
            next_save = steps.next_save(step)
            count, seconds = min(steps_per_call.count, next_save - step), progress.stopwatch()
            with image_checks.naming_unusable(
                context.source,
                functools.partial(data.training_paths, config=config, start_step=step),
                functools.partial(_save_whole_steps, config, state, log, checkpoint),
            ):
                means, num_finite_steps = run_steps(batches, tf.constant(count))
            if num_finite_steps < count:
                rate = means["learning_rate"]
                raise _divergence(config, step + int(num_finite_steps) + 1, rate, checkpoint)
            step += count
            log.update(step, means, seconds(), steps_per_call.is_compiled)
            steps_per_call.record(count, seconds())
            is_stopping = steps_per_call.agree(context.stop.requested, strategy)
            context.check_lock()
            saves = is_stopping or step == next_save
            if saves:
                checkpoint = _save(config, state, checkpoint)
                state.prune()
            log.write_row(saves, is_last=is_stopping or step == steps.train)
            if is_stopping:
                # `directory` may be temporary.
                saved = os.path.join(config.model_dir, os.path.basename(checkpoint))
                log.close()
                context.stop.stop(f"saved {saved}; run the same command again to resume")
            evaluations.run_if_due(step)
        return TrainingResult(state.model, step, checkpoint, log)


class _Evaluations(contextlib.ExitStack):
    """Evaluations during training (`--eval_epochs`), which do not change the model."""

    def __init__(
        self, context: RunContext, steps: model_lib.Steps, model: model_lib.Model, log: TrainingLog
    ):
        super().__init__()
        self._context, self._steps, self._model, self._log = context, steps, model, log
        self._evaluator: evaluate.Evaluator | None = None

    def run_if_due(self, step: int) -> None:
        """Evaluates the model if an evaluation is due at `step`. The checkpoint of this step must already exist."""
        interval, config = self._steps.evaluation, self._context.config
        # With --mode=train_then_eval, the last step is evaluated after training.
        is_last = step == self._steps.train
        if not interval or (config.mode != "train" if is_last else step % interval):
            return
        if self._evaluator is None:
            evaluator = evaluate.Evaluator(evaluate.during_training(self._context), self._model)
            self._evaluator = self.enter_context(evaluator)
        results = self._evaluator.evaluate_and_write(step)
        if self._context.is_chief:
            console.log(f"evaluation at step {step}: {', '.join(metrics.short_texts(results))}")
        self._log.add_results(step, results)


def _divergence(
    config: Config, step: int, learning_rate: float, prefix: str | None
) -> TrainingDiverged:
    """Returns the error for a NaN or Inf loss, gradient or weight. `prefix` is the newest checkpoint, if any."""
    kept = f"the newest checkpoint is {prefix}" if prefix else "no checkpoint was written"
    precision = ", another --precision" if config.precision == "mixed_float16" else ""
    # Include --model_dir, because the default directory depends on the changed flags.
    resume = (
        f", and resume with --model_dir={config.model_dir} --allow_flag_changes" if prefix else ""
    )
    return TrainingDiverged(
        f"--learning_rate={config.learning_rate:g}: training diverged at step {step} (loss,"
        " gradients or weights are NaN or Inf; scheduled learning rate"
        f" {learning_rate:.3g}); {kept}. Use a lower --learning_rate{precision} or more"
        f" --warmup_epochs{resume}."
    )


def _save_whole_steps(
    config: Config, state: TrainingState, log: TrainingLog, newest: str | None
) -> str:
    """Writes a checkpoint if a batch could not be read, and returns a text for the error message.

    Other workers, which are waiting for this one to train, could not take part in saving.
    """
    if workers.count_workers() > 1 or f"ckpt-{state.step}" == os.path.basename(newest or "ckpt-0"):
        return ""
    path = _save(config, state, newest)
    log.write(is_last=True)
    return f" Saved {path}."


def _save(config: Config, state: TrainingState, newest: str | None) -> str:
    """Writes a checkpoint, together with the other workers, and returns the checkpoint's prefix.

    Raises:
      UserError: a variable is NaN or Inf, or the checkpoint cannot be written. The message names
        the newest checkpoint that was written.
    """
    variables = [
        v for v in state.model.variables + state.optimizer.variables() if v.dtype.is_floating
    ]
    if not _all_finite([*map(tf.convert_to_tensor, variables)]):
        rate = state.optimizer.learning_rate(state.optimizer.iterations)
        raise _divergence(config, state.step, float(rate), newest)
    try:
        return state.save()
    except (tf.errors.OpError, OSError) as error:
        if workers.is_lost_worker(error):
            raise
        kept = f"{newest} is intact" if newest else "there is no earlier checkpoint"
        raise UserError(
            f"--model_dir={state.directory}: ckpt-{state.step} could not be written"
            f" ({first_line(error)}); {kept}. Free some space or restore access, then run the same"
            " command again."
        ) from error
