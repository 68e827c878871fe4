"""Checks that `--augment_on=device` computes the same views, and the same training steps, as the input pipeline."""

import itertools
import operator

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorflow.python.framework import kernels

import data
import data_util
import model as model_lib
import train
from augmentation.policies import view_policies
from config import Config
from sources import datasets, digits
from support import replica_worker
from support.images import write_images
from support.runs import make_context

HOST = Config(
    dataset="digits",
    image_size=8,
    resnet_depth=10,
    train_batch_size=8,
    num_proj_layers=2,
    seed=3,
    warmup_epochs=0,
    linear_head_learning_rate=0.1,
    train_steps=10,
)


def views_of(config, source, compile_with_xla=False):
    """Returns the network's input for the first batch, without blur, and the batch from the input pipeline."""
    batch = next(
        iter(data.build_train_dataset(config, source, config.seed, config.train_batch_size))
    )
    optimizer = keras.optimizers.legacy.SGD()
    step = train.TrainStep(
        None, optimizer, config.replace(use_blur=False), tf.distribute.get_strategy()
    )
    function = tf.function(
        lambda *images_and_seeds: tf.concat(step.views(*images_and_seeds), 0),
        jit_compile=compile_with_xla,
        autograph=False,
    )
    return function(batch[0], *batch[2:]).numpy(), batch


# With 40 pixels, the input pipeline augments one image at a time.
@pytest.mark.parametrize(
    "settings, size, compile_with_xla",
    [
        (dict(color_jitter_strength=1.0), 8, True),
        (dict(color_jitter_strength=0.5, brightness="additive"), 40, False),
        (dict(train_mode="finetune", checkpoint="unused"), 8, False),
        (dict(train_mode="supervised"), 40, False),
        (dict(color_jitter_strength=0.0, random_flip=False), 40, False),
    ],
)
def test_views_are_those_of_the_input_pipeline(settings, size, compile_with_xla, tmp_path):
    write_images(
        tmp_path, *(f"{label}/{index}.png" for label in "ab" for index in range(8)), size=(50, 60)
    )
    source = datasets.open_source(f"folder:{tmp_path}")
    host = Config(dataset="photos", image_size=size, train_batch_size=16, seed=5, **settings)
    expected, _ = views_of(host, source)
    views, (crops, _, seeds) = views_of(host.replace(augment_on="device"), source, compile_with_xla)
    np.testing.assert_allclose(views, expected, atol=1e-5)
    assert (
        len(crops) == len(views) // 16 and crops[0].dtype == tf.float32 and seeds.shape == (16, 2)
    )


@pytest.mark.parametrize("dtype, bound", [("uint8", 0.5 / 255), ("float16", 2**-12)])
def test_crops_of_smaller_types_are_rounded(dtype, bound):
    config = HOST.replace(augment_on="device", color_jitter_strength=0.0, random_flip=False)
    source = digits.digits_source()
    exact, _ = views_of(config, source)
    rounded, (crops, *_) = views_of(config.replace(crop_dtype=dtype), source)
    assert crops[0].dtype == dtype
    # Views are clipped to [0, 1].
    assert bound / 2 < np.abs(rounded - exact).max() < bound + 1e-6


def test_views_of_colored_noise_differ_from_their_crops_and_from_each_other():
    """Gray images with a single level, as above, would hide some errors."""
    random = np.random.default_rng(0)
    crops = tf.constant(random.uniform(-0.05, 1.05, (64, 6, 6, 6)), tf.float32)
    seeds = tf.constant(random.integers(0, 2**62, (64, 2)))
    policies = [view_policies(HOST.replace(augment_on=place)) for place in ("host", "device")]
    results = [data_util.augment_crops(tf.split(crops, 2, -1), views, seeds) for views in policies]
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)
    changes = np.abs(np.concatenate(results[0], -1) - crops).max((1, 2, 3))
    assert (changes > 0.1).mean() > 0.8
    assert np.abs(results[0][0] - results[0][1]).max() > 0.5


@pytest.mark.parametrize(
    "settings, replicas",
    [
        ({"micro_batch_size": 4}, 1),
        pytest.param({}, 2, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_steps_are_the_same(settings, replicas, tiny_resnet, unoptimized_graphs):
    strategy = (
        replica_worker.two_replicas_on_one_device()
        if replicas == 2
        else tf.distribute.get_strategy()
    )

    def train_two_steps(config):
        source = digits.digits_source()
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = model_lib.build_model(config, 10)
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
    config = HOST.replace(augment_on="device")
    step = train.TrainStep(
        None, keras.optimizers.legacy.SGD(), config, tf.distribute.get_strategy()
    )
    images, seeds = tf.TensorSpec([8, 8, 8, 3]), tf.TensorSpec([8, 2], tf.int64)
    graph = tf.function(step.views, autograph=False).get_concrete_function((images, images), seeds)
    definition = graph.graph.as_graph_def()
    nodes, library = operator.attrgetter("node", "library")(definition)
    nodes = [*nodes, *itertools.chain(*(each.node_def for each in library.function))]
    registered = kernels.get_registered_kernels_for_op("AddN").kernel
    on_gpus = {
        dtype
        for kernel in registered
        if kernel.device_type in ("GPU", "DEFAULT")
        for constraint in kernel.constraint
        for dtype in constraint.allowed_values.list.type
    }
    assert {node.attr["T"].type for node in nodes if node.op == "AddV2"} <= on_gpus
