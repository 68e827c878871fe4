"""Training step and training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable

import tensorflow as tf
import tf_keras as keras

import data
import data_util
import metrics
import model as model_lib
from augmentation.policies import view_policies
from checkpoints import checkpoint_files, restoring, run_directory
from checkpoints.lock import Lock
from checkpoints.training_log import TrainingLog
from checkpoints.training_state import TrainingState
from config import Config, settings_with
from large_batch import micro_batches
from runtime import console, progress, replicas, signals, storage, workers
from runtime.errors import TrainingDiverged, UserError, first_line
from sources.source import Source

# This hides the overhead of device calls, but is short enough to show progress.
_SECONDS_PER_CALL = 1.0
_COLLAPSED_STD = 0.01  # The encoder has collapsed if train/embedding_std is below this value.
_PREVIEW_EXAMPLES = 8
_PREVIEW_PIXELS = 96  # minimum side length of a view in the preview
_PROGRESS_METRICS = {
    "train/contrast_loss": "loss",
    "train/contrast_acc": "contrast_acc",
    "train/supervised_acc": "head_acc",
    "eval/knn_top_1_accuracy": "eval_knn",
    "eval/label_top_1_accuracy": "eval_head_acc",
    "eval/label_mean_average_precision": "eval_head_map",
    # Maps tags to labels.
    "eval/contrast_loss": "eval_loss",
    "train/supervised_loss": "head_loss",
}
_MIN_LOSS_SCALE = 1.0  # Keras's LossScaleOptimizer does not reduce the loss scale below this value.


# ------------------------------------------------------------------------------------------------------- step


class TrainStep:
    """Training step on one replica's share of a batch (paper, Algorithm 1).

    Call the step in replica context, inside a `tf.function`. With `--micro_batch_size`, call
    `micro_batches.train_step` instead, which uses this class's methods.
    """

    def __init__(
        self,
        model: model_lib.Model,
        optimizer: keras.optimizers.legacy.Optimizer,
        config: Config,
        strategy: tf.distribute.Strategy,
    ):
        """Creates the step.

        Args:
          model: a built model.
          optimizer: created by `model.build_optimizer`; its `iterations` variable counts the steps.
          config: settings with `seed` set.
          strategy: the strategy whose replicas share a batch.
        """
        self.model, self.optimizer, self.config, self.strategy = model, optimizer, config, strategy
        # examples per replica
        self.replica_batch_size = config.train_batch_size // strategy.num_replicas_in_sync

    def compiled(self, function: Callable) -> Callable:
        """Returns `function`, which `strategy.run` receives. With `--jit_compile`, the result is compiled by XLA."""
        return (
            tf.function(function, jit_compile=True, autograph=False)
            if self.config.jit_compile
            else function
        )

    # AutoGraph is slow, and this method does not need it.
    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        views: tf.Tensor | tuple[tf.Tensor, ...],
        labels: tf.Tensor,
        seeds: tf.Tensor | None = None,
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Runs the step.

        Args:
          views: [n, h, w, 3 * number of views] in [0, 1]. With `--augment_on=device`, the crops, a
            tuple that contains [n, h, w, 3] for each view.
          labels: int [n], or [n, classes] with values 1, 0 and -1 (unknown).
          seeds: int [n, 2], the seeds of the examples; only with `--augment_on=device`.

        Returns:
          scalars: dict of float32 scalars, averaged over the replicas. `metric_names` lists the
            keys.
          is_finite: bool scalar; see `update`.
        """
        with tf.GradientTape() as tape:
            endpoints = self.model(self.network_input(views, 0, seeds), training=True)
            losses, metrics = {}, {}
            if self.config.pretraining:
                losses["contrast_loss"], metrics = self.contrastive_loss(
                    endpoints["proj_head_output"]
                )
            if self.config.has_linear_head:
                losses["supervised_loss"], metrics["supervised_acc"] = self.supervised_loss(
                    endpoints, labels
                )
            losses["weight_decay"] = self.weight_decay()
            loss = self.replica_loss(sum_losses(losses))
        gradients = tape.gradient(
            loss, self.model.trainable_variables, unconnected_gradients="zero"
        )
        return self.update(gradients, losses, metrics, self.linear_head_moments(endpoints))

    def network_input(
        self,
        views: tf.Tensor | tuple[tf.Tensor, ...],
        first: int | tf.Tensor = 0,
        seeds: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the network's input. `first` is the row of the first example in this replica's batch."""
        if seeds is not None:
            views = data_util.augment_crops(views, view_policies(self.config), seeds)
        views = tf.cast(views, keras.backend.floatx())
        if not self.config.uses_pretraining_augmentation:
            return views
        first_row = replicas.row_offset(self.replica_batch_size, self.strategy) + first
        return model_lib.blurred_views(
            views, self.config, self.config.seed, self.optimizer.iterations, first_row
        )

    def contrastive_loss(self, hidden: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the contrastive loss of this replica's projections [2n, d], and its metrics."""
        return model_lib.contrastive_loss(hidden, self.config, self.strategy)

    def supervised_loss(
        self, endpoints: dict[str, tf.Tensor], labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the loss and the accuracy of the linear head, which receives both views in pretraining."""
        return model_lib.supervised_loss(endpoints["logits_sup"], labels)

    def weight_decay(self) -> tf.Tensor:
        """Returns the weight-decay term of the loss (see `model.add_weight_decay`)."""
        return model_lib.add_weight_decay(
            self.model, self.config.weight_decay, self.config.optimizer
        )

    def replica_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss that this replica differentiates.

        The loss is divided by the number of replicas, because gradients are summed over replicas.
        With float16, the loss is also multiplied by the loss scale.
        """
        share = loss / self.strategy.num_replicas_in_sync
        return self.optimizer.get_scaled_loss(share) if scales_loss(self.config) else share

    def linear_head_moments(self, endpoints: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Returns the mean and the variance of the linear head's input, each of shape [inputs].

        Without `--linear_head_learning_rate`, returns an empty tuple.
        """
        if self.config.linear_head_learning_rate is None:
            return ()
        return tf.nn.moments(endpoints["sup_head_input"], [0])

    def update(
        self,
        gradients: list[tf.Tensor],
        losses: dict[str, tf.Tensor],
        metrics: dict[str, tf.Tensor],
        head_moments: tuple[tf.Tensor, ...],
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Updates the variables.

        Args:
          gradients: gradients of `replica_loss` with respect to the trainable variables.
          losses: dict of scalars that add up to the total loss.
          metrics: dict of other scalars to report.
          head_moments: result of `linear_head_moments`; with micro-batches, stacked into
            [micro-batches, inputs].

        Returns:
          scalars: see `__call__`.
          is_finite: whether losses and gradients are finite on all replicas. A step skipped because
            of float16 gradient overflow counts as finite as long as the loss scale can still be
            reduced.
        """
        variables, optimizer, config = self.model.trainable_variables, self.optimizer, self.config
        if scales_loss(config):
            gradients = optimizer.get_unscaled_gradients(gradients)
        if head_moments:
            gradients = model_lib.linear_head_gradients(
                self.model.supervised_head,
                variables,
                gradients,
                *replicas.mean_and_variance(*head_moments, self.strategy),
                model_lib.linear_head_rate_ratio(config),
            )
        scalars = {**losses, **metrics, "total_loss": sum_losses(losses)}
        learning_rate = optimizer.learning_rate(optimizer.iterations)
        is_finite = all_finite([*losses.values(), *gradients])
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
            is_finite |= all_finite(losses.values()) & is_skipped & (scale > _MIN_LOSS_SCALE)
        scalars = {
            **{f"train/{name}": value for name, value in scalars.items()},
            "learning_rate": learning_rate,
            "is_finite": is_finite,
        }
        scalars = replicas.mean(
            {name: tf.cast(value, tf.float32) for name, value in scalars.items()}, self.strategy
        )
        return scalars, scalars.pop("is_finite") == 1


def metric_names(config: Config) -> list[str]:
    """Returns the names of a step's scalars, which include the original's TensorBoard tags."""
    names = (
        ["contrast_loss", "contrast_acc", "contrast_entropy", "embedding_std"]
        if config.pretraining
        else []
    )
    names += ["supervised_loss", "supervised_acc"] if config.has_linear_head else []
    names += ["weight_decay", "total_loss"] + (
        ["loss_scale", "skipped_steps"] if scales_loss(config) else []
    )
    return [f"train/{name}" for name in names] + ["learning_rate"]


def scales_loss(config: Config) -> bool:
    """Returns whether the loss is scaled to keep float16 gradients from underflowing."""
    return config.precision == "mixed_float16"


def sum_losses(losses: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the total loss, in float64 if any term is float64, otherwise in float32."""
    dtype = tf.float64 if any(loss.dtype == tf.float64 for loss in losses.values()) else tf.float32
    return tf.add_n([tf.cast(loss, dtype) for loss in losses.values()])


def all_finite(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns whether all elements of all tensors are finite, as a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def make_run_steps(train_step: TrainStep) -> Callable:
    """Builds a function that runs multiple steps per device call.

    Args:
      train_step: the training step of one replica.

    Returns:
      A function that takes an iterator over distributed batches and a number of steps, and returns
      the means of the scalars and the number of steps before the first non-finite step.
    """
    strategy, config = train_step.strategy, train_step.config
    compiled_step = train_step.compiled(train_step)

    @tf.function
    def run_steps(iterator, steps):
        totals, num_finite_steps = {name: tf.zeros([]) for name in metric_names(config)}, 0
        for index in tf.range(steps):
            if config.micro_batch_size:
                results = micro_batches.train_step(train_step, next(iterator))
            else:
                results = strategy.run(compiled_step, args=next(iterator))
            # All replicas return the same scalars.
            scalars, is_finite = tf.nest.map_structure(
                lambda x: strategy.experimental_local_results(x)[0], results
            )
            totals = {name: total + scalars[name] for name, total in totals.items()}
            num_finite_steps += tf.cast(is_finite & (num_finite_steps == index), tf.int32)
        return {
            name: total / tf.cast(steps, tf.float32) for name, total in totals.items()
        }, num_finite_steps

    return run_steps


# ------------------------------------------------------------------------------------------------------- loop


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of `train`."""

    model: object
    step: int
    checkpoint: str  # Prefix of the last checkpoint.
    # Mean rate, excluding compilation and saving (0 if training was complete).
    images_per_second: float
    # Number of steps with float16 gradient overflow since the last start or resume.
    skipped_steps: int
    log: TrainingLog


class _StepsPerCall:
    """Number of steps per device call: 1 until the speed is known, and then as many as fit into about one second."""

    def __init__(self):
        self._seconds_per_step = None
        self._agreed = 1
        self.is_compiled = False

    def limited_to(self, limit: int) -> int:
        """Returns the number of steps for the next call, at most `limit`."""
        return min(self._agreed, limit)

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
            else max(int(_SECONDS_PER_CALL / self._seconds_per_step), 1)
        )
        stops, proposals = workers.gather_integers([int(stop), proposal], strategy).T
        self._agreed = int(proposals.min())
        return bool(stops.any())


def check_agreement(config: Config, source: Source, strategy: tf.distribute.Strategy) -> None:
    """Raises `UserError` if the settings or the data differ between workers."""
    may_differ = settings_with("per_worker")
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name not in may_differ
    }
    summary = [
        zlib.crc32(json.dumps(settings, sort_keys=True).encode()),
        source.num_examples(config.train_split),
    ]
    gathered = workers.gather_integers(summary, strategy)
    flags, examples = ([str(value) for value in values] for values in gathered.T)
    if len(set(flags)) > 1:
        raise UserError(
            "TF_CONFIG: the workers were started with different flags. Pass the same flags on all"
            " workers."
        )
    if len(set(examples)) > 1:
        raise UserError(
            f"--dataset={config.dataset}: the workers have different numbers of training examples "
            f"({', '.join(examples)}). Provide the same data on all workers."
        )


def check_batch(config: Config, source: Source, strategy: tf.distribute.Strategy) -> None:
    """Raises `UserError` if the batch sizes are incompatible with the data set or the number of replicas."""
    num_replicas = strategy.num_replicas_in_sync
    trains = config.mode != "eval"
    for flag in ("train_batch_size", "eval_batch_size") if trains else ("eval_batch_size",):
        size = getattr(config, flag)
        if size % num_replicas:
            nearest = max(round(size / num_replicas), 1) * num_replicas
            raise UserError(
                f"--{flag}={size}: the value must be divisible by the number of replicas"
                f" ({num_replicas}). Use {nearest}."
            )
    if not trains:
        return
    if config.micro_batch_size % num_replicas:
        raise UserError(
            f"--micro_batch_size={config.micro_batch_size}: the value must be divisible by the"
            f" number of replicas ({num_replicas}). Use a multiple of {num_replicas} that divides"
            f" --train_batch_size={config.train_batch_size}."
        )
    examples = source.num_examples(config.train_split)
    if config.train_batch_size > examples:
        raise UserError(
            f"--train_batch_size={config.train_batch_size}: --train_split={config.train_split} has"
            f" only {examples} examples. Use at most {examples // num_replicas * num_replicas}."
        )


def build_training_state(
    config: Config, source: Source, strategy: tf.distribute.Strategy, directory: str
) -> TrainingState:
    """Builds the `TrainingState` of a new or resumed run, and logs which weights were loaded."""
    with strategy.scope():
        # tf.data rejects seed tensors if the global seed is 0.
        keras.utils.set_random_seed(config.seed + 1)
        model = model_lib.build_model(config, source.num_classes)
        if not config.pretraining:
            model.freeze(config.fine_tune_after_block)
        schedule = model_lib.build_schedule(config, source.num_examples(config.train_split))
        optimizer = model_lib.build_optimizer(config, schedule, model)
        state = TrainingState(model, optimizer, directory, config.keep_checkpoint_max)
        restored = state.restore_newest(config.model_dir, strategy)
        if restored is not None:
            console.log(f"resumed at step {state.step} from {restored}")
        else:
            _initialize_weights(config, model, source.class_names)
    return state


def _initialize_weights(config, model, class_names):
    """Loads the weights from `--checkpoint` into a new run's model, and zeros the linear head if requested."""
    if config.checkpoint:
        required = (
            ("encoder", "projection head")
            if not config.pretraining and config.linear_head_on_projections
            else ("encoder",)
        )
        loaded = restoring.warm_start(model, config.checkpoint, required, class_names)
        for line in loaded.lines:
            console.log(line)
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


def _log_header(config, model, steps, num_examples, directory):
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
    peak = model_lib.scaled_learning_rate(
        config.learning_rate, config.learning_rate_scaling, config.train_batch_size
    )
    console.log(
        f"training: {steps.train} steps ({steps.train * config.train_batch_size / num_examples:.3g}"
        f" epochs), learning rate {peak:.3g} after {steps.warmup} warm-up steps; examples:"
        f" {directory}/views.png"
    )


def train_dataset(
    config: Config, source: Source, strategy: tf.distribute.Strategy, start_step: int
) -> tf.distribute.DistributedDataset:
    """Returns the infinite distributed training dataset, starting at `start_step`."""
    batch_size = config.train_batch_size // strategy.num_replicas_in_sync
    return data.distribute(
        strategy,
        lambda context, _: data.build_train_dataset(
            config, source, config.seed, batch_size, start_step, context
        ),
    )


def _fit(image, size):
    """Resizes an image to fit into a square, and pads it. Returns float32 [size, size, 3] in [0, 1]."""
    height, width = image.shape[:2]
    shape = [max(1, round(side * size / max(height, width))) for side in (height, width)]
    resized = tf.image.convert_image_dtype(
        tf.cast(tf.image.resize(image, shape, antialias=True), tf.uint8), tf.float32
    )
    return tf.image.resize_with_crop_or_pad(resized, size, size)


def write_preview(
    config: Config, source: Source, directory: str, writer: tf.summary.SummaryWriter
) -> None:
    """Writes a grid of images to views.png and to TensorBoard. Each column shows an image with its views below it."""
    count = min(_PREVIEW_EXAMPLES, source.num_examples(config.train_split))
    views, _ = next(
        iter(data.build_view_pairs(config, source, config.train_split, config.seed, count))
    )
    if config.uses_pretraining_augmentation:
        images = model_lib.blurred_views(views, config, config.seed, 0)
    else:
        images = views
    originals = [
        _fit(source.decode(item), config.image_size)
        for _, item, _ in source.records(config.train_split).take(count)
    ]
    images = tf.concat([originals, tf.cast(images, tf.float32)], 0)
    scale = -(-_PREVIEW_PIXELS // config.image_size)
    images = tf.repeat(tf.repeat(images, scale, axis=1), scale, axis=2)
    images = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]], constant_values=1.0)
    rows = tf.split(images, images.shape[0] // count)
    grid = tf.concat([tf.concat(tf.unstack(row), axis=1) for row in rows], axis=0)
    grid = tf.image.convert_image_dtype(grid, tf.uint8, saturate=True)
    storage.write_bytes(os.path.join(directory, "views.png"), tf.io.encode_png(grid).numpy())
    with writer.as_default(step=0):
        tf.summary.image("views", grid[tf.newaxis])


def train(
    config: Config,
    source: Source,
    strategy: tf.distribute.Strategy,
    stop: signals.StopSignals,
    lock: Lock | None,
    make_evaluator: Callable[[model_lib.Model], object],
) -> TrainingResult:
    """Trains to the last step, resuming from the newest checkpoint in `config.model_dir` if there is one.

    Args:
      config: settings with `seed` and `model_dir` set.
      source: the data set.
      strategy: the strategy of this process.
      stop: stop-signal handler. When any worker receives a signal, all workers save a checkpoint
        and raise `errors.Stopped`.
      lock: lock on `model_dir`, checked before every save. None on all workers except the chief.
      make_evaluator: function that returns an `evaluate.Evaluator` for a model, called only if
        `--eval_epochs` is set. The evaluations do not change the model.

    Raises:
      UserError: a loss, gradient or weight is NaN or Inf; a checkpoint cannot be written; or
        `model_dir` was removed or replaced.
    """
    num_examples, is_chief = source.num_examples(config.train_split), lock is not None
    steps = model_lib.count_steps(config, num_examples)
    # All workers must take part in saving, but only the chief's files are kept.
    with (
        (
            contextlib.nullcontext(config.model_dir) if is_chief else tempfile.TemporaryDirectory()
        ) as directory,
        contextlib.ExitStack() as stack,
    ):
        state = build_training_state(config, source, strategy, directory)
        log = _start_directory(config, source, state, lock, steps.train)
        step = state.step
        checkpoint = checkpoint_files.checkpoint_prefix(config.model_dir, step) if step else None
        if step < steps.train:
            if is_chief:
                _log_header(config, state.model, steps, num_examples, directory)
                console.log("compiling the training step" + " with XLA" * config.jit_compile)
            run_steps = make_run_steps(TrainStep(state.model, state.optimizer, config, strategy))
            iterator = iter(train_dataset(config, source, strategy, step))
        report = _Report(config, log, step, steps.train, num_examples, is_chief)
        steps_per_call = _StepsPerCall()
        steps_to_profile = min(config.profile_steps, steps.checkpoint, steps.train - step - 1)
        evaluations = _Evaluations(
            config, steps, state.model, make_evaluator, log if is_chief else None
        )
        stack.callback(evaluations.close)
        if step:
            # The process may have been stopped before this evaluation was complete.
            evaluations.run_if_due(step)
        while step < steps.train:
            next_save = steps.next_save(step)
            count, profile = steps_per_call.limited_to(next_save - step), contextlib.nullcontext()
            if steps_per_call.is_compiled and 0 < steps_to_profile <= next_save - step:
                count, steps_to_profile = steps_to_profile, 0
                profile = _profile(
                    os.path.join(directory, "train"), step + 1, step + count, is_chief
                )
            seconds = progress.stopwatch()
            with profile:
                means, num_finite_steps = run_steps(iterator, tf.constant(count))
            means = {name: float(value) for name, value in means.items()}
            if num_finite_steps < count:
                raise _divergence(config, step + int(num_finite_steps) + 1, means, checkpoint)
            step += count
            report.update(step, means, seconds(), steps_per_call.is_compiled, evaluations.results)
            steps_per_call.record(count, seconds())
            is_stopping = steps_per_call.agree(stop.requested, strategy)
            if lock is not None:
                lock.check()
            saves = is_stopping or step == next_save
            if saves:
                checkpoint = _save(config, state, means, checkpoint)
            report.write(step, saves, is_last=is_stopping or step == steps.train)
            if is_stopping:
                report.close()
                # `directory` may be temporary.
                saved = os.path.join(config.model_dir, os.path.basename(checkpoint))
                stop.stop(f"saved {saved}; run the same command again to resume")
            evaluations.run_if_due(step)
        report.close()
        return TrainingResult(
            state.model, step, checkpoint, report.images_per_second, report.skipped_steps, log
        )


class _Report:
    """Reports the scalars of the training steps on the terminal and in the `TrainingLog`."""

    def __init__(self, config, log, step, total, num_examples, is_chief):
        """Creates the report at `step` of `total` steps. Only the chief shows the progress."""
        self._config, self._log, self._num_examples, self._is_chief = (
            config,
            log,
            num_examples,
            is_chief,
        )
        self._bar = progress.Progress(
            step, total, config.train_batch_size, config.log_seconds, _PROGRESS_METRICS, is_chief
        )
        self._step, self._skipped_steps = step, 0.0
        self._mean_metrics, self._logged_at = metrics.MeanMetrics(), time.monotonic()

    @property
    def images_per_second(self):
        """Mean rate, excluding compilation and saving."""
        return self._bar.images_per_second

    @property
    def skipped_steps(self):
        """Number of steps with float16 gradient overflow."""
        return round(self._skipped_steps)

    def update(self, step, means, seconds, timed, evaluation):
        """Adds the steps since the previous update, and shows the progress.

        Args:
          step: the last step.
          means: dict of the scalars' means over the new steps.
          seconds: duration of the new steps.
          timed: False if `seconds` includes compilation.
          evaluation: dict of the results of the newest evaluation, which are also shown.
        """
        count, self._step = step - self._step, step
        self._bar.update(step, seconds, {**means, **evaluation}, timed)
        self._skipped_steps += count * means.get("train/skipped_steps", 0.0)
        self._mean_metrics.add(
            {**means, "seconds_per_step": seconds / count} if timed else means, count
        )

    def write(self, step, is_saved, is_last):
        """Writes the means since the previous call, at most every `--log_seconds` seconds unless `is_saved` is True.

        Warns if the encoder has collapsed. `is_saved` states whether a checkpoint was written at
        `step`.
        """
        if not is_saved and time.monotonic() - self._logged_at <= self._config.log_seconds:
            return
        means, self._logged_at = self._mean_metrics.means(), time.monotonic()
        self._mean_metrics.clear()
        means["epoch"] = step * self._config.train_batch_size / self._num_examples
        if "seconds_per_step" in means:
            means["images_per_second"] = self._config.train_batch_size / means.pop(
                "seconds_per_step"
            )
        self._log.add(step, means)
        spread = means.get("train/embedding_std")
        if self._is_chief and spread is not None and spread < _COLLAPSED_STD:
            console.log(
                f"warning: the encoder has collapsed. At step {step}, all images have nearly the"
                f" same projection (train/embedding_std {spread:.4f}; 1 means an even spread in all"
                " directions). Try a lower --learning_rate or another --temperature."
            )
        if self._is_chief and is_saved:
            self._log.write(is_last)

    def close(self):
        """Closes the progress bar."""
        self._bar.close()


class _Evaluations:
    """Evaluations during training (`--eval_epochs`)."""

    def __init__(self, config, steps, model, make_evaluator, log):
        """Stores the arguments. `log` is the `TrainingLog` for the results, or None on all workers except the chief."""
        self._steps, self._model, self._make_evaluator, self._log = (
            steps,
            model,
            make_evaluator,
            log,
        )
        # With --mode=train_then_eval, the last step is evaluated after training.
        self._evaluates_last_step = config.mode == "train"
        self._evaluator = None
        self.results = {}

    def run_if_due(self, step):
        """Evaluates the model if an evaluation is due at `step`. The checkpoint of this step must already exist."""
        is_last = step == self._steps.train
        is_due = (
            self._evaluates_last_step if is_last else step % max(self._steps.evaluation, 1) == 0
        )
        if not self._steps.evaluation or not is_due:
            return
        if self._evaluator is None:
            self._evaluator = self._make_evaluator(self._model)
        self.results = self._evaluator.evaluate_and_write(step)
        if self._log is not None:
            values = ", ".join(
                f"{label} {self.results[name]:.3f}"
                for name, label in _PROGRESS_METRICS.items()
                if name in self.results
            )
            console.log(f"evaluation at step {step}: {values}")
            self._log.add_results(step, self.results)

    def close(self):
        """Closes the evaluator's TensorBoard writer."""
        if self._evaluator is not None:
            self._evaluator.close()


def _start_directory(config, source, state, lock, last_step):
    """Writes the run's settings, data description and preview, and returns the `TrainingLog`."""
    if lock is not None:
        lock.check()
    # Write only after restoring has succeeded, since invalid settings must not replace the run's
    # own settings.
    run_directory.write_flags(
        state.directory, config, source.class_names, source.multi_label, last_step
    )
    run_directory.write_data(state.directory, source)
    log = TrainingLog(state.directory, state.step, dataclasses.asdict(config))
    if state.step == 0 and lock is not None:
        write_preview(config, source, state.directory, log.writer)
    return log


@contextlib.contextmanager
def _profile(directory, first, last, is_chief):
    """Returns a context that writes a TensorBoard profile of steps `first` to `last`.

    The chief logs the path of the profile.
    """
    with tf.profiler.experimental.Profile(directory):
        yield
    if is_chief:
        console.log(
            f"profile of steps {first} to {last}: {directory}/plugins/profile (to view it:"
            f" tensorboard --logdir {directory})"
        )


def _divergence(config, step, means, prefix):
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
        f" {means['learning_rate']:.3g}); {kept}. Use a lower --learning_rate{precision} or more"
        f" --warmup_epochs{resume}."
    )


def _save(config, state, means, newest):
    """Writes a checkpoint, together with the other workers, and returns the checkpoint's prefix.

    Raises:
      UserError: a variable is NaN or Inf, or the checkpoint cannot be written. The message names
        the newest checkpoint that was written.
    """
    variables = [
        v for v in state.model.variables + state.optimizer.variables() if v.dtype.is_floating
    ]
    if not all(tf.reduce_all(tf.math.is_finite(variable)) for variable in variables):
        raise _divergence(config, state.step, means, newest)
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
