"""Training step and training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterable

import tensorflow as tf
import tf_keras as keras

import data
import evaluate
import metrics as metrics_lib
import model as model_lib
import simclr
from checkpoints import (
    checkpoint_files,
    inspection,
    loading,
    run_directory,
    training_log,
    weight_files,
)
from checkpoints.run_context import RunContext
from checkpoints.run_directory import Recorded
from checkpoints.training_log import TrainingLog
from checkpoints.training_state import TrainingState
from config import Config
from large_batch import micro_batches
from runtime import console, devices, progress, replicas, workers
from runtime.errors import TrainingDiverged, UserError, first_line
from sources import image_checks

# This hides the overhead of device calls, but is short enough to show progress.
_SECONDS_PER_CALL = 1.0
_TPU_CALLS = 10.0  # Calls of a TPU, which may be on another machine, take this many times as long.


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
        self.model, self.config, self.strategy = model, config, strategy
        self.optimizer, self.loss_scale = optimizer, LossScale(optimizer)
        # number of images in a batch on this replica
        self.rows = config.train_batch_size // strategy.num_replicas_in_sync
        self.per_image = functools.partial(simclr.per_image, model, config=config, teacher=teacher)
        self.over_batch = functools.partial(simclr.over_batch, config=config, strategy=strategy)

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

    def replica_loss(self, terms: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the loss that this replica differentiates: the sum of the terms.

        The loss is divided by the number of replicas, because gradients are summed over replicas.
        With float16, the loss is also multiplied by the loss scale.
        """
        return self.loss_scale.scale(add(terms.values()) / self.strategy.num_replicas_in_sync)

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
        variables, config = self.model.trainable_variables, self.config
        with tf.GradientTape() as tape:
            decay = model_lib.add_weight_decay(self.model, config.weight_decay, config.optimizer)
            decay_loss = self.replica_loss({"weight_decay": decay})
        gradients = [
            gradient if decay_gradient is None else gradient + decay_gradient
            for gradient, decay_gradient in zip(gradients, tape.gradient(decay_loss, variables))
        ]
        gradients = self.loss_scale.unscale(gradients)
        terms = {**terms, "weight_decay": decay}
        learning_rate = self.optimizer.learning_rate(self.optimizer.iterations)
        is_finite = all_finite([*terms.values(), *gradients])
        scale_scalars, can_retry = self.loss_scale.apply_gradients(gradients, variables)
        is_finite |= all_finite([*terms.values()]) & can_retry
        scalars = {**terms, **metrics, "total_loss": add(terms.values()), **scale_scalars}
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


class LossScale:
    """Applies gradients and, with float16, scales the loss so that small gradients do not underflow.

    The scale changes during training: Keras reduces it, and skips the step, if gradients overflow.
    """

    _MINIMUM = 1.0  # Keras does not reduce the scale below this value.

    def __init__(self, optimizer: keras.optimizers.legacy.Optimizer):
        """`optimizer` is a Keras `LossScaleOptimizer` if the loss is to be scaled."""
        self._optimizer, self._is_used = optimizer, hasattr(optimizer, "loss_scale")

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate."""
        return self._optimizer.get_scaled_loss(loss) if self._is_used else loss

    def unscale(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients of the loss, given those of the scaled loss."""
        return self._optimizer.get_unscaled_gradients(gradients) if self._is_used else gradients

    def apply_gradients(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable]
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Updates the variables.

        Returns:
          A dict of scalars to report, and whether the step was skipped, but the scale can still be
          reduced.
        """
        optimizer, pairs = self._optimizer, zip(gradients, variables)
        if not self._is_used:
            optimizer.apply_gradients(pairs)
            return {}, tf.constant(False)
        scale = tf.identity(optimizer.loss_scale)
        with tf.control_dependencies([scale]):
            update = optimizer.apply_gradients(pairs)
        with tf.control_dependencies([update]):
            # A skipped step resets Keras's counter of consecutive steps with finite gradients,
            # without increasing the loss scale.
            is_skipped = tf.equal(optimizer.dynamic_counter, 0) & (optimizer.loss_scale <= scale)
        scalars = {"loss_scale": scale, "skipped_steps": is_skipped}
        return scalars, is_skipped & (scale > self._MINIMUM)


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
            results = micro_batches.MicroBatches(step)(batch)
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
            line = f"resumed at step {state.step} from {restored}"
            if state.step >= model_lib.count_steps(config, num_examples).train:
                flag = "train_steps" if config.train_steps else "train_epochs"
                line += f"; the run is finished (to train longer, increase --{flag})"
            console.log(line)
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
        loaded = loading.warm_start(model, path, required, context.source.class_names)
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
        model, info = loading.open_network(path, flag="--teacher", precision=config.precision)
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


@dataclasses.dataclass
class Call:
    """A device call, in which several steps run, and what the parts of the loop know about it.

    Attributes:
      step: number of completed steps.
      count: number of steps of the call.
      means: means of the scalars over these steps.
      num_finite_steps: number of steps before the first non-finite one.
      seconds: duration.
      stops: whether a signal stops the run on any worker.
      saves: whether a checkpoint is written after the call.
    """

    step: int
    count: int
    means: dict[str, float]
    num_finite_steps: int
    seconds: float
    stops: bool = False
    saves: bool = False


class _Pace:
    """Number of steps per device call: 1 until the speed is known, and then as many as fit into about one second.

    On TPUs, a call takes up to ten seconds.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self._seconds = _SECONDS_PER_CALL * (_TPU_CALLS if context.config.use_tpu else 1)
        self.count = 1
        self.is_compiled = False

    def agree(self, call: Call) -> None:
        """Agrees with the other workers on whether to stop, and on how many steps to run next."""
        proposal = 1
        if self.is_compiled:
            proposal = max(int(self._seconds * call.count / call.seconds), 1)
        self.is_compiled = True
        numbers = [int(self._context.stop.requested), proposal]
        stops, proposals = workers.gather_integers(numbers, self._context.strategy).T
        self.count, call.stops = int(proposals.min()), bool(stops.any())


