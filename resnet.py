"""The encoder f: ResNets of any width, with optional selective kernels (SK) and squeeze-and-excitation (SE).

Attribute names and list positions must not change, because they are the keys in the original's
checkpoints. `None` marks positions where the original has a layer without weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from config import RESNET_DEPTHS as DEPTHS
from runtime.batch_norm import BatchNorm

_SK_MIN_CHANNELS = 32


class BatchNormRelu(keras.layers.Layer):
    """Batch norm, optionally followed by ReLU."""

    def __init__(
        self,
        relu: bool = True,
        init_zero: bool = False,
        center: bool = True,
        norm: Callable = BatchNorm,
        **kwargs: Any,
    ):
        """Creates the layer.

        Args:
          relu: whether to apply ReLU.
          init_zero: whether to initialize gamma to 0, so that a residual block initially equals its
            shortcut.
          center: whether to add an offset beta.
          norm: constructor for the batch norm layer.
          **kwargs: arguments for the base class.
        """
        super().__init__(**kwargs)
        self.relu = relu
        self.bn = norm(center=center, gamma_initializer="zeros" if init_zero else "ones")

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Normalizes `inputs` [..., channels], then applies ReLU if `relu` is True."""
        return self.bn(inputs, training=training, relu=self.relu)


class Conv2D(keras.layers.Conv2D):
    """Convolution with square kernels. Its zero padding does not depend on the input size, even if it is strided."""

    def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Maps [n, h, w, c] and [k, k, c, f] to [n, ceil(h / strides), ceil(w / strides), f]."""
        size, stride = kernel.shape[0], self.strides[0]
        rows, columns = (_covering_starts(n, size, stride) for n in inputs.shape[1:3])
        if rows and columns:
            return _matrix_product(inputs, kernel, rows, columns)
        if stride == 1:
            return tf.nn.conv2d(inputs, kernel, 1, "SAME")
        return tf.nn.conv2d(fixed_padding(inputs, size), kernel, stride, "VALID")


def _matrix_product(
    inputs: tf.Tensor, kernel: tf.Tensor, rows: Sequence[int], columns: Sequence[int]
) -> tf.Tensor:
    """Computes a convolution whose kernel covers the whole image at every position.

    This is the case in the last layers for images of 32 x 32 pixels. On CPUs, a matrix product is
    up to 20 times faster there, because convolutions also multiply the padding.

    Args:
      inputs: [n, h, w, c].
      kernel: [k, k, c, f].
      rows, columns: where the part of the kernel that covers the image starts (`_covering_starts`).

    Returns:
      [n, len(rows), len(columns), f].
    """
    kernel = tf.convert_to_tensor(kernel)  # casts once, with mixed precision
    parts = [
        tf.slice(kernel, [row, column, 0, 0], [*inputs.shape[1:3], -1, -1])
        for row in rows
        for column in columns
    ]
    matrix = tf.reshape(tf.concat(parts, -1), [math.prod(inputs.shape[1:]), -1])
    outputs = tf.reshape(inputs, [-1, matrix.shape[0]]) @ matrix
    return tf.reshape(outputs, [-1, len(rows), len(columns), kernel.shape[-1]])


def _covering_starts(length: int | None, kernel_size: int, stride: int) -> Sequence[int]:
    """Returns where the part of the kernel that covers the image starts, for each position along one axis.

    The result is empty if the kernel does not cover the image at every position, or if the length
    of the image is not known.
    """
    before = (kernel_size - 1) // 2
    starts = range(before, before - (length or 0), -stride)
    return starts if length and starts[-1] >= 0 and before + length <= kernel_size else ()


def conv2d(filters: int, kernel_size: int = 1, strides: int = 1, **kwargs: Any) -> Conv2D:
    """Creates a convolution with its own initializer, since a shared initializer would repeat its random values."""
    return Conv2D(
        filters,
        kernel_size,
        strides,
        padding="same",
        kernel_initializer=keras.initializers.VarianceScaling(),
        **kwargs,
    )


def fixed_padding(inputs: tf.Tensor, kernel_size: int) -> tf.Tensor:
    """Zero-pads height and width by kernel_size - 1, independently of the input size."""
    before = (kernel_size - 1) // 2
    after = kernel_size - 1 - before
    return tf.pad(inputs, [[0, 0], [before, after], [before, after], [0, 0]])


class Conv2dFixedPadding(keras.layers.Layer):
    """Convolution without bias. The layer only adds a level to its checkpoint key, as in the original."""

    def __init__(self, filters: int, kernel_size: int, strides: int = 1, **kwargs: Any):
        """Creates the layer with `filters` output channels. Kernel size and stride are the same for both axes."""
        super().__init__(**kwargs)
        self.conv2d = conv2d(filters, kernel_size, strides, use_bias=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, ceil(h / strides), ceil(w / strides), filters]."""
        return self.conv2d(inputs)


