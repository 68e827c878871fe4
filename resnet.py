"""The encoder: ResNets with optional width, selective kernels (SK), squeeze-and-excitation (SE) and two stems.

Attribute names and list positions are a file format: they are the keys of the original's checkpoints. `None` fills the
positions where the original has layers without weights.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from config import RESNET_DEPTHS as DEPTHS

BATCH_NORM_EPSILON = 1e-5
_SK_MIN_CHANNELS = 32


@contextlib.contextmanager
def moving_statistics_kept(model: tf.Module) -> Iterator[None]:
    """A context in which batch norm uses the statistics of the batch, but does not update its moving statistics.

    It acts when a function is traced. Use it in cross-replica context, since replicas are traced in turns.
    """
    layers = [layer for layer in model.submodules if isinstance(layer, BatchNorm)]
    for layer in layers:
        layer.updates_statistics = False
    try:
        yield
    finally:
        for layer in layers:
            layer.updates_statistics = True


class BatchNorm(keras.layers.Layer):
    """Batch normalisation over all axes but the last, over one replica or over all of them.

    Unlike Keras's fused form, the moving variance takes the batch's biased variance, so that one replica equals many.
    A layer that is not `trainable` uses, and keeps, its moving statistics.
    """

    def __init__(self, momentum: float = 0.9, epsilon: float = BATCH_NORM_EPSILON, center: bool = True,
                 gamma_initializer: str = "ones", across_replicas: bool = True, **kwargs: Any):
        """Creates the layer.

        Args:
          momentum: of the moving statistics, in [0, 1].
          epsilon: added to the variance.
          center: whether there is a beta.
          gamma_initializer: "ones" or "zeros".
          across_replicas: whether training statistics are those of the global batch.
          **kwargs: for the base class.
        """
        super().__init__(**kwargs)
        self.momentum = momentum
        self.epsilon = epsilon
        self.center = center
        self.gamma_initializer = gamma_initializer
        self.across_replicas = across_replicas
        self.updates_statistics = True

    def build(self, input_shape: tf.TensorShape) -> None:
        """Adds gamma, beta (if centred), moving_mean and moving_variance, each [channels]."""
        # Statistics and scale stay in float32 under half precision.
        add = functools.partial(self.add_weight, shape=input_shape[-1:], experimental_autocast=False)
        moving = functools.partial(add, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                                   aggregation=tf.VariableAggregation.MEAN)
        self.gamma = add("gamma", initializer=self.gamma_initializer)
        self.beta = add("beta", initializer="zeros") if self.center else None
        self.moving_mean = moving("moving_mean", initializer="zeros")
        self.moving_variance = moving("moving_variance", initializer="ones")
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Normalises `inputs` [..., channels]; in training, by the batch's statistics, which it also averages."""
        beta = tf.zeros_like(self.gamma) if self.beta is None else self.beta
        if not (training and self.trainable):
            return self._normalize(inputs, self.moving_mean, self.moving_variance, beta)
        fusable = inputs.shape.rank == 4 and inputs.dtype != tf.float64
        if fusable and not self._synchronizes():
            outputs, mean, variance = self._fused(inputs, beta)
        else:
            mean, variance = self._moments(inputs)
            outputs = self._normalize(inputs, mean, variance, beta)
        if self.updates_statistics:
            for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
                moving.assign_sub((moving - tf.stop_gradient(batch)) * (1.0 - self.momentum))
        return outputs

    def _synchronizes(self):
        context = tf.distribute.get_replica_context()
        return self.across_replicas and context is not None and context.num_replicas_in_sync > 1

    def _fused(self, inputs, beta):
        """TensorFlow's fused kernel, its variance turned back from N / (N - 1) to the biased one."""
        # The raw operation: its wrapper would quietly raise epsilon.
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=self.gamma, offset=beta, mean=[], variance=[], epsilon=self.epsilon, is_training=True)
        count = tf.cast(tf.size(inputs) / tf.size(mean), variance.dtype)
        return outputs, mean, variance * tf.maximum(count - 1, 1) / count

    def _moments(self, inputs):
        """Mean and biased variance over the batch of this replica, or of all."""
        inputs = tf.cast(inputs, self.gamma.dtype)
        mean, variance = tf.nn.moments(inputs, list(range(inputs.shape.rank - 1)))
        if not self._synchronizes():
            return mean, variance
        context = tf.distribute.get_replica_context()
        all_reduce = functools.partial(context.all_reduce, tf.distribute.ReduceOp.MEAN)
        # Variance within replicas plus variance between them: no difference of large squares.
        global_mean = all_reduce(mean)
        return global_mean, all_reduce(variance + tf.square(mean - global_mean))

    def _normalize(self, inputs, mean, variance, beta):
        scale = self.gamma * tf.math.rsqrt(variance + self.epsilon)
        return tf.cast(tf.cast(inputs, scale.dtype) * scale + (beta - mean * scale), inputs.dtype)


