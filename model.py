"""Projection and supervised heads, the whole model, its learning-rate schedule, optimizer and weight decay."""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

import data_util
import metrics
import objective
import resnet
from config import Config
from large_batch import blocked_nt_xent
from lars_optimizer import LARSOptimizer
from runtime import rng

_BLUR = 3  # purpose of random draws; data.py has the others


# ---------------------------------------------------------------------------------------------------------- heads


class LinearLayer(keras.layers.Layer):
    """A dense layer with bias, or one without bias and with batch norm."""

    def __init__(self, units: int | None = None, use_bias: bool = True, use_bn: bool = False,
                 norm: Callable = resnet.BatchNorm, **kwargs: Any):
        """Creates the layer.

        Args:
          units: outputs; None: as many as inputs.
          use_bias: whether there is an offset: the dense layer's bias, or batch norm's beta.
          use_bn: whether batch norm follows.
          norm: makes the batch norm layer.
          **kwargs: for the base class.
        """
        super().__init__(**kwargs)
        self.units = units
        self.use_bias = use_bias
        self.dense = None
        norm = functools.partial(norm, dtype=self.dtype_policy)
        self.bn_relu = resnet.BatchNormRelu(relu=False, center=use_bias, norm=norm, dtype=self.dtype_policy) \
            if use_bn else None

    def build(self, input_shape: tf.TensorShape) -> None:
        """Makes the dense layer, once the number of inputs is known."""
        self.dense = keras.layers.Dense(
            self.units or input_shape[-1], use_bias=self.use_bias and self.bn_relu is None, dtype=self.dtype_policy,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01))
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """[n, inputs] to [n, units]."""
        outputs = self.dense(inputs)
        return outputs if self.bn_relu is None else self.bn_relu(outputs, training=training)


class ProjectionHead(keras.layers.Layer):
    """The head g: nothing, one linear layer, or hidden layers as wide as their input and a linear one (paper, 4.2)."""

    def __init__(self, mode: str = "nonlinear", out_dim: int = 128, num_layers: int = 3,
                 norm: Callable = resnet.BatchNorm, **kwargs: Any):
        """`mode`: none, linear or nonlinear; `out_dim`: of the last layer; `num_layers`: of the non-linear head."""
        super().__init__(autocast=False, **kwargs)  # h stays what it is; the layers cast for themselves.
        hidden = {"none": -1, "linear": 0, "nonlinear": num_layers - 1}[mode]
        make = functools.partial(LinearLayer, use_bn=True, norm=norm)
        # What the loss sees is not rounded to half precision.
        last = [] if mode == "none" else [make(out_dim, use_bias=False, dtype=self.variable_dtype)]
        self.linear_layers = [make() for _ in range(hidden)] + last

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> list[tf.Tensor]:
        """All stages, from the input [n, c] to the projection z [n, out_dim]; ReLU after all layers but the last."""
        stages = [inputs]
        for number, layer in enumerate(self.linear_layers, 1):
            outputs = layer(stages[-1], training=training)
            stages.append(outputs if number == len(self.linear_layers) else tf.nn.relu(outputs))
        return stages


class SupervisedHead(keras.layers.Layer):
    """The linear classifier."""

    def __init__(self, num_classes: int, **kwargs: Any):
        """`num_classes`: number of logits."""
        super().__init__(**kwargs)
        self.linear_layer = LinearLayer(num_classes, dtype=self.variable_dtype)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """[n, c] to logits [n, num_classes]."""
        return self.linear_layer(inputs)


# ---------------------------------------------------------------------------------------------------------- model