class _Checkpoints:
    """Checkpoints of a run, of which all variables must be finite. `newest` is the prefix of the newest one, if any."""

    def __init__(self, config: Config, state: TrainingState, steps: model_lib.Steps):
        self._config, self._state, self._steps = config, state, steps
        prefix = checkpoint_files.checkpoint_prefix(config.model_dir, state.step)
        self.newest = prefix if state.step else None

    def check_finite(self, call: Call) -> None:
        """Raises `TrainingDiverged` if a loss or gradient was NaN or Inf."""
        if call.num_finite_steps < call.count:
            step = call.step - call.count + call.num_finite_steps + 1
            raise self._divergence(step, call.means["learning_rate"])

    def save_if_due(self, call: Call) -> None:
        """Writes a checkpoint, together with the other workers, and deletes old ones."""
        call.saves = call.stops or call.step == self._steps.next_save(call.step - call.count)
        if call.saves:
            self.save()
            self._state.prune()

    def save(self) -> None:
        """Writes a checkpoint.

        Raises:
          UserError: a variable is NaN or Inf, or the checkpoint cannot be written. The message names
            the newest checkpoint that was written.
        """
        state = self._state
        variables = [
            v for v in state.model.variables + state.optimizer.variables() if v.dtype.is_floating
        ]
        if not _all_finite([*map(tf.convert_to_tensor, variables)]):
            rate = state.optimizer.learning_rate(state.optimizer.iterations)
            raise self._divergence(state.step, float(rate))
        try:
            self.newest = state.save()
        except (tf.errors.OpError, OSError) as error:
            if workers.is_lost_worker(error):
                raise
            kept = f"{self.newest} is intact" if self.newest else "there is no earlier checkpoint"
            raise UserError(
                f"--model_dir={state.directory}: ckpt-{state.step} could not be written"
                f" ({first_line(error)}); {kept}. Free some space or restore access, then run the"
                " same command again."
            ) from error

    def save_whole_steps(self, log: TrainingLog) -> str:
        """Writes a checkpoint if a batch could not be read, and returns a text for the error message.

        Other workers, which are waiting for this one to train, could not take part in saving.
        """
        name = os.path.basename(self.newest or "ckpt-0")
        if workers.count_workers() > 1 or f"ckpt-{self._state.step}" == name:
            return ""
        self.save()
        log.write(is_last=True)
        return f" Saved {self.newest}."

    def _divergence(self, step: int, learning_rate: float) -> TrainingDiverged:
        config, kept, resume, precision = self._config, "no checkpoint was written", "", ""
        if self.newest:
            kept = f"the newest checkpoint is {self.newest}"
            # Include --model_dir, because the default directory depends on the changed flags.
            resume = f", and resume with --model_dir={config.model_dir} --allow_flag_changes"
        if config.precision == "mixed_float16":
            precision = ", another --precision"
        return TrainingDiverged(
            f"--learning_rate={config.learning_rate:g}: training diverged at step {step} (loss,"
            " gradients or weights are NaN or Inf; scheduled learning rate"
            f" {learning_rate:.3g}); {kept}. Use a lower --learning_rate{precision} or more"
            f" --warmup_epochs{resume}."
        )


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
            console.log(f"evaluation at step {step}: {', '.join(metrics_lib.short_texts(results))}")
        self._log.add_results(step, results)


