"""The model (encoder, projection head and linear head), the learning-rate schedule, the optimizer and weight decay."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

import resnet
from config import Config
from lars_optimizer import LARSOptimizer
from runtime.batch_norm import BatchNorm

# ---------------------------------------------------------------------------------------------------------- heads


class LinearLayer(keras.layers.Layer):
    """Dense layer, optionally followed by batch norm."""

    def __init__(
        self,
        units: int | None = None,
        use_bias: bool = True,
        use_bn: bool = False,
        norm: Callable = BatchNorm,
        **kwargs: Any,
    ):
        """Creates the layer.

        Args:
          units: number of outputs; if None, the number of inputs.
          use_bias: whether to add an offset (batch norm's beta with `use_bn`, otherwise the dense
            layer's bias).
          use_bn: whether batch norm follows the dense layer.
          norm: constructor for the batch norm layer.
          **kwargs: arguments for the base class.
        """
        super().__init__(**kwargs)
        self.units = units
        self.use_bias = use_bias
        self.dense: keras.layers.Dense | None = None
        norm = functools.partial(norm, dtype=self.dtype_policy)
        self.bn_relu = (
            resnet.BatchNormRelu(relu=False, center=use_bias, norm=norm, dtype=self.dtype_policy)
            if use_bn
            else None
        )

    def build(self, input_shape: tf.TensorShape) -> None:
        """Creates the dense layer, whose default width is the number of inputs."""
        self.dense = keras.layers.Dense(
            self.units or input_shape[-1],
            use_bias=self.use_bias and self.bn_relu is None,
            dtype=self.dtype_policy,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        )
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Maps [n, inputs] to [n, units]."""
        outputs = self.dense(inputs)
        return outputs if self.bn_relu is None else self.bn_relu(outputs, training=training)


class ProjectionHead(keras.layers.Layer):
    """The projection head g: the identity, a linear layer, or an MLP with ReLU (paper, 4.2).

    Each layer has batch norm. The paper's MLP has two layers; the default of three is that of the
    original TF2 release (SimCLR v2).
    """

    def __init__(
        self,
        mode: str = "nonlinear",
        out_dim: int = 128,
        num_layers: int = 3,
        norm: Callable = BatchNorm,
        **kwargs: Any,
    ):
        """Creates the head.

        Args:
          mode: none, linear or nonlinear.
          out_dim: size of the projections z; not used with mode="none".
          num_layers: number of layers with mode="nonlinear". Hidden layers are as wide as their
            input.
          norm: constructor for batch norm layers.
          **kwargs: arguments for the base class.
        """
        # Keep h in its own precision; each layer casts its input.
        super().__init__(autocast=False, **kwargs)
        num_hidden = {"none": -1, "linear": 0, "nonlinear": num_layers - 1}[mode]
        make_layer = functools.partial(LinearLayer, use_bn=True, norm=norm)
        # The last layer is exempt from mixed precision, so the loss receives full-precision
        # projections.
        last = (
            []
            if mode == "none"
            else [make_layer(out_dim, use_bias=False, dtype=self.variable_dtype)]
        )
        self.linear_layers = [make_layer() for _ in range(num_hidden)] + last

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> list[tf.Tensor]:
        """Returns a list: h [n, c], then the hidden layers' activations, then the projection z [n, out_dim]."""
        stages = [inputs]
        for layer in self.linear_layers:
            outputs = layer(stages[-1], training=training)
            stages.append(outputs if layer is self.linear_layers[-1] else tf.nn.relu(outputs))
        return stages


class SupervisedHead(keras.layers.Layer):
    """The linear head (pretraining) or classifier (fine-tuning)."""

    def __init__(self, num_classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.linear_layer = LinearLayer(num_classes, dtype=self.variable_dtype)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps [n, c] to logits [n, num_classes]."""
        return self.linear_layer(inputs)


# ---------------------------------------------------------------------------------------------------------- model


class Model(keras.Model):
    """The encoder f, the projection head g and, if configured, the linear head."""

    def __init__(self, config: Config, num_classes: int | None):
        """Creates the model. If `config` enables the linear head, `num_classes` is the number of its outputs."""
        super().__init__(name="model")
        norm = functools.partial(
            BatchNorm, momentum=config.batch_norm_decay, across_replicas=config.global_bn
        )
        self.resnet_model = resnet.resnet(
            config.resnet_depth,
            config.width_multiplier,
            config.cifar_stem,
            sk_ratio=config.sk_ratio,
            se_ratio=config.se_ratio,
            batch_norm_decay=config.batch_norm_decay,
            global_bn=config.global_bn,
        )
        self._projection_head = ProjectionHead(
            config.effective_proj_head_mode, config.proj_out_dim, config.num_proj_layers, norm
        )
        self.supervised_head = SupervisedHead(num_classes) if config.has_linear_head else None
        self._ft_proj_selector = config.ft_proj_selector
        self._stops_head_gradient = config.pretraining

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> dict[str, tf.Tensor]:
        """Computes the outputs of the encoder and the heads.

        Args:
          inputs: [n, h, w, 3] in [0, 1]. In pretraining, all first views come before all second
            views.
          training: whether batch norm uses batch statistics.

        Returns:
          A dict with the encoder's endpoints (see `resnet.ResNet.call`), `proj_head_input` (h, [n, c],
          the same as `final_avg_pool`), `proj_head_output` (z, [n, out_dim]) and, with a linear head,
          `logits_sup` [n, num_classes]. In pretraining, no gradient flows from the linear head into the encoder.
        """
        endpoints = self.resnet_model(inputs, training=training)
        stages = self._projection_head(endpoints["final_avg_pool"], training=training)
        endpoints = {**endpoints, "proj_head_input": stages[0], "proj_head_output": stages[-1]}
        if self.supervised_head is not None:
            head_input = tf.cast(stages[self._ft_proj_selector], self.variable_dtype)
            head_input = tf.stop_gradient(head_input) if self._stops_head_gradient else head_input
            endpoints["logits_sup"] = self.supervised_head(head_input)
        return endpoints

    @property
    def num_proj_layers(self) -> int:
        """Number of layers in the projection head."""
        return len(self._projection_head.linear_layers)

    @property
    def projection_dim(self) -> int:
        """Size of the projections z."""
        layers = self._projection_head.linear_layers
        return layers[-1].units if layers else self.resnet_model.num_features

    @property
    def endpoint_names(self) -> list[str]:
        """Names of this model's SavedModel outputs."""
        names = [*self.resnet_model.endpoint_names]
        if self.num_proj_layers:
            names += ["proj_head_input", "proj_head_output"]
        if self.supervised_head is not None:
            names.append("logits_sup")
        return names

    def freeze(self, fine_tune_after_block: int) -> None:
        """Freezes the layers that fine-tuning does not train.

        These are the projection-head layers that the classifier does not use and, unless
        `fine_tune_after_block` is -1, the stem and the block groups up to `fine_tune_after_block`.
        """
        if fine_tune_after_block >= 0:
            self.resnet_model.freeze_up_to(fine_tune_after_block)
        num_used = self._ft_proj_selector % (self.num_proj_layers + 1)
        for layer in self._projection_head.linear_layers[num_used:]:
            layer.trainable = False


@contextlib.contextmanager
def _precision_policy(name: str) -> Iterator[None]:
    """Returns a context in which new layers use the Keras policy `name`. Variables never use half precision."""
    # With policy None, layers use floatx (float32; float64 in tests).
    keras.mixed_precision.set_global_policy(None if name == "float32" else name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(None)


# The function needs no conversion, and AutoGraph is slow.
@tf.autograph.experimental.do_not_convert
def build_model(config: Config, num_classes: int | None) -> Model:
    """Builds a `Model` and creates its variables in the scope of the current strategy."""
    with _precision_policy(config.precision):
        model = Model(config, num_classes)
        model.build((None, config.image_size, config.image_size, 3))
    return model


# ----------------------------------------------------------------------------------------- steps and learning rate


@dataclasses.dataclass(frozen=True)
class Steps:
    """The length of a run and its intervals, in steps.

    Attributes:
      train: total number of steps.
      warmup: number of warm-up steps.
      epoch: number of steps per epoch.
      checkpoint: number of steps between checkpoints.
      evaluation: number of steps between evaluations, or 0 to disable evaluations during training.
    """

    train: int
    warmup: int
    epoch: int
    checkpoint: int
    evaluation: int

    def next_save(self, step: int) -> int:
        """Returns the first step after `step` at which a checkpoint is written, at most the last training step."""
        intervals = filter(None, (self.checkpoint, self.evaluation))
        return min(self.train, *(step + interval - step % interval for interval in intervals))


def get_train_steps(
    num_examples: int, train_steps: int, train_epochs: int, train_batch_size: int
) -> int:
    """Returns `train_steps` if positive, or else floor(num_examples * train_epochs / batch) + 1, as in the original."""
    return train_steps or num_examples * train_epochs // train_batch_size + 1


def get_warmup_steps(num_examples: int, warmup_epochs: float, train_batch_size: int) -> int:
    """Returns the number of warm-up steps, rounded down, as in the original."""
    return int(warmup_epochs * num_examples // train_batch_size)


def count_steps(config: Config, num_examples: int) -> Steps:
    """Converts the epoch counts in `config` to step counts, for a training split with `num_examples` examples."""
    batch = config.train_batch_size
    epoch = max(round(num_examples / batch), 1)
    return Steps(
        train=get_train_steps(num_examples, config.train_steps, config.train_epochs, batch),
        warmup=get_warmup_steps(num_examples, config.warmup_epochs, batch),
        epoch=epoch,
        checkpoint=config.checkpoint_steps or config.checkpoint_epochs * epoch,
        evaluation=config.eval_epochs * epoch,
    )


def scaled_learning_rate(learning_rate: float, scaling: str, batch_size: int) -> float:
    """Multiplies `learning_rate` by B / 256 (linear) or sqrt(B) (sqrt), where B is the batch size (paper, B.1)."""
    return learning_rate * (batch_size / 256 if scaling == "linear" else math.sqrt(batch_size))


def warmup_and_cosine(
    step: int | tf.Tensor, peak: float, warmup_steps: int, train_steps: int
) -> tf.Tensor:
    """Computes a learning rate with linear warm-up and cosine decay to 0 (paper, 2.3).

    Args:
      step: scalar number or tensor. The first step is 0.
      peak: learning rate at the end of the warm-up.
      warmup_steps: length of the warm-up; may be 0.
      train_steps: step at which the learning rate reaches 0.

    Returns:
      Float32 scalar.
    """
    step = tf.cast(step, tf.float32)
    progress = (step - warmup_steps) / max(train_steps - warmup_steps, 1)
    cosine = 0.5 * peak * (1 + tf.cos(math.pi * tf.clip_by_value(progress, 0.0, 1.0)))
    return tf.where(step < warmup_steps, step / max(warmup_steps, 1) * peak, cosine)


class WarmUpAndCosineDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Learning-rate schedule based on `warmup_and_cosine`. Lengths are given in epochs or, for the total, in steps."""

    def __init__(
        self,
        base_learning_rate: float,
        num_examples: int,
        name: str | None = None,
        *,
        train_batch_size: int,
        train_epochs: int = 100,
        train_steps: int = 0,
        warmup_epochs: float = 10.0,
        learning_rate_scaling: str = "linear",
    ):
        """Creates the schedule.

        Args:
          base_learning_rate: learning rate before scaling by the batch size.
          num_examples: size of the training split.
          name: name of the schedule.
          train_batch_size: global batch size.
          train_epochs: training length in epochs; unused if `train_steps` is above 0.
          train_steps: training length in steps.
          warmup_epochs: warm-up length in epochs.
          learning_rate_scaling: linear or sqrt; see `scaled_learning_rate`.
        """
        super().__init__()
        self.settings = dict(
            base_learning_rate=base_learning_rate,
            num_examples=num_examples,
            name=name,
            train_batch_size=train_batch_size,
            train_epochs=train_epochs,
            train_steps=train_steps,
            warmup_epochs=warmup_epochs,
            learning_rate_scaling=learning_rate_scaling,
        )
        self.peak = scaled_learning_rate(
            base_learning_rate, learning_rate_scaling, train_batch_size
        )
        self.warmup_steps = get_warmup_steps(num_examples, warmup_epochs, train_batch_size)
        self.train_steps = get_train_steps(
            num_examples, train_steps, train_epochs, train_batch_size
        )

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        return warmup_and_cosine(step, self.peak, self.warmup_steps, self.train_steps)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments that recreate this schedule."""
        return dict(self.settings)


def build_schedule(config: Config, num_examples: int) -> WarmUpAndCosineDecay:
    """Builds the learning-rate schedule specified by `config`."""
    return WarmUpAndCosineDecay(
        config.learning_rate,
        num_examples,
        train_batch_size=config.train_batch_size,
        train_epochs=config.train_epochs,
        train_steps=config.train_steps,
        warmup_epochs=config.warmup_epochs,
        learning_rate_scaling=config.learning_rate_scaling,
    )


# --------------------------------------------------------------------------------------- optimizer and weight decay


def _batch_norm_refs(model: Model) -> set[Any]:
    return {
        v.ref()
        for layer in model.submodules
        if isinstance(layer, BatchNorm)
        for v in layer.variables
    }


def _head_refs(model: Model) -> set[Any]:
    return (
        set()
        if model.supervised_head is None
        else {v.ref() for v in model.supervised_head.variables}
    )


def linear_head_rate_ratio(config: Config) -> float:
    """Returns the learning rate of the linear head or the classifier, divided by that of the encoder.

    In distillation, it is T^2, where T is the temperature. The loss depends on the classifier's
    weights W only through V = W / T. Since dL/dW = dL/dV / T, this rate updates V as for T = 1. LARS
    does not apply its trust ratio to the classifier, so without the factor, V would be updated 1 /
    T^2 times as fast, and a run with T = 0.1 diverged.
    """
    if config.train_mode == "distill":
        return config.distill_temperature**2
    if config.linear_head_learning_rate is None:
        return 1.0
    batch = config.train_batch_size
    head_rate = scaled_learning_rate(config.linear_head_learning_rate, "linear", batch)
    rate = scaled_learning_rate(config.learning_rate, config.learning_rate_scaling, batch)
    return head_rate / rate


def build_optimizer(
    config: Config,
    learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
    model: Model,
) -> keras.optimizers.legacy.Optimizer:
    """Builds the optimizer and creates its slots.

    LARS excludes vectors (biases, batch norm) and the linear head from weight decay and from the
    trust ratio. With `linear_head_learning_rate`, the gradients of the linear head are multiplied by
    the ratio of its learning rate to that of the encoder. This is equivalent to a learning rate of
    its own, because the updates of momentum SGD, and of LARS without the trust ratio, are linear in
    the gradient. With float16, the optimizer is wrapped to add dynamic loss scaling, and its
    `iterations` variable also counts skipped steps.

    Args:
      config: settings.
      learning_rate: float or schedule.
      model: a built `Model`. Call `Model.freeze` first, if needed.
    """
    head, ratio = _head_refs(model), linear_head_rate_ratio(config)

    def scale_head_gradients(gradients_and_variables):
        return [
            (gradient * ratio if variable.ref() in head else gradient, variable)
            for gradient, variable in gradients_and_variables
        ]

    transformers = [] if ratio == 1 else [scale_head_gradients]
    if config.optimizer == "momentum":
        optimizer = keras.optimizers.legacy.SGD(
            learning_rate, config.momentum, nesterov=True, gradient_transformers=transformers
        )
    elif config.optimizer == "adam":
        optimizer = keras.optimizers.legacy.Adam(learning_rate)
    else:
        optimizer = LARSOptimizer(
            learning_rate,
            config.momentum,
            weight_decay=config.weight_decay,
            exclude_from_weight_decay=lambda var: var.shape.rank <= 1 or var.ref() in head,
            gradient_transformers=transformers,
        )
    # In float16, small gradients underflow unless the loss is scaled up. Steps with overflowing
    # gradients are skipped.
    if config.precision == "mixed_float16":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    create_slots(optimizer, model)
    return optimizer


def create_slots(optimizer: keras.optimizers.legacy.Optimizer, model: Model) -> None:
    """Creates an optimizer's slots for a model's trainable variables.

    Slots cannot be created within a traced loop over replicas. They must also exist before a
    checkpoint is restored; otherwise, slots missing from the checkpoint would go unnoticed.
    """
    optimizer._create_all_weights(model.trainable_variables)  # Keras has no public method for this.


def add_weight_decay(model: Model, weight_decay: float, optimizer: str) -> tf.Tensor:
    """Returns the weight-decay term of the loss: weight_decay * sum of |v|^2 / 2 over variables v.

    LARS itself applies weight decay to the encoder and the projection head, so the sum includes
    only the kernel of the linear head. With other optimizers, the sum includes all trainable
    variables except those of batch norm.

    Args:
      model: a built `Model`.
      weight_decay: float.
      optimizer: momentum, adam or lars.

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