class PaddedAveragePooling(keras.layers.Layer):
    """2x2 average pooling for ResNet-D shortcuts (He et al. 2018, arXiv:1812.01187)."""

    def __init__(self, strides: int, **kwargs: Any):
        """Creates the layer. `strides` must be 1 or 2."""
        super().__init__(**kwargs)
        self.strides = strides

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, ceil(h / strides), ceil(w / strides), c]."""
        if self.strides == 1:
            return tf.nn.avg_pool2d(inputs, 2, 1, "SAME")
        return tf.nn.avg_pool2d(fixed_padding(inputs, 2), 2, self.strides, "VALID")


class SelectiveKernelConv(keras.layers.Layer):
    """Two 3x3 convolutions mixed by channel attention (Li et al. 2019, arXiv:1903.06586), as in SimCLR v2."""

    def __init__(self, filters: int, strides: int, sk_ratio: float, norm: Callable, **kwargs: Any):
        """Creates the layer. The attention's bottleneck has `filters` * `sk_ratio` channels, but at least 32."""
        super().__init__(**kwargs)
        self.conv2d_fixed_padding = Conv2dFixedPadding(2 * filters, 3, strides)
        self.batch_norm_relu = BatchNormRelu(norm=norm)
        self.conv2d_0 = conv2d(max(int(filters * sk_ratio), _SK_MIN_CHANNELS), use_bias=False)
        self.batch_norm_relu_1 = BatchNormRelu(norm=norm)
        self.conv2d_1 = conv2d(2 * filters, use_bias=False)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, h / strides, w / strides, filters]."""
        outputs = self.batch_norm_relu(self.conv2d_fixed_padding(inputs), training=training)
        branches = tf.stack(tf.split(outputs, 2, axis=-1))
        summary = tf.reduce_mean(tf.reduce_sum(branches, axis=0), [1, 2], keepdims=True)
        mixing = self.conv2d_1(self.batch_norm_relu_1(self.conv2d_0(summary), training=training))
        mixing = tf.nn.softmax(tf.stack(tf.split(mixing, 2, axis=-1)), axis=0)
        return tf.reduce_sum(branches * mixing, axis=0)


class SqueezeExcitation(keras.layers.Layer):
    """Squeeze-and-excitation: channel weights computed from channel means (Hu et al. 2018, arXiv:1709.01507)."""

    def __init__(self, filters: int, channels: int, se_ratio: float, **kwargs: Any):
        """Creates the layer for inputs with `channels` channels. The bottleneck has `filters` * `se_ratio` channels."""
        super().__init__(**kwargs)
        self.se_reduce = conv2d(max(1, int(filters * se_ratio)))
        self.se_expand = conv2d(channels)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Multiplies `inputs` [n, h, w, channels] by the channel weights."""
        means = tf.reduce_mean(inputs, [1, 2], keepdims=True)
        return tf.sigmoid(self.se_expand(tf.nn.relu(self.se_reduce(means)))) * inputs


def _apply_layers(
    layers: list[keras.layers.Layer | None], inputs: tf.Tensor, training: bool | None
) -> tf.Tensor:
    """Applies the layers in order, and skips `None` entries. Passes `training` to layers that contain batch norm."""
    for layer in layers:
        if isinstance(layer, (BatchNormRelu, SelectiveKernelConv)):
            inputs = layer(inputs, training=training)
        elif layer is not None:
            inputs = layer(inputs)
    return inputs


def _shortcut(
    filters: int, strides: int, sk_ratio: float, norm: Callable
) -> list[keras.layers.Layer | None]:
    """Returns the layers of a projection shortcut: pooling (SK networks only), 1x1 convolution, batch norm."""
    norm_layer = BatchNormRelu(relu=False, norm=norm)
    if sk_ratio == 0:
        return [Conv2dFixedPadding(filters, 1, strides), norm_layer]
    # A `None` entry stands for the separate padding layer that strided shortcuts have in the
    # original.
    padding = [None] if strides > 1 else []
    return padding + [PaddedAveragePooling(strides), Conv2dFixedPadding(filters, 1), norm_layer]


