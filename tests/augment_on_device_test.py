"""Checks that `--augment_on=device` computes the same views, and the same training steps, as the input pipeline."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorflow.python.framework import kernels

import data
import model as model_lib
import train
from config import Config, parse_settings
from sources import datasets, digits
from support import replica_worker
from support.runs import make_context

HOST = replica_worker.make_config(dict(train_steps=10))


def step_of(config):
    """Returns a training step without a network, for its views."""
    return train.TrainStep(
        None, keras.optimizers.legacy.SGD(), config, tf.distribute.get_strategy()
    )


def views_of(config, source, compile_with_xla=False):
    """Returns the network's input for the first batch, without blur, and the batch from the input pipeline."""
    batch = next(
        iter(data.build_train_dataset(config, source, config.seed, config.train_batch_size))
    )
    step = step_of(config.replace(use_blur=False))
    function = tf.function(step.views, jit_compile=compile_with_xla, autograph=False)
    return np.concatenate(function(batch[0], *batch[2:])), batch


# With 40 pixels, the input pipeline augments one image at a time.
@pytest.mark.parametrize(
    "flags, size, compile_with_xla",
    [
        ("--train_mode=supervised", 8, True),
        ("--color_jitter_strength=0.5 --brightness=additive", 40, False),
        ("--train_mode=finetune --checkpoint=unused", 8, False),
        ("--color_jitter_strength=0 --norandom_flip", 40, False),
    ],
)
def test_views_are_those_of_the_input_pipeline(flags, size, compile_with_xla, tmp_path):
    random = np.random.default_rng(0)
    for index in range(16):
        image = random.integers(0, 256, [9, 12, 3], np.uint8)
        tf.io.write_file(f"{tmp_path}/{index}.png", tf.io.encode_png(image))
    source = datasets.open_source(f"folder:{tmp_path}")
    flags += f" --dataset=photos --image_size={size} --train_batch_size=16 --seed=5"
    host = Config(**parse_settings(flags))
    expected, _ = views_of(host, source)
    views, (crops, _, seeds) = views_of(host.replace(augment_on="device"), source, compile_with_xla)
    np.testing.assert_allclose(views, expected, atol=1e-5)
    assert (
        len(crops) == len(views) // 16 and crops[0].dtype == tf.float32 and seeds.shape == (16, 2)
    )


def test_crops_of_smaller_types_are_rounded():
    config = HOST.replace(augment_on="device", color_jitter_strength=0.0, random_flip=False)
    source = digits.digits_source()
    exact, _ = views_of(config, source)
    for dtype, bound in (("uint8", 0.5 / 255), ("float16", 2**-12)):
        rounded, (crops, *_) = views_of(config.replace(crop_dtype=dtype), source)
        assert crops[0].dtype == dtype
        # Views are clipped to [0, 1].
        assert bound / 2 < np.abs(rounded - exact).max() < bound + 1e-6


@pytest.mark.parametrize(
    "settings, replicas",
    [
        ({"micro_batch_size": 4, "color_jitter_strength": 0.0}, 1),
        pytest.param({}, 2, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_steps_are_the_same(settings, replicas, stem_only_resnet):
    strategy = (
        replica_worker.two_replicas_on_one_device()
        if replicas == 2
        else tf.distribute.get_strategy()
    )

    def train_two_steps(config):
        source = digits.digits_source()
        with strategy.scope():
            model = replica_worker.trainable_model(config, 10)
            optimizer = model_lib.build_optimizer(
                config, model_lib.build_schedule(config, 64), model
            )
        batches = iter(train.train_dataset(make_context(config, source, strategy), 0))
        step = train.TrainStep(model, optimizer, config, strategy)
        scalars, _ = train.make_run_steps(step)(batches, tf.constant(2))
        return scalars

    expected, results = (
        train_two_steps(HOST.replace(augment_on=place, **settings)) for place in ("host", "device")
    )
    assert results == pytest.approx(expected, rel=1e-4)


def test_sums_have_kernels_on_gpus():
    """TensorFlow rewrites sums of more than two terms as AddN, which has fewer GPU kernels than AddV2."""
    step = step_of(HOST.replace(augment_on="device"))
    images, seeds = tf.TensorSpec([8, 8, 8, 3]), tf.TensorSpec([8, 2], tf.int64)
    graph = tf.function(step.views, autograph=False).get_concrete_function((images, images), seeds)
    definition = graph.graph.as_graph_def()
    functions = definition.library.function
    nodes = itertools.chain(definition.node, *(function.node_def for function in functions))
    registered = kernels.get_registered_kernels_for_op("AddN").kernel
    on_gpus = {
        dtype
        for kernel in registered
        if kernel.device_type in ("GPU", "DEFAULT")
        for constraint in kernel.constraint
        for dtype in constraint.allowed_values.list.type
    }
    assert {node.attr["T"].type for node in nodes if node.op == "AddV2"} <= on_gpus