class BatchNormRelu(keras.layers.Layer):
    """Batch norm, and ReLU if wanted."""

    def __init__(self, relu: bool = True, init_zero: bool = False, center: bool = True, norm: Callable = BatchNorm,
                 **kwargs: Any):
        """`init_zero`: gamma starts at 0, so that a residual block starts as its shortcut. `norm`: makes the layer."""
        super().__init__(**kwargs)
        self.relu = relu
        self.bn = norm(center=center, gamma_initializer="zeros" if init_zero else "ones")

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Same shape as `inputs`."""
        outputs = self.bn(inputs, training=training)
        return tf.nn.relu(outputs) if self.relu else outputs


def conv2d(filters: int, kernel_size: int = 1, strides: int = 1, **kwargs: Any) -> keras.layers.Conv2D:
    """A convolution that starts from `VarianceScaling()`; each layer needs its own initializer."""
    return keras.layers.Conv2D(
        filters, kernel_size, strides, kernel_initializer=keras.initializers.VarianceScaling(), **kwargs)


def fixed_padding(inputs: tf.Tensor, kernel_size: int) -> tf.Tensor:
    """Zero-pads height and width by kernel_size - 1, whatever the input's size."""
    before = (kernel_size - 1) // 2
    after = kernel_size - 1 - before
    return tf.pad(inputs, [[0, 0], [before, after], [before, after], [0, 0]])