class ResidualBlock(keras.layers.Layer):
    """The basic residual block: two 3x3 convolutions."""

    expansion = 1

    def __init__(
        self,
        filters: int,
        strides: int,
        use_projection: bool,
        sk_ratio: float,
        se_ratio: float,
        norm: Callable,
        **kwargs: Any,
    ):
        """Creates the block.

        Args:
          filters: number of output channels.
          strides: stride of the first convolution.
          use_projection: whether the shortcut is a projection rather than the identity.
          sk_ratio: if above 0, uses the ResNet-D shortcut.
          se_ratio: if above 0, enables squeeze-and-excitation.
          norm: constructor for batch norm layers.
          **kwargs: arguments for the base class.
        """
        super().__init__(**kwargs)
        self.shortcut_layers = _shortcut(filters, strides, sk_ratio, norm) if use_projection else []
        self.conv2d_bn_layers = [
            Conv2dFixedPadding(filters, 3, strides),
            BatchNormRelu(norm=norm),
            Conv2dFixedPadding(filters, 3),
            BatchNormRelu(relu=False, init_zero=True, norm=norm),
        ]
        self.se_layer = SqueezeExcitation(filters, filters, se_ratio) if se_ratio > 0 else None

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, h / strides, w / strides, filters]."""
        outputs = _apply_layers(self.conv2d_bn_layers + [self.se_layer], inputs, training)
        return tf.nn.relu(outputs + _apply_layers(self.shortcut_layers, inputs, training))


class BottleneckBlock(keras.layers.Layer):
    """The bottleneck block: 1x1, 3x3 (or SK) and 1x1 convolutions; the last has four times as many filters."""

    expansion = 4

    def __init__(
        self,
        filters: int,
        strides: int,
        use_projection: bool,
        sk_ratio: float,
        se_ratio: float,
        norm: Callable,
        **kwargs: Any,
    ):
        """Creates a block whose first two convolutions have `filters` channels; see `ResidualBlock`."""
        super().__init__(**kwargs)
        output_filters = filters * self.expansion
        self.projection_layers = (
            _shortcut(output_filters, strides, sk_ratio, norm) if use_projection else []
        )
        spatial = (
            [SelectiveKernelConv(filters, strides, sk_ratio, norm)]
            if sk_ratio > 0
            else [Conv2dFixedPadding(filters, 3, strides), BatchNormRelu(norm=norm)]
        )
        # Each `None` entry stands for a DropBlock layer, which the original never enables during
        # training.
        self.conv_relu_dropblock_layers = [
            Conv2dFixedPadding(filters, 1),
            BatchNormRelu(norm=norm),
            None,
            *spatial,
            None,
            Conv2dFixedPadding(output_filters, 1),
            BatchNormRelu(relu=False, init_zero=True, norm=norm),
            None,
        ]
        if se_ratio > 0:
            self.conv_relu_dropblock_layers.append(
                SqueezeExcitation(filters, output_filters, se_ratio)
            )

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, h / strides, w / strides, 4 * filters]."""
        outputs = _apply_layers(self.conv_relu_dropblock_layers, inputs, training)
        return tf.nn.relu(outputs + _apply_layers(self.projection_layers, inputs, training))