class Model(keras.Model):
    """Encoder, projection head and, if wanted, the linear head."""

    def __init__(self, config: Config, num_classes: int | None):
        """`num_classes` is that of the linear head; it is not read if `config` has none."""
        super().__init__(name="model")
        norm = functools.partial(resnet.BatchNorm, momentum=config.batch_norm_decay, across_replicas=config.global_bn)
        self.resnet_model = resnet.resnet(
            config.resnet_depth, config.width_multiplier, config.cifar_stem, sk_ratio=config.sk_ratio,
            se_ratio=config.se_ratio, batch_norm_decay=config.batch_norm_decay, global_bn=config.global_bn)
        self._projection_head = ProjectionHead(
            config.effective_proj_head_mode, config.proj_out_dim, config.num_proj_layers, norm)
        self.supervised_head = SupervisedHead(num_classes) if config.has_linear_head else None
        self._selector = config.ft_proj_selector
        self._detached = config.pretraining

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> dict[str, tf.Tensor]:
        """Runs encoder and heads.

        Args:
          inputs: [n, h, w, 3] in [0, 1]. In pretraining, all first views before all second views.
          training: whether batch norm uses the batch.

        Returns:
          The encoder's endpoints (`resnet.ResNet.call`), `proj_head_input` [n, c], `proj_head_output` [n, out_dim],
          and, with a linear head, `sup_head_input` [n, c'] and `logits_sup` [n, num_classes]. While pretraining, no
          gradient flows from the linear head into its input.
        """
        endpoints = self.resnet_model(inputs, training=training)
        stages = self._projection_head(endpoints["final_avg_pool"], training=training)
        endpoints = {**endpoints, "proj_head_input": stages[0], "proj_head_output": stages[-1]}
        if self.supervised_head is not None:
            chosen = tf.cast(stages[self._selector], self.variable_dtype)
            chosen = tf.stop_gradient(chosen) if self._detached else chosen
            endpoints.update(sup_head_input=chosen, logits_sup=self.supervised_head(chosen))
        return endpoints

    @property
    def num_proj_layers(self) -> int:
        """Layers of the projection head."""
        return len(self._projection_head.linear_layers)

    @property
    def projection_dim(self) -> int:
        """Size of the projections z."""
        layers = self._projection_head.linear_layers
        return layers[-1].units if layers else self.resnet_model.num_features

    @property
    def endpoint_names(self) -> list[str]:
        """Endpoints of the parts that this model has."""
        names = ["initial_conv", "initial_max_pool", *(f"block_group{i}" for i in range(1, 5)), "final_avg_pool"]
        names += ["proj_head_input", "proj_head_output"] if self.num_proj_layers else []
        return names + (["logits_sup"] if self.supervised_head is not None else [])

    def freeze(self, fine_tune_after_block: int) -> None:
        """Freezes what fine-tuning leaves alone.

        That is the blocks up to `fine_tune_after_block` (-1: none), and the layers of the projection head above the
        one whose output is the input of the linear head.
        """
        if fine_tune_after_block >= 0:
            self.resnet_model.freeze_up_to(fine_tune_after_block)
        used = self._selector if self._selector >= 0 else self.num_proj_layers + 1 + self._selector
        for layer in self._projection_head.linear_layers[used:]:
            layer.trainable = False