def train(context: RunContext) -> TrainingResult:
    """Trains to the last step, resuming from the newest checkpoint in `model_dir` if there is one.

    The lock is checked before every save. All workers save a checkpoint and raise `errors.Stopped`
    when any of them receives a signal.

    Raises:
      UserError: a loss, gradient or weight is NaN or Inf; a checkpoint cannot be written; or
        `model_dir` was removed or replaced.
    """
    config, is_chief = context.config, context.is_chief
    num_examples = context.source.num_examples(config.train_split)
    steps = model_lib.count_steps(config, num_examples)
    with contextlib.ExitStack() as stack:
        directory = config.model_dir
        if not is_chief:  # All workers take part in saving, but only the chief's files are kept.
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        state = build_training_state(context, directory)
        checkpoints, teacher = _Checkpoints(config, state, steps), None
        if config.train_mode == "distill" and state.step < steps.train:
            teacher, state.initial_weights = load_teacher(context)
        context.check_lock()
        # Write only after restoring has succeeded, since invalid settings must not replace the
        # run's own settings.
        run_directory.write_start(
            config, context.source, directory, steps.train, state.initial_weights
        )
        state.prune()  # The process may have been stopped after it saved the newest checkpoint.
        log = TrainingLog(directory, state.step, config, steps.train, num_examples, is_chief)
        stack.callback(log.close)
        if state.step == 0 and is_chief:
            training_log.write_preview(config, context.source, directory, log.writer)
        evaluations = stack.enter_context(_Evaluations(context, steps, state.model, log))
        if state.step:
            # The process may have been stopped before this evaluation was complete.
            evaluations.run_if_due(state.step)
        if state.step < steps.train:
            if is_chief:
                training_log.log_header(
                    config, state.model, steps, num_examples, directory, context.strategy
                )
            step = TrainStep(state.model, state.optimizer, config, context.strategy, teacher)
            _loop(context, step, steps, checkpoints, log, evaluations)
        return TrainingResult(state.model, state.step, checkpoints.newest, log)


def _loop(
    context: RunContext,
    train_step: TrainStep,
    steps: model_lib.Steps,
    checkpoints: _Checkpoints,
    log: TrainingLog,
    evaluations: _Evaluations,
) -> None:
    """Runs the remaining steps. After each device call, calls the parts of the loop in the order of the list."""
    step, pace = int(train_step.optimizer.iterations.numpy()), _Pace(context)
    # `agree` sets `call.stops`, and `save_if_due` sets `call.saves`; the parts below them read both. The
    # lock is checked before anything is written, and a run stops only after its state and log are.
    parts: list[Callable[[Call], object]] = [
        checkpoints.check_finite,
        lambda call: log.update(call.step, call.means, call.seconds, pace.is_compiled),
        pace.agree,
        lambda _: context.check_lock(),
        checkpoints.save_if_due,
        lambda call: log.write_row(call.saves, call.stops or call.step == steps.train),
        lambda call: _stop(context, checkpoints, log) if call.stops else None,
        lambda call: evaluations.run_if_due(call.step),
    ]
    save = functools.partial(checkpoints.save_whole_steps, log)
    run_steps, batches = make_run_steps(train_step), iter(train_dataset(context, step))
    while step < steps.train:
        count, seconds = min(pace.count, steps.next_save(step) - step), progress.stopwatch()
        paths = functools.partial(data.training_paths, config=context.config, start_step=step)
        with image_checks.naming_unusable(context.source, paths, save):
            means, num_finite_steps = run_steps(batches, tf.constant(count))
        step += count
        call = Call(step, count, means, int(num_finite_steps), seconds())
        for part in parts:
            part(call)


def _stop(context: RunContext, checkpoints: _Checkpoints, log: TrainingLog) -> None:
    """Raises `errors.Stopped`, after a checkpoint has been written."""
    # The directory of `newest` may be temporary.
    saved = os.path.join(context.config.model_dir, os.path.basename(checkpoints.newest))
    log.close()
    context.stop.stop(f"saved {saved}; run the same command again to resume")
