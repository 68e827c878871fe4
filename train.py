"""Training: the outer loop around the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time

import tensorflow as tf
import tf_keras as keras

import data
import metrics
import model as model_lib
import objective
import resnet
from checkpoints import checkpoint_files, restoring, run_directory
from checkpoints.lock import Lock
from checkpoints.training_state import TrainingState
from config import Config
from runtime import console, hosts, progress, signals, storage
from runtime.errors import TrainingDiverged, UserError, first_line
from sources.source import Source

_SECONDS_PER_CALL = 1.0  # aim of one call to the device: long enough to hide the host, short enough to watch
_COLLAPSED = 0.01  # of train/embedding_std
_PREVIEW_PAIRS = 8
_PREVIEW_PIXELS = 96  # least side length of one view in the preview


def make_run_steps(train_step):
    """Makes a function that takes several steps on the device.

    Args:
      train_step: a `TrainStep`.

    Returns:
      function from an iterator and a number of steps to the means of the metrics, and how many steps were sound before
      the first that was not.
    """
    @tf.function
    def run_steps(iterator, steps):
        totals, sound_steps = tf.zeros([len(train_step.metric_names)]), 0
        for number in tf.range(steps):
            scalars, sound = train_step(next(iterator))
            totals += scalars
            sound_steps += tf.cast(sound & (sound_steps == number), tf.int32)
        return totals / tf.cast(steps, tf.float32), sound_steps

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
    """How many steps to hand to the device at once: one at first, since it compiles, then `_SECONDS_PER_CALL`."""

    def __init__(self):
        self._seconds_per_step = None
        self._agreed = 1
        self.calls = 0

    def steps(self, most):
        """Steps of the next call."""
        return min(self._agreed, most)

    def record(self, steps, seconds):
        """Notes how long a call took."""
        self.calls += 1
        if self.calls > 1:
            self._seconds_per_step = seconds / steps

    def agree(self, stop, strategy):
        """Agrees with the other hosts, which must take as many steps, on the next call; whether any wants to `stop`."""
        wanted = 1 if self._seconds_per_step is None else max(int(_SECONDS_PER_CALL / self._seconds_per_step), 1)
        stops, wishes = hosts.gather_from_hosts([int(stop), wanted], strategy).T
        self._agreed = int(wishes.min())
        return bool(stops.any())


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
        state = TrainingState(model, optimizer, directory, config.keep_checkpoint_max)
        newest = checkpoint_files.latest(config.model_dir)
        if newest is not None:
            state.resume(newest)
            console.log(f"resumed at step {state.step} from {newest}")
        else:
            _start_weights(config, model, source.class_names)
    return state


def _start_weights(config, model, class_names):
    """Assigns the weights that a new run starts from: those of `--checkpoint`, a linear head of zeros."""
    if config.checkpoint:
        required = ("encoder", "projection head") if not config.pretraining and config.head_on_projections else (
            "encoder",)
        loaded = restoring.warm_start(model, config.checkpoint, required, class_names)
        for line in loaded.lines:
            console.log(line)
        if not (config.pretraining or config.zero_init_logits_layer or "linear head" in loaded.left_out):
            console.log("the linear head goes on from the checkpoint's, and from the labels that it has seen; "
                         "--zero_init_logits_layer begins a new one")
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
    storage.write_bytes(os.path.join(directory, "views.png"), tf.io.encode_png(grid).numpy())
    with writer.as_default(step=0):
        tf.summary.image("views", grid[tf.newaxis])


def train(config: Config, source: Source, strategy: tf.distribute.Strategy, stop: signals.StopSignals,
          lock: Lock | None) -> Trained:
    """Trains to the last step, from the newest checkpoint of `config.model_dir` if there is one.

    Args:
      config: settings, with `seed` and `model_dir` filled in.
      source: the data set.
      strategy: that of this process.
      stop: when a signal requests it, on any host, all of them save and raise `errors.Stopped`.
      lock: the lock of `model_dir`, checked before every save; None on all hosts but the chief.

    Raises:
      UserError: a loss or a gradient is not finite any more, a checkpoint cannot be written, or `model_dir` was removed
        or replaced.
    """
    steps, is_chief = model_lib.count_steps(config, source.num_examples(config.train_split)), lock is not None
    # All hosts must take part in saving; the files of the others are temporary.
    with contextlib.nullcontext(config.model_dir) if is_chief else tempfile.TemporaryDirectory() as directory:
        state = build_training_state(config, source, strategy, directory)
        if lock is not None:
            lock.check()
        # Not before: settings that do not fit the run in this directory must not replace its own.
        run_directory.write_flags(directory, config, source.class_names, source.multi_label)
        run_directory.write_data(directory, source)
        writer = tf.summary.create_file_writer(os.path.join(directory, "train"))
        if state.step == 0 and is_chief:
            write_preview(config, source, directory, writer)
        return _run(config, source, strategy, steps, state, writer, stop, lock)


@contextlib.contextmanager
def _profile(directory, first, last, is_chief):
    """Writes a TensorBoard profile of what is done within it, the steps `first` to `last`; the chief says where."""
    with tf.profiler.experimental.Profile(directory):
        yield
    if is_chief:
        console.log(f"profile of steps {first} to {last}: {directory}/plugins/profile (tensorboard --logdir "
                     f"{directory})")


def _run(config, source, strategy, steps, state, writer, stop, lock):
    """Runs the outer loop: take some steps, check them, log, and save whenever a checkpoint is due."""
    pace, bag, is_chief = _Pace(), metrics.MeanMetrics(), lock is not None
    bar = progress.Progress(state.step, steps.train, config.train_batch_size, config.log_seconds, is_chief)
    prefix, logged = checkpoint_files.latest(config.model_dir), time.monotonic()
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
            means, sound_steps = run_steps(iterator, tf.constant(count))
        means = dict(zip(names, means.numpy().tolist()))
        if sound_steps < count:
            raise _divergence(config, step + int(sound_steps) + 1, means, prefix)
        step += count
        skipped += count * means.get("train/skipped_steps", 0.0)
        bar.update(step, watch(), means, timed=pace.calls > 0)
        pace.record(count, watch())
        bag.add(means, count)
        is_stopping = pace.agree(stop.requested, strategy)
        if lock is not None:
            lock.check()
        if is_stopping or step == due:
            prefix = _save(config, state, means, prefix)
        if is_stopping or step == due or time.monotonic() - logged > config.log_seconds:
            _log(writer, step, bag, is_chief)
            logged = time.monotonic()
        if is_stopping:
            bar.close()
            stop.stop(f"saved {prefix}; the same command goes on from there")
    bar.close()
    return Trained(state.model, step, prefix, bar.images_per_second, round(skipped))


def _divergence(config, step, means, prefix):
    """The error for a loss or a gradient that is not finite."""
    kept = f"{prefix} is the newest checkpoint" if prefix else "no checkpoint was written yet"
    float16 = ", another --precision than mixed_float16" if config.precision == "mixed_float16" else ""
    return TrainingDiverged(
        f"training has diverged: at step {step}, loss, gradients or weights are not finite (--learning_rate="
        f"{config.learning_rate:g}, by its schedule {means['learning_rate']:.3g}); {kept}: try a lower "
        f"--learning_rate, longer --warmup_epochs{float16} (with --allow_flag_changes, to go on from there)")


def _log(writer, step, bag, is_chief):
    """Writes the mean metrics since the last time to TensorBoard, and tells if the encoder has collapsed."""
    means = bag.means()
    bag.clear()
    try:
        storage.write_scalars(writer, step, means)
    except tf.errors.OpError as error:  # Pictures of the training are not worth its end.
        console.log(f"warning: TensorBoard's events of step {step} could not be written ({first_line(error)})")
    spread = means.get("train/embedding_std")
    if is_chief and spread is not None and spread < _COLLAPSED:
        console.log(f"warning: at step {step} all images have nearly the same embedding (train/embedding_std "
                     f"{spread:.4f}; 1: spread in all directions): the encoder has collapsed; try a lower "
                     "--learning_rate or another --temperature")


def _save(config, state, means, newest):
    """Writes a checkpoint; all hosts do that together.

    Raises:
      UserError: it cannot, or should not, be written; names the `newest` one there is.
    """
    variables = [v for v in state.model.variables + state.optimizer.variables() if v.dtype.is_floating]
    if not all(tf.reduce_all(tf.math.is_finite(variable)) for variable in variables):
        raise _divergence(config, state.step, means, newest)
    try:
        return state.save()
    except (tf.errors.OpError, OSError) as error:
        if hosts.is_lost_host(error):
            raise
        kept = f"{newest} is whole" if newest else "there is none before it"
        raise UserError(f"--model_dir={state.directory}: ckpt-{state.step} could not be written "
                        f"({first_line(error)}); {kept}: make room or mend the directory, and start the same command "
                        "again") from error


def _prepare(config, source, strategy, state):
    """The function that takes steps, the data from the present step on, and the names of the metrics."""
    train_step = TrainStep(model=state.model, optimizer=state.optimizer, config=config,
                           num_classes=source.num_classes, seed=config.seed, strategy=strategy)
    batch = config.train_batch_size // strategy.num_replicas_in_sync
    dataset = data.distribute(strategy, lambda context, _: data.build_train_dataset(
        config, source, config.seed, batch, state.step, context))
    return make_run_steps(train_step), iter(dataset), train_step.metric_names


_LEAST_LOSS_SCALE = 1.0  # Keras's LossScaleOptimizer halves no further.


def metric_names(config):
    """The scalars that a step reports, under the original's TensorBoard tags and, with float16, two of ours."""
    names = ["contrast_loss", "contrast_acc", "contrast_entropy", "embedding_std"] if config.pretraining else []
    names += ["supervised_loss", "supervised_acc"] if config.has_linear_head else []
    names += ["weight_decay", "total_loss"] + (["loss_scale", "skipped_steps"] if _scales_loss(config) else [])
    return [f"train/{name}" for name in names] + ["learning_rate"]