class BlockGroup(keras.layers.Layer):
    """Group of blocks of the same width. The first block has a projection shortcut and the group's stride."""

    def __init__(self, block: Callable, filters: int, blocks: int, strides: int, **kwargs: Any):
        """Creates `blocks` blocks by calling `block(filters, strides, use_projection)`."""
        super().__init__(**kwargs)
        self.layers = [block(filters, strides, True)] + [
            block(filters, 1, False) for _ in range(blocks - 1)
        ]

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Maps [n, h, w, c] to [n, h / strides, w / strides, filters * expansion]."""
        for layer in self.layers:
            inputs = layer(inputs, training=training)
        return inputs


def _stem(
    width: int, cifar_stem: bool, sk_ratio: float, norm: Callable
) -> list[keras.layers.Layer | None]:
    """Returns the layers of the stem, except max pooling.

    A `None` entry stands for an identity operation that the original has at this position.
    """
    if cifar_stem:
        convolutions = [Conv2dFixedPadding(width, 3)]
    elif sk_ratio > 0:  # ResNet-D
        convolutions = [
            Conv2dFixedPadding(width // 2, 3, 2),
            BatchNormRelu(norm=norm),
            Conv2dFixedPadding(width // 2, 3),
            BatchNormRelu(norm=norm),
            Conv2dFixedPadding(width, 3),
        ]
    else:
        convolutions = [Conv2dFixedPadding(width, 7, 2)]
    return convolutions + [None, BatchNormRelu(norm=norm)]


class ResNet(keras.layers.Layer):
    """ResNet without a classification layer. Returns a dict of endpoints."""

    def __init__(
        self,
        bottleneck: bool,
        blocks: tuple[int, ...],
        width_multiplier: int = 1,
        cifar_stem: bool = False,
        sk_ratio: float = 0.0,
        se_ratio: float = 0.0,
        batch_norm_decay: float = 0.9,
        global_bn: bool = True,
        **kwargs: Any,
    ):
        """Creates the network; see `resnet` for a constructor by depth.

        Args:
          bottleneck: whether the blocks are bottlenecks.
          blocks: number of blocks in each of the four groups.
          width_multiplier, cifar_stem: see `resnet`.
          sk_ratio: if above 0, enables selective kernels (bottleneck blocks only) and ResNet-D's
            shortcuts and stem.
          se_ratio: if above 0, enables squeeze-and-excitation.
          batch_norm_decay: decay of the moving statistics.
          global_bn: whether batch norm uses global batch statistics in training.
          **kwargs: arguments for the base class.
        """
        super().__init__(**kwargs)
        norm = functools.partial(BatchNorm, momentum=batch_norm_decay, across_replicas=global_bn)
        block_class = BottleneckBlock if bottleneck else ResidualBlock
        block = functools.partial(block_class, sk_ratio=sk_ratio, se_ratio=se_ratio, norm=norm)
        width = 64 * width_multiplier
        self.cifar_stem = cifar_stem
        self.num_features = width * 2 ** max(len(blocks) - 1, 0) * block_class.expansion
        self.initial_conv_relu_max_pool = _stem(width, cifar_stem, sk_ratio, norm)
        self.block_groups = [
            BlockGroup(block, width * 2**group, count, strides=1 if group == 0 else 2)
            for group, count in enumerate(blocks)
        ]

    @property
    def endpoint_names(self) -> list[str]:
        """Names of the endpoints, in the order in which they are computed."""
        groups = [f"block_group{index}" for index, _ in enumerate(self.block_groups, 1)]
        return ["initial_conv", "initial_max_pool", *groups, "final_avg_pool"]

    def freeze_up_to(self, block: int) -> None:
        """Freezes the weights and statistics of the stem and of block groups 1 to `block`."""
        for layer in filter(None, self.initial_conv_relu_max_pool + self.block_groups[:block]):
            layer.trainable = False

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> dict[str, tf.Tensor]:
        """Computes the endpoints.

        Args:
          inputs: [n, h, w, 3] in [0, 1].
          training: whether batch norm uses batch statistics.

        Returns:
          A dict. `initial_conv` (before batch norm), `initial_max_pool` (the output of the stem)
          and `block_group1` to `block_group4` have the shape [n, h', w', c]. `final_avg_pool` is
          the representation h = f(x), [n, c].
        """
        endpoints = {}
        *convolutions, norm = self.initial_conv_relu_max_pool
        endpoints["initial_conv"] = _apply_layers(convolutions, inputs, training)
        outputs = norm(endpoints["initial_conv"], training=training)
        if not self.cifar_stem:
            outputs = tf.nn.max_pool2d(outputs, 3, 2, "SAME")
        endpoints["initial_max_pool"] = outputs
        for index, group in enumerate(self.block_groups, 1):
            outputs = group(outputs, training=training)
            endpoints[f"block_group{index}"] = outputs
        # Averaging in half precision would be inaccurate.
        endpoints["final_avg_pool"] = tf.reduce_mean(tf.cast(outputs, self.variable_dtype), [1, 2])
        return endpoints


def resnet(
    resnet_depth: int, width_multiplier: int = 1, cifar_stem: bool = False, **settings: Any
) -> ResNet:
    """Creates a `ResNet`.

    Args:
      resnet_depth: a key of `config.RESNET_DEPTHS`.
      width_multiplier: integer, at least 1.
      cifar_stem: if True, replaces the stride-2 7x7 convolution and the max pooling with a stride-1
        3x3 convolution.
      **settings: further arguments of `ResNet`, such as `sk_ratio`.
    """
    return ResNet(*DEPTHS[resnet_depth], width_multiplier, cifar_stem, **settings)