@contextlib.contextmanager
def _precision(name):
    """Layers made within it compute in half precision if `name` says so; their variables are float32 throughout."""
    # No policy is Keras's floatx: float32, or float64 in tests.
    keras.mixed_precision.set_global_policy(None if name == "float32" else name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(None)


@tf.autograph.experimental.do_not_convert  # There is nothing to convert, and looking for it in tf_keras takes long.
def build_model(config: Config, num_classes: int | None) -> Model:
    """A `Model` with all its variables made, in the current strategy's scope."""
    with _precision(config.precision):
        model = Model(config, num_classes)
        model.build((None, config.image_size, config.image_size, 3))
    return model


# ----------------------------------------------------------------------------------------------- views and losses


def blurred_views(views: tf.Tensor, config: Config, seed: int, step: int | tf.Tensor, first_row: int | tf.Tensor = 0,
                  total_rows: int | None = None) -> tf.Tensor:
    """Splits the views of each image and blurs half of them (paper, Appendix A).

    The draws for an image depend on the seed, the step, the view, and its row in the batch of all replicas.

    Args:
      views: [n, h, w, 3 * number of views] in [0, 1].
      config: settings.
      seed: int.
      step: int or scalar tensor.
      first_row: row of `views` in the batch of all replicas.
      total_rows: size of that batch; None: n.

    Returns:
      [number of views * n, h, w, 3] in [0, 1], all first views before all second.
    """
    parts = tf.split(views, views.shape[-1] // 3, axis=-1)
    if config.blurs_views:
        draw = rng.fold_in(tf.constant([seed, _BLUR], tf.int64), step)
        parts = [data_util.batch_random_blur(part, rng.fold_in(draw, number), config.image_size,
                                             first_row=first_row, total_rows=total_rows)
                 for number, part in enumerate(parts)]
    return tf.concat(parts, 0)


def contrastive_loss(hidden: tf.Tensor, config: Config, strategy: tf.distribute.Strategy | None
                     ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns the loss of the contrastive task, and its metrics.

    Args:
      hidden: [2n, d] projections, all first views before all second.
      config: settings.
      strategy: the strategy whose replicas share the batch, or None. Call it in replica context.

    Returns:
      loss: scalar.
      metrics: dict of scalars without gradient, by the names of the original.
    """
    spread = metrics.embedding_std(tf.stop_gradient(hidden), strategy)
    if config.contrastive_loss != "nt_xent" or config.negatives != "both":
        loss, logits_ab, labels = objective.add_alternative_contrastive_loss(
            hidden, config.contrastive_loss, config.hidden_norm, config.temperature, config.effective_margin,
            config.semi_hard, config.negatives == "cross_view", strategy)
    elif blocked_nt_xent.is_used(hidden, strategy, config.loss_block_rows):
        loss, accuracy, entropy = blocked_nt_xent.contrastive_loss(
            hidden, config.hidden_norm, config.temperature, strategy, config.loss_block_rows)
        return loss, {"contrast_acc": accuracy, "contrast_entropy": entropy, "embedding_std": spread}
    else:
        loss, logits_ab, labels = objective.add_contrastive_loss(
            hidden, config.hidden_norm, config.temperature, strategy)
    logits_ab = tf.stop_gradient(logits_ab)
    return loss, {"contrast_acc": metrics.contrastive_accuracy(logits_ab, labels),
                  "contrast_entropy": metrics.contrastive_entropy(logits_ab), "embedding_std": spread}


def supervised_loss(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the loss and the accuracy of the linear head, two scalars.

    Args:
      logits: [views * n, classes]; all first views before all second, where there are two.
      labels: int [n], or [n, classes] of 1, 0 and -1, see `sources.source.Source.multi_label`.
    """
    labels = tf.concat([labels] * (logits.shape[0] // labels.shape[0]), 0)
    if labels.shape.rank == 2:
        return objective.add_multi_label_loss(labels, logits), metrics.multi_label_accuracy(labels, logits)
    loss = objective.add_supervised_loss(tf.one_hot(labels, logits.shape[-1]), logits)
    return loss, tf.reduce_mean(tf.cast(metrics.top_1_hits(labels, logits), tf.float32))


# ----------------------------------------------------------------------------------------- steps and learning rate


@dataclasses.dataclass(frozen=True)
class Steps:
    """Lengths in steps: of the whole training, its warm-up, an epoch, and between checkpoints."""

    train: int
    warmup: int
    epoch: int
    checkpoint: int


def get_train_steps(num_examples: int, train_steps: int, train_epochs: int, train_batch_size: int) -> int:
    """`train_steps` if above 0, else the steps of `train_epochs`, rounded as in the original."""
    return train_steps or num_examples * train_epochs // train_batch_size + 1


def get_warmup_steps(num_examples: int, warmup_epochs: float, train_batch_size: int) -> int:
    """Steps of the warm-up, rounded as in the original."""
    return int(round(warmup_epochs * num_examples // train_batch_size))


def count_steps(config: Config, num_examples: int) -> Steps:
    """Turns the epochs of `config` into steps, for a training split of `num_examples`."""
    batch = config.train_batch_size
    epoch = max(int(round(num_examples / batch)), 1)
    return Steps(
        train=get_train_steps(num_examples, config.train_steps, config.train_epochs, batch),
        warmup=get_warmup_steps(num_examples, config.warmup_epochs, batch),
        epoch=epoch,
        checkpoint=config.checkpoint_steps or config.checkpoint_epochs * epoch,
    )


def scaled_learning_rate(learning_rate: float, scaling: str, batch_size: int) -> float:
    """The peak learning rate: linear, learning_rate * B / 256; sqrt, learning_rate * sqrt(B) (paper, B.1)."""
    return learning_rate * (batch_size / 256 if scaling == "linear" else math.sqrt(batch_size))


def warmup_and_cosine(step: int | tf.Tensor, peak: float, warmup_steps: int, train_steps: int) -> tf.Tensor:
    """Linear warm-up from 0 to `peak`, then half a cosine down to 0 (paper, 2.3).

    Args:
      step: number or tensor, from 0 on.
      peak: learning rate at the end of the warm-up.
      warmup_steps: may be 0.
      train_steps: step at which 0 is reached.

    Returns:
      Learning rate, a float32 scalar.
    """
    step = tf.cast(step, tf.float32)
    progress = (step - warmup_steps) / max(train_steps - warmup_steps, 1)
    cosine = 0.5 * peak * (1 + tf.cos(math.pi * tf.clip_by_value(progress, 0.0, 1.0)))
    return tf.where(step < warmup_steps, step / max(warmup_steps, 1) * peak, cosine)


class WarmUpAndCosineDecay(keras.optimizers.schedules.LearningRateSchedule):
    """`warmup_and_cosine` with the lengths in epochs."""

    def __init__(self, base_learning_rate: float, num_examples: int, name: str | None = None, *, train_batch_size: int,
                 train_epochs: int = 100, train_steps: int = 0, warmup_epochs: float = 10.0,
                 learning_rate_scaling: str = "linear"):
        """`base_learning_rate` is scaled by the batch size; `num_examples`: of the training split."""
        super().__init__()
        self.settings = dict(
            base_learning_rate=base_learning_rate, num_examples=num_examples, name=name,
            train_batch_size=train_batch_size, train_epochs=train_epochs, train_steps=train_steps,
            warmup_epochs=warmup_epochs, learning_rate_scaling=learning_rate_scaling)
        self.peak = scaled_learning_rate(base_learning_rate, learning_rate_scaling, train_batch_size)
        self.warmup_steps = get_warmup_steps(num_examples, warmup_epochs, train_batch_size)
        self.train_steps = get_train_steps(num_examples, train_steps, train_epochs, train_batch_size)

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        """Learning rate at `step`."""
        return warmup_and_cosine(step, self.peak, self.warmup_steps, self.train_steps)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same schedule again."""
        return dict(self.settings)


def build_schedule(config: Config, num_examples: int) -> WarmUpAndCosineDecay:
    """The learning-rate schedule that `config` asks for."""
    return WarmUpAndCosineDecay(
        config.learning_rate, num_examples, train_batch_size=config.train_batch_size, train_epochs=config.train_epochs,
        train_steps=config.train_steps, warmup_epochs=config.warmup_epochs,
        learning_rate_scaling=config.learning_rate_scaling)


# --------------------------------------------------------------------------------------- optimizer and weight decay


def _batch_norm_refs(model):
    return {v.ref() for layer in model.submodules if isinstance(layer, resnet.BatchNorm) for v in layer.variables}


def _head_refs(model):
    return set() if model.supervised_head is None else {v.ref() for v in model.supervised_head.variables}


def build_optimizer(config: Config, learning_rate: float | keras.optimizers.schedules.LearningRateSchedule, model: Model
                   ) -> keras.optimizers.legacy.Optimizer:
    """Returns the optimizer of a training, with its slots.

    LARS applies neither weight decay nor trust ratio to vectors (biases, batch norm) and to the linear head. With
    float16 the optimizer is wrapped in dynamic loss scaling; its `iterations` also count the steps that it skips.

    Args:
      config: settings.
      learning_rate: number or schedule.
      model: a built `Model`, whose frozen parts are set.
    """
    if config.optimizer == "momentum":
        optimizer = keras.optimizers.legacy.SGD(learning_rate, config.momentum, nesterov=True)
    elif config.optimizer == "adam":
        optimizer = keras.optimizers.legacy.Adam(learning_rate)
    else:
        head = _head_refs(model)
        optimizer = LARSOptimizer(
            learning_rate, config.momentum, weight_decay=config.weight_decay,
            exclude_from_weight_decay=lambda var: var.shape.rank <= 1 or var.ref() in head)
    # Gradients in float16 need a factor that keeps them from vanishing; a step in which they overflow is skipped.
    if config.precision == "mixed_float16":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    create_slots(optimizer, model)
    return optimizer


def create_slots(optimizer: keras.optimizers.legacy.Optimizer, model: Model) -> None:
    """Creates the slots of an optimizer for the trainable variables of a model.

    They cannot be created within a traced loop over replicas, and a checkpoint without them would go unnoticed.
    """
    optimizer._create_all_weights(model.trainable_variables)  # Keras has no public method for this.


def add_weight_decay(model: Model, weight_decay: float, optimizer: str) -> tf.Tensor:
    """weight_decay * sum of |v|^2 / 2 over the variables that the optimizer does not decay by itself.

    LARS decays the encoder and the projection head itself: there remain the linear head's weights without bias. For
    the others: every trainable variable but batch norm's.

    Args:
      model: a built `Model`.
      weight_decay: number.
      optimizer: name, one of momentum, adam and lars.

    Returns:
      Scalar.
    """
    if optimizer == "lars":
        head = _head_refs(model)
        decayed = [v for v in model.trainable_variables if v.ref() in head and v.shape.rank > 1]
    else:
        norms = _batch_norm_refs(model)
        decayed = [v for v in model.trainable_variables if v.ref() not in norms]
    if not decayed:
        return tf.zeros([], keras.backend.floatx())
    return weight_decay * tf.add_n([tf.nn.l2_loss(v) for v in decayed])


# ------------------------------------------------------------------------------- a learning rate for the linear head


def linear_head_rate_ratio(config: Config) -> float:
    """Learning rate of the linear head over that of the encoder."""
    if config.linear_head_learning_rate is None:
        return 1.0
    own = scaled_learning_rate(config.linear_head_learning_rate, "linear", config.train_batch_size)
    return own / scaled_learning_rate(config.learning_rate, config.learning_rate_scaling, config.train_batch_size)


def linear_head_gradients(
    head: SupervisedHead, variables: list[tf.Variable], gradients: list[tf.Tensor], mean: tf.Tensor,
    variance: tf.Tensor, rate_ratio: float
) -> list[tf.Tensor]:
    """Replaces the gradients of the linear head by those that `--linear_head_learning_rate` asks for.

    LARS without trust ratio and momentum SGD are linear in the gradient, so that a factor acts as a learning rate.

    Args:
      head: the linear head.
      variables: the variables that `gradients` belong to.
      gradients: the share of this replica, in which the result is linear.
      mean: [inputs], of the input of the head over the batch of all replicas.
      variance: [inputs], likewise.
      rate_ratio: learning rate of the head over that of the encoder.

    Returns:
      The gradients of all variables.
    """
    index_of = {variable.ref(): index for index, variable in enumerate(variables)}
    kernel, bias = (index_of[variable.ref()] for variable in (head.linear_layer.dense.kernel,
                                                              head.linear_layer.dense.bias))
    gradients = list(gradients)
    gradients[kernel], gradients[bias] = (rate_ratio * gradient for gradient in standardized_gradients(
        gradients[kernel], gradients[bias], mean, variance))
    return gradients


def standardized_gradients(kernel_gradient: tf.Tensor, bias_gradient: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
                           ) -> tuple[tf.Tensor, tf.Tensor]:
    """Turns the gradients of a linear layer into those of gradient descent on standardized inputs.

    With z = (h - mean) / s, the layer h W + b is z V + c, where V = s W and c = b + mean W. A step along the gradients
    of V and c, written in W and b, is what this returns; so the layer learns as fast as behind a batch norm without
    scale and offset, and yet is a plain linear layer.

    Args:
      kernel_gradient: [inputs, classes], of W.
      bias_gradient: [classes], of b.
      mean: [inputs], of h over the batch.
      variance: [inputs], of h over the batch.

    Returns:
      The two gradients to descend along instead.
    """
    # Inputs that hardly vary must not get huge steps.
    variance = variance + 1e-3 * tf.reduce_mean(variance) + 1e-12
    kernel = (kernel_gradient - mean[:, tf.newaxis] * bias_gradient) / variance[:, tf.newaxis]
    return kernel, bias_gradient - tf.linalg.matvec(kernel, mean, transpose_a=True)