def _scales_loss(config):
    return config.precision == "mixed_float16"


def _are_finite(tensors):
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def _add(left, right):
    """Sums two nests of tensors."""
    return tf.nest.map_structure(tf.add, left, right)


def linear_head_gradients(head, variables, gradients, moments, rate_ratio):
    """`gradients` with those of the linear head made what `--linear_head_learning_rate` asks for.

    LARS without trust ratio and momentum SGD are linear in the gradient, so that its scale is a learning rate.

    Args:
      head: the model's `SupervisedHead`.
      variables: those that `gradients` belong to.
      gradients: this replica's parts of the gradients; what is done here is linear in them.
      moments: mean and variance [inputs] of the head's input over the batch of all replicas.
      rate_ratio: learning rate of the head over that of the encoder.
    """
    place = {variable.ref(): index for index, variable in enumerate(variables)}
    dense = head.linear_layer.dense
    kernel, bias = place[dense.kernel.ref()], place[dense.bias.ref()]
    standardized = objective.standardized_gradients(gradients[kernel], gradients[bias], *moments)
    gradients = list(gradients)
    gradients[kernel], gradients[bias] = (rate_ratio * gradient for gradient in standardized)
    return gradients


class TrainStep:
    """One training step. Call it with a distributed batch, inside a `tf.function`, outside of replica context.

    In micro-batches (Gao et al. 2021, arXiv:2101.06983), a first pass embeds them one after the other, the contrastive
    loss of all embeddings is differentiated at the embeddings, and a second pass takes each micro-batch's gradient of
    <embeddings, that derivative>. Both passes see the same views and the same batch statistics, those of the
    micro-batch; only the second one moves the moving statistics.
    """

    def __init__(self, *, model, optimizer, config, num_classes, seed, strategy):
        """Creates the step.

        Args:
          model: a built `model_lib.Model`.
          optimizer: what `model_lib.build_optimizer` made; its `iterations` count the steps.
          config: settings.
          num_classes: of the linear head; None without labels.
          seed: the run's seed, an int.
          strategy: whose replicas share a batch.
        """
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._config, self._num_classes, self._seed = config, num_classes, seed
        self._replicas = strategy.num_replicas_in_sync
        self._rows = config.train_batch_size // self._replicas
        self._micro_batches = config.train_batch_size // (config.micro_batch_size or config.train_batch_size)
        self._micro_rows = self._rows // self._micro_batches
        self.metric_names = metric_names(config)

    @tf.autograph.experimental.do_not_convert  # Nothing to convert, and long to look for it in tf_keras.
    def __call__(self, batch):
        """Takes a step.

        Args:
          batch: (views [n, h, w, 3 or 6] in [0, 1], labels [n]) of every replica.

        Returns:
          float32 [len(metric_names)]: the scalars, means over the replicas; and whether the step is sound: a boolean,
          False if the loss or a gradient is not finite. A step that float16 leaves out is sound, as long as its loss
          scale can shrink.
        """
        step = self._in_micro_batches if self._micro_batches > 1 else self._at_once
        scalars = self._strategy.reduce("MEAN", step(batch), axis=None)
        return scalars[:-1], scalars[-1] == 1

    # What all forms of the step share; in replica context.

    def _images(self, views, first=0):
        """The network's input for this replica's rows from `first` on; `views` are these rows."""
        views = tf.cast(views, keras.backend.floatx())
        if not self._config.distorts_views:
            return views
        first_row = objective.replica_offset(self._rows, self._strategy) + first
        return model_lib.blurred_views(views, self._config, self._seed, self._optimizer.iterations, first_row,
                                       self._config.train_batch_size)

    def _part_of_gradient(self, loss):
        """What to differentiate: gradients are summed over replicas where their mean is wanted; float16 scales them."""
        shared = loss / self._replicas
        return self._optimizer.get_scaled_loss(shared) if _scales_loss(self._config) else shared

    def _gradients(self, tape, part):
        """Gradients of all trainable variables; what is not used, as a projection head in fine-tuning, has zeros."""
        return tape.gradient(part, self._model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    def _head_losses(self, endpoints, labels):
        """Loss and metrics of the linear head, which sees both views while pretraining; empty without one."""
        if "logits_sup" not in endpoints:
            return {}, {}
        views = endpoints["logits_sup"].shape[0] // labels.shape[0]
        return model_lib.supervised_losses(endpoints, tf.concat([labels] * views, 0), self._num_classes)

    def _head_moments(self, endpoints):
        """Mean and variance of the linear head's input over this replica's rows, if they are needed."""
        if self._config.linear_head_learning_rate is None:
            return ()
        return tf.nn.moments(endpoints["sup_head_input"], [0])

    def _finish(self, gradients, head_moments, losses, reported):
        """Adds the weight decay, updates the variables, and returns what is reported.

        Args:
          gradients: of this replica's part of the losses.
          head_moments: see `_head_moments`; may be stacked, [parts, inputs], for equal parts of the rows.
          losses: dict of scalars that add up to the total loss, without weight decay.
          reported: dict of further scalars.

        Returns:
          float32 [len(metric_names) + 1]: the metrics, and 1 if the step is sound, else 0.
        """
        variables, optimizer = self._model.trainable_variables, self._optimizer
        with tf.GradientTape() as tape:
            decay = model_lib.add_weight_decay(self._model, self._config.weight_decay, self._config.optimizer)
        decays = tape.gradient(decay, variables)
        if _scales_loss(self._config):
            gradients = optimizer.get_unscaled_gradients(gradients)
        gradients = [gradient if extra is None else gradient + extra / self._replicas
                     for gradient, extra in zip(gradients, decays)]
        if head_moments:
            moments = objective.merge_moments(*head_moments, self._strategy)
            gradients = linear_head_gradients(self._model.supervised_head, variables, gradients, moments,
                                              model_lib.linear_head_rate_ratio(self._config))
        learning_rate = optimizer.learning_rate(optimizer.iterations)
        finite = _are_finite([*losses.values(), *gradients])
        scaling = self._update(gradients, variables)
        if scaling:
            can_shrink = scaling["loss_scale"] > _LEAST_LOSS_SCALE
            finite = _are_finite(losses.values()) & (finite | scaling["skipped_steps"] & can_shrink)
        total = tf.add_n([tf.cast(loss, decay.dtype) for loss in losses.values()]) + decay
        reported = {**losses, **reported, **scaling, "weight_decay": decay, "total_loss": total}
        reported = {**{f"train/{name}": value for name, value in reported.items()}, "learning_rate": learning_rate}
        return tf.stack([tf.cast(value, tf.float32) for value in (*map(reported.get, self.metric_names), finite)])

    def _update(self, gradients, variables):
        """Applies the gradients; returns what there is to tell about loss scaling."""
        optimizer = self._optimizer
        if not _scales_loss(self._config):
            optimizer.apply_gradients(zip(gradients, variables))
            return {}
        scale = tf.identity(optimizer.loss_scale)
        with tf.control_dependencies([scale]):
            applied = optimizer.apply_gradients(zip(gradients, variables))
        with tf.control_dependencies([applied]):
            # After a step that was left out the count of good steps starts anew, and the scale has not grown.
            skipped = tf.equal(optimizer.dynamic_counter, 0) & (optimizer.loss_scale <= scale)
        return {"loss_scale": scale, "skipped_steps": skipped}

    # On the whole batch at once.

    def _at_once(self, batch):
        return self._strategy.run(self._whole, args=batch)

    def _whole(self, views, labels):
        with tf.GradientTape() as tape:
            endpoints = self._model(self._images(views), training=True)
            losses, reported = self._head_losses(endpoints, labels)
            if self._config.pretraining:
                contrast_losses, contrast_reported = model_lib.contrastive_losses(
                    endpoints["proj_head_output"], self._config, self._strategy)
                losses, reported = {**contrast_losses, **losses}, {**contrast_reported, **reported}
            part = self._part_of_gradient(tf.add_n(list(losses.values())))
        gradients = self._gradients(tape, part)
        return self._finish(gradients, self._head_moments(endpoints), losses, reported)

    # In micro-batches. The loops stand outside of replica context, since replicas cannot meet inside of a loop.

    def _in_micro_batches(self, batch):
        run = self._strategy.run
        contrast = ()
        if self._config.pretraining:
            embeddings = self._for_each(self._embed, batch, (), run(self._no_embeddings))
            contrast = run(self._at_embeddings, args=(embeddings,))
        sums = self._for_each(self._differentiate, batch, contrast, run(self._no_sums))
        return run(self._finish_sums, args=(sums, contrast))

    def _for_each(self, function, batch, constants, state):
        """Runs `function(batch, constants, number, state)` -> state for each micro-batch, one after the other."""
        def body(number, state):
            return number + 1, self._strategy.run(function, args=(batch, constants, number, state))

        return tf.while_loop(lambda number, _: number < self._micro_batches, body, (tf.constant(0), state),
                             parallel_iterations=1)[1]

    def _micro_batch(self, batch, number):
        """Images and labels of one micro-batch."""
        first, rows = number * self._micro_rows, self._micro_rows
        views, labels = (part[first:first + rows] for part in batch)
        views.set_shape([rows, *batch[0].shape[1:]])
        labels.set_shape([rows, *batch[1].shape[1:]])
        return self._images(views, first), labels

    def _no_embeddings(self):
        """Room for the embeddings of all micro-batches: [number, view, row, out_dim]."""
        width = self._model.projection_dim
        return tf.zeros([self._micro_batches, 2, self._micro_rows, width], keras.backend.floatx())

    def _embed(self, batch, constants, number, embeddings):
        """First pass: no activations are kept."""
        del constants
        images, _ = self._micro_batch(batch, number)
        with resnet.moving_statistics_kept():
            outputs = self._model(images, training=True)["proj_head_output"]
        return tf.tensor_scatter_nd_update(embeddings, [[number]], [tf.reshape(outputs, embeddings.shape[1:])])

    def _at_embeddings(self, embeddings):
        """The contrastive loss of the whole batch: its derivative at the embeddings, itself, and metrics."""
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            hidden = tf.reshape(tf.transpose(embeddings, [1, 0, 2, 3]), [2 * self._rows, embeddings.shape[-1]])
            losses, reported = model_lib.contrastive_losses(hidden, self._config, self._strategy)
            part = self._part_of_gradient(losses["contrast_loss"])
        return tape.gradient(part, embeddings), losses, reported

    def _no_sums(self):
        """Zeros for what `_differentiate` sums up: gradients, moments of the head's input, losses and metrics."""
        config, floatx = self._config, keras.backend.floatx()
        moments = ()
        if config.linear_head_learning_rate is not None:
            shape = [self._micro_batches, self._model.supervised_head.linear_layer.dense.kernel.shape[0]]
            moments = (tf.zeros(shape, floatx),) * 2
        gradients = [tf.zeros_like(variable) for variable in self._model.trainable_variables]
        losses = {"supervised_loss": tf.zeros([], floatx)} if config.has_linear_head else {}
        reported = {"supervised_acc": tf.zeros([])} if config.has_linear_head else {}
        return gradients, moments, losses, reported

    def _differentiate(self, batch, contrast, number, sums):
        """Second pass: adds one micro-batch's part of the gradients, of the head's losses and of its metrics."""
        images, labels = self._micro_batch(batch, number)
        with tf.GradientTape() as tape:
            endpoints = self._model(images, training=True)
            losses, reported = self._head_losses(endpoints, labels)
            losses, reported = tf.nest.map_structure(lambda value: value / self._micro_batches, (losses, reported))
            part = tf.add_n([self._part_of_gradient(loss) for loss in losses.values()] or [tf.zeros([])])
            if contrast:
                outputs = tf.reshape(endpoints["proj_head_output"], contrast[0].shape[1:])
                part = tf.cast(part, outputs.dtype) + tf.reduce_sum(contrast[0][number] * outputs)
        gradients = self._gradients(tape, part)
        moments = tuple(tf.tensor_scatter_nd_update(tf.zeros_like(total), [[number]], [moment])
                        for total, moment in zip(sums[1], self._head_moments(endpoints)))
        return _add(sums, (gradients, moments, losses, reported))

    def _finish_sums(self, sums, contrast):
        gradients, moments, losses, reported = sums
        if contrast:
            losses, reported = {**contrast[1], **losses}, {**contrast[2], **reported}
        return self._finish(gradients, moments, losses, reported)