class Conv2dFixedPadding(keras.layers.Layer):
    """Convolution without bias; strided ones pad by kernel size alone, so that the grid does not depend on the size."""

    def __init__(self, filters: int, kernel_size: int, strides: int = 1, **kwargs: Any):
        """`filters`: output channels; `kernel_size` and `strides` are those of both axes."""
        super().__init__(**kwargs)
        self.kernel_size = kernel_size
        self.strides = strides
        self.conv2d = conv2d(filters, kernel_size, strides, padding="same" if strides == 1 else "valid", use_bias=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """[n, h, w, c] to [n, ceil(h / strides), ceil(w / strides), filters]."""
        return self.conv2d(inputs if self.strides == 1 else fixed_padding(inputs, self.kernel_size))


class PaddedAveragePooling(keras.layers.Layer):
    """The 2x2 average pooling of ResNet-D's shortcuts (He et al. 2018, arXiv:1812.01187)."""

    def __init__(self, strides: int, **kwargs: Any):
        """`strides`: 1 or 2."""
        super().__init__(**kwargs)
        self.strides = strides

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """[n, h, w, c] to [n, ceil(h / strides), ceil(w / strides), c]."""
        if self.strides == 1:
            return tf.nn.avg_pool2d(inputs, 2, 1, "SAME")
        return tf.nn.avg_pool2d(fixed_padding(inputs, 2), 2, self.strides, "VALID")


class SelectiveKernelConv(keras.layers.Layer):
    """Two 3x3 convolutions mixed by attention over channels (Li et al. 2019, arXiv:1903.06586), as in SimCLR v2."""

    def __init__(self, filters: int, strides: int, sk_ratio: float, norm: Callable, **kwargs: Any):
        """`sk_ratio`: channels of the attention's bottleneck over `filters`, at least 32 channels."""
        super().__init__(**kwargs)
        self.conv2d_fixed_padding = Conv2dFixedPadding(2 * filters, 3, strides)
        self.batch_norm_relu = BatchNormRelu(norm=norm)
        self.conv2d_0 = conv2d(max(int(filters * sk_ratio), _SK_MIN_CHANNELS), use_bias=False)
        self.batch_norm_relu_1 = BatchNormRelu(norm=norm)
        self.conv2d_1 = conv2d(2 * filters, use_bias=False)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """[n, h, w, c] to [n, h / strides, w / strides, filters]."""
        outputs = self.batch_norm_relu(self.conv2d_fixed_padding(inputs), training=training)
        branches = tf.stack(tf.split(outputs, 2, axis=-1))
        summary = tf.reduce_mean(tf.reduce_sum(branches, axis=0), [1, 2], keepdims=True)
        mixing = self.conv2d_1(self.batch_norm_relu_1(self.conv2d_0(summary), training=training))
        mixing = tf.nn.softmax(tf.stack(tf.split(mixing, 2, axis=-1)), axis=0)
        return tf.reduce_sum(branches * mixing, axis=0)


class SqueezeExcitation(keras.layers.Layer):
    """Channels weighted by a sigmoid of their means (Hu et al. 2018, arXiv:1709.01507)."""

    def __init__(self, filters: int, channels: int, se_ratio: float, **kwargs: Any):
        """`se_ratio`: width of the bottleneck over `filters`; `channels`: of the input."""
        super().__init__(**kwargs)
        self.se_reduce = conv2d(max(1, int(filters * se_ratio)))
        self.se_expand = conv2d(channels)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Same shape as `inputs`, [n, h, w, channels]."""
        means = tf.reduce_mean(inputs, [1, 2], keepdims=True)
        return tf.sigmoid(self.se_expand(tf.nn.relu(self.se_reduce(means)))) * inputs


def _run(layers, inputs, training):
    """Applies the layers that are there, in order; only batch norm and what holds it ask for `training`."""
    for layer in layers:
        if isinstance(layer, (BatchNormRelu, SelectiveKernelConv)):
            inputs = layer(inputs, training=training)
        elif layer is not None:
            inputs = layer(inputs)
    return inputs


def _shortcut(filters, strides, sk_ratio, norm):
    """The projection shortcut: strided 1x1 convolution, or ResNet-D's pooling in SK networks."""
    norm_layer = BatchNormRelu(relu=False, norm=norm)
    if sk_ratio == 0:
        return [Conv2dFixedPadding(filters, 1, strides), norm_layer]
    # The original has a separate padding layer in strided shortcuts.
    padding = [None] if strides > 1 else []
    return padding + [PaddedAveragePooling(strides), Conv2dFixedPadding(filters, 1), norm_layer]


class ResidualBlock(keras.layers.Layer):
    """The basic block: two 3x3 convolutions."""

    expansion = 1

    def __init__(self, filters: int, strides: int, use_projection: bool, sk_ratio: float, se_ratio: float,
                 norm: Callable, **kwargs: Any):
        """`use_projection`: whether the shortcut changes shape. `norm`: makes batch norm layers."""
        super().__init__(**kwargs)
        self.shortcut_layers = _shortcut(filters, strides, sk_ratio, norm) if use_projection else []
        self.conv2d_bn_layers = [
            Conv2dFixedPadding(filters, 3, strides), BatchNormRelu(norm=norm),
            Conv2dFixedPadding(filters, 3), BatchNormRelu(relu=False, init_zero=True, norm=norm)]
        self.se_layer = SqueezeExcitation(filters, filters, se_ratio) if se_ratio > 0 else None

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """[n, h, w, c] to [n, h / strides, w / strides, filters]."""
        outputs = _run(self.conv2d_bn_layers + [self.se_layer], inputs, training)
        return tf.nn.relu(outputs + _run(self.shortcut_layers, inputs, training))


class BottleneckBlock(keras.layers.Layer):
    """1x1, 3x3 (or SK) and 1x1 convolutions; four times as wide outside as inside."""

    expansion = 4

    def __init__(self, filters: int, strides: int, use_projection: bool, sk_ratio: float, se_ratio: float,
                 norm: Callable, **kwargs: Any):
        """`filters`: inner width. `use_projection`: whether the shortcut changes shape. `norm`: makes batch norm."""
        super().__init__(**kwargs)
        outer = filters * self.expansion
        self.projection_layers = _shortcut(outer, strides, sk_ratio, norm) if use_projection else []
        spatial = [SelectiveKernelConv(filters, strides, sk_ratio, norm)] if sk_ratio > 0 else [
            Conv2dFixedPadding(filters, 3, strides), BatchNormRelu(norm=norm)]
        # None: where the original has DropBlock layers, which its own training never enables.
        self.conv_relu_dropblock_layers = [
            Conv2dFixedPadding(filters, 1), BatchNormRelu(norm=norm), None, *spatial, None,
            Conv2dFixedPadding(outer, 1), BatchNormRelu(relu=False, init_zero=True, norm=norm), None]
        if se_ratio > 0:
            self.conv_relu_dropblock_layers.append(SqueezeExcitation(filters, outer, se_ratio))

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """[n, h, w, c] to [n, h / strides, w / strides, 4 * filters]."""
        outputs = _run(self.conv_relu_dropblock_layers, inputs, training)
        return tf.nn.relu(outputs + _run(self.projection_layers, inputs, training))


class BlockGroup(keras.layers.Layer):
    """Blocks of one width; the first one projects and strides."""

    def __init__(self, block: type, filters: int, blocks: int, strides: int, **kwargs: Any):
        """`block`: makes a block from filters, strides and use_projection; `blocks`: how many."""
        super().__init__(**kwargs)
        self.layers = [block(filters, strides, True)] + [block(filters, 1, False) for _ in range(blocks - 1)]

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """[n, h, w, c] to [n, h / strides, w / strides, filters * expansion]."""
        for layer in self.layers:
            inputs = layer(inputs, training=training)
        return inputs


def _stem(width, cifar_stem, sk_ratio, norm):
    """Layers up to batch norm; the original has a named identity before the last of them."""
    if cifar_stem:
        convolutions = [Conv2dFixedPadding(width, 3)]
    elif sk_ratio > 0:  # ResNet-D
        convolutions = [Conv2dFixedPadding(width // 2, 3, 2), BatchNormRelu(norm=norm),
                        Conv2dFixedPadding(width // 2, 3), BatchNormRelu(norm=norm), Conv2dFixedPadding(width, 3)]
    else:
        convolutions = [Conv2dFixedPadding(width, 7, 2)]
    return convolutions + [None, BatchNormRelu(norm=norm)]


class ResNet(keras.layers.Layer):
    """A ResNet without classifier. Returns its endpoints by name."""

    def __init__(self, bottleneck: bool, blocks: tuple[int, ...], width_multiplier: int = 1, cifar_stem: bool = False,
                 sk_ratio: float = 0.0, se_ratio: float = 0.0, batch_norm_decay: float = 0.9, global_bn: bool = True,
                 **kwargs: Any):
        """See `resnet`; `blocks`: of each of the four groups."""
        super().__init__(**kwargs)
        norm = functools.partial(BatchNorm, momentum=batch_norm_decay, across_replicas=global_bn)
        kind = BottleneckBlock if bottleneck else ResidualBlock
        block = functools.partial(kind, sk_ratio=sk_ratio, se_ratio=se_ratio, norm=norm)
        width = 64 * width_multiplier
        self.cifar_stem = cifar_stem
        self.num_features = width * 2 ** (len(blocks) - 1) * kind.expansion
        self.initial_conv_relu_max_pool = _stem(width, cifar_stem, sk_ratio, norm)
        self.block_groups = [
            BlockGroup(block, width * 2**group, count, strides=1 if group == 0 else 2)
            for group, count in enumerate(blocks)]

    def freeze_up_to(self, block: int) -> None:
        """Freezes weights and statistics of the stem (0) and of the groups 1 to `block`."""
        frozen = self.initial_conv_relu_max_pool + self.block_groups[:block]
        for layer in frozen:
            if layer is not None:
                layer.trainable = False

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> dict[str, tf.Tensor]:
        """Runs the network.

        Args:
          inputs: [n, h, w, 3] in [0, 1].
          training: whether batch norm uses the batch.

        Returns:
          dict: `initial_conv` (before batch norm), `initial_max_pool` (the stem's output), `block_group1` to
          `block_group4`, all [n, h', w', c], and `final_avg_pool`, the representation h, [n, c].
        """
        endpoints = {}
        *convolutions, norm = self.initial_conv_relu_max_pool
        endpoints["initial_conv"] = _run(convolutions, inputs, training)
        outputs = norm(endpoints["initial_conv"], training=training)
        if not self.cifar_stem:
            outputs = tf.nn.max_pool2d(outputs, 3, 2, "SAME")
        endpoints["initial_max_pool"] = outputs
        for number, group in enumerate(self.block_groups, 1):
            outputs = group(outputs, training=training)
            endpoints[f"block_group{number}"] = outputs
        # A mean in half precision would lose digits.
        endpoints["final_avg_pool"] = tf.reduce_mean(tf.cast(outputs, self.variable_dtype), [1, 2])
        return endpoints


def resnet(resnet_depth: int, width_multiplier: int = 1, cifar_stem: bool = False, *, sk_ratio: float = 0.0,
           se_ratio: float = 0.0, batch_norm_decay: float = 0.9, global_bn: bool = True) -> ResNet:
    """Makes a `ResNet`.

    Args:
      resnet_depth: a key of `config.RESNET_DEPTHS`.
      width_multiplier: integer, at least 1.
      cifar_stem: 3x3 convolution of stride 1 without pooling, in place of 7x7 of stride 2 with pooling.
      sk_ratio: above 0: selective kernels (bottlenecks only) with ResNet-D shortcuts and stem.
      se_ratio: above 0: squeeze-and-excitation.
      batch_norm_decay: momentum of the moving statistics.
      global_bn: whether training statistics are those of all replicas.
    """
    bottleneck, blocks = DEPTHS[resnet_depth]
    return ResNet(bottleneck, blocks, width_multiplier, cifar_stem, sk_ratio, se_ratio, batch_norm_decay, global_bn)
