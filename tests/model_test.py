"""Schedules, networks, heads and training steps, compared with recorded and independently computed values."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

import model as model_lib
import resnet
import simclr
from checkpoints import loading
from config import Config, parse_settings
from runtime import batch_norm
from support import SMALL, golden
from train import TrainStep

SCHEDULE = golden.load("schedule")
NETWORK, NETWORK_TRAIN = golden.load("network"), golden.load("network_train")
TRAIN_STEP = golden.load("train_step")


# ----------------------------------------------------------------------------------------------- schedule and steps


@pytest.mark.parametrize("case", [*map(str, SCHEDULE["cases"])])
def test_schedule_matches_the_original(case):
    settings = json.loads(str(SCHEDULE[f"{case}/config"]))
    base, examples = settings.pop("learning_rate"), settings.pop("num_examples")
    schedule = model_lib.WarmUpAndCosineDecay(base, examples, **settings)
    assert schedule.train_steps == SCHEDULE[f"{case}/total_steps"]
    rates = [float(schedule(int(step))) for step in SCHEDULE[f"{case}/steps"]]
    assert_allclose(rates, SCHEDULE[f"{case}/lr"], rtol=1e-5, atol=schedule.peak * 1e-6)


def test_epochs_are_rounded_to_whole_steps_as_in_the_original():
    config = Config(train_batch_size=512, train_epochs=3, warmup_epochs=2.5, checkpoint_epochs=2)
    steps = model_lib.count_steps(config, 50_000)
    assert steps == model_lib.Steps(
        train=50_000 * 3 // 512 + 1, warmup=244, epoch=98, checkpoint=196, evaluation=0
    )
    steps = model_lib.count_steps(config.replace(train_steps=7, checkpoint_steps=5), 50_000)
    assert (steps.train, steps.checkpoint) == (7, 5)
    assert model_lib.count_steps(config.replace(eval_epochs=3), 50_000).evaluation == 294


def test_checkpoints_are_written_at_both_intervals_and_at_the_last_step():
    steps = model_lib.Steps(train=14, warmup=0, epoch=2, checkpoint=4, evaluation=6)
    saves = [0]
    while saves[-1] < steps.train:
        saves.append(steps.next_save(saves[-1]))
    assert saves == [0, 4, 6, 8, 12, 14]
    assert dataclasses.replace(steps, evaluation=0).next_save(5) == 8


def test_schedule_shorter_than_its_warmup_is_finite():
    schedule = model_lib.WarmUpAndCosineDecay(
        0.3, 50_000, train_batch_size=512, train_steps=10, warmup_epochs=10
    )
    rates = [float(schedule(step)) for step in range(11)]
    assert_allclose(rates, [0.6 * step / 976 for step in range(11)], rtol=1e-5)


def test_flags_set_the_end_and_the_scaling_of_the_schedule():
    config = Config(
        train_steps=10, warmup_epochs=0, train_batch_size=400, learning_rate_scaling="sqrt"
    )
    schedule = model_lib.build_schedule(config, 50_000)
    rates = [float(schedule(step)) for step in (0, 5, 10)]
    assert_allclose(rates, [6, 3, 0], atol=1e-6)


def test_linear_head_learning_rate_scales_linearly_with_the_batch_size():
    config = Config(
        train_batch_size=512,
        learning_rate=0.2,
        learning_rate_scaling="sqrt",
        linear_head_learning_rate=0.1,
    )
    assert model_lib.linear_head_rate_ratio(config) == pytest.approx(0.1 * 2 / (0.2 * 512**0.5))


# ------------------------------------------------------------------------------------------------------------ views


def test_views_steps_and_seeds_have_independent_blur():
    # With fewer than 20 pixels, blur has no effect.
    images = default_rng(0).uniform(size=[64, 20, 20, 3]).astype(np.float32)

    def blurred_rows(seed, step):
        """Returns a bool array [2 views, 64 images], which is True where blur has changed the image."""
        views = simclr.views([images] * 2, Config(image_size=20, seed=seed), step)
        return (np.stack(views) != images).any((2, 3, 4))

    rows = [*blurred_rows(1, 0), *blurred_rows(1, 1), *blurred_rows(2, 0)]
    assert all(16 <= np.sum(blurred) <= 48 for blurred in rows)
    # Independent rows differ in about half of the images.
    assert all(16 <= np.sum(one != other) <= 48 for one, other in itertools.combinations(rows, 2))


# -------------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("case", [*map(str, NETWORK["cases"])])
def test_network_outputs_match_the_original(case, float64):
    """Float32 is tested with the TF1 networks in checkpoints/weight_files_test.py."""
    config, _ = golden.config_of(NETWORK, case)
    assert golden.config_of(NETWORK_TRAIN, case)[0] == config
    model, variables = golden.build_model(config)
    shapes = {key: variable.shape.as_list() for key, variable in variables.items()}
    assert shapes in list(golden.load_json("checkpoint_keys").values())
    for arrays, mode, bound, endpoints in (
        (NETWORK, "eval", 1e-5, ["final_avg_pool"]),
        (NETWORK_TRAIN, "train", 1e-6, []),
    ):
        views = np.float64(golden.views_of(arrays, case, config.image_size))
        outputs = model(views, training=mode == "train")
        golden.assert_outputs_match(outputs, arrays, f"{case}/{mode}", bound, *endpoints)


@pytest.mark.parametrize("case", [*map(str, TRAIN_STEP["cases"])])
def test_three_training_steps_match_the_original(case, float64, optimized_graphs):
    config, settings = golden.config_of(TRAIN_STEP, case)
    model, variables = golden.build_model(config)
    start = {key: variable.numpy() for key, variable in variables.items()}
    schedule = model_lib.build_schedule(config, settings["num_examples"])
    optimizer = model_lib.build_optimizer(config, schedule, model)
    step = tf.function(
        TrainStep(model, optimizer, config.replace(seed=0), tf.distribute.get_strategy())
    )
    random = default_rng(settings["data_seed"])
    size = config.image_size
    for step_index in range(3):
        views = random.uniform(0, 1, (16, size, size, 6)).astype(np.float32)
        labels = tf.constant(random.integers(0, 10, 16))
        reported = step(tuple(tf.split(views, 2, -1)), labels)
        losses = [
            reported[f"train/{name}"]
            for name in ("contrast_loss", "supervised_loss", "weight_decay")
        ]
        assert_allclose(losses, TRAIN_STEP[f"{case}/step{step_index}/losses"], rtol=2e-6)
        moved = [
            np.linalg.norm(variables[str(key)].numpy() - start[str(key)])
            for key in TRAIN_STEP[f"{case}/keys"]
        ]
        assert_allclose(
            moved, TRAIN_STEP[f"{case}/step{step_index}/delta_norms"], rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize("width, millions", [(1, 24), (2, 94), (4, 375)])
def test_parameter_counts_match_table_6(width, millions):
    with tf.Graph().as_default():  # In a graph, weights are not initialized.
        encoder = resnet.resnet(50, width)
        tf.autograph.experimental.do_not_convert(encoder)(tf.zeros([1, 64, 64, 3]))
    assert round(sum(np.prod(v.shape) for v in encoder.trainable_variables) / 1e6) == millions


def test_initial_weight_distribution_matches_the_original():
    model = model_lib.build_model(Config(resnet_depth=18, image_size=32), 10)
    for layer in model.submodules:
        if isinstance(layer, keras.layers.Conv2D) and np.prod(layer.kernel.shape) > 30_000:
            values = layer.kernel.numpy()
            expected = np.sqrt(1 / np.prod(values.shape[:-1]))
            assert values.std() == pytest.approx(expected, rel=0.03)
            # Values are truncated at 2.27 standard deviations.
            assert np.abs(values).max() < 2.3 * expected
        if isinstance(layer, keras.layers.Dense):
            assert layer.kernel.numpy().std() == pytest.approx(0.01, rel=0.05)
            assert not layer.use_bias or not layer.bias.numpy().any()
        if isinstance(layer, resnet.ResidualBlock):
            first, last = layer.conv2d_bn_layers[1].bn, layer.conv2d_bn_layers[3].bn
            assert (first.gamma.numpy() == 1).all() and (last.gamma.numpy() == 0).all()


@pytest.mark.parametrize(
    "flags, features, se_index",
    [
        ("--resnet_depth=10 --sk_ratio=0.0625", 512, None),
        ("--resnet_depth=50 --sk_ratio=0.0625 --se_ratio=0.25", 2048, 8),
        ("--resnet_depth=50 --se_ratio=0.25", 2048, 9),
        ("--resnet_depth=10 --stem=imagenet --width_multiplier=2", 1024, None),
    ],
)
def test_every_weight_of_each_architecture_variant_has_a_gradient(
    flags, features, se_index, monkeypatch
):
    monkeypatch.setitem(resnet.DEPTHS, 50, (True, (1, 1, 1, 1)))
    model = model_lib.build_model(Config(image_size=32, **parse_settings(flags)), 3)
    with tf.GradientTape() as tape:
        outputs = model(tf.random.uniform([4, 32, 32, 3]), training=True)
        loss = tf.reduce_sum(outputs["proj_head_output"][:, :7]) + tf.reduce_sum(
            tf.square(outputs["logits_sup"])
        )
    assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))
    assert outputs["final_avg_pool"].shape == [4, features]
    if se_index:
        layers = "model/resnet_model/block_groups/0/layers/0/conv_relu_dropblock_layers"
        key = f"{layers}/{se_index}/se_reduce/kernel"
        assert key in loading.variables_by_key(model=model)


# ----------------------------------------------------------------------------------------------------------- heads


@pytest.fixture
def no_blocks(monkeypatch):
    """Removes all blocks from ResNet-10. The representations have 64 features."""
    monkeypatch.setitem(resnet.DEPTHS, 10, (False, ()))


@pytest.mark.parametrize("mode, layers", [("none", 0), ("linear", 1), ("nonlinear", 2)])
def test_projection_heads_have_the_right_layers_and_outputs(mode, layers, no_blocks):
    config = Config(**SMALL, proj_head_mode=mode)
    model = model_lib.build_model(config, 4)
    outputs = model(tf.random.uniform([4, 8, 8, 3]), training=True)
    assert model.num_proj_layers == layers
    assert outputs["proj_head_output"].shape == [4, 16 if layers else 64]
    assert ("proj_head_output" in model.endpoint_names) == bool(layers)


def test_ft_proj_selector_selects_the_classifier_input(no_blocks):
    for selector, width in ((0, 64), (1, 64), (-1, 16), (2, 16), (-3, 64)):
        model = model_lib.build_model(Config(**SMALL, ft_proj_selector=selector), 4)
        assert model.supervised_head.linear_layer.dense.kernel.shape[0] == width
        outputs = model(tf.random.uniform([2, 8, 8, 3]), training=False)
        if selector == 0 or width == 16:
            head_input = outputs["final_avg_pool" if selector == 0 else "proj_head_output"]
            assert_array_equal(outputs["logits_sup"], model.supervised_head(head_input))


def test_gradients_of_the_linear_head_do_not_reach_the_encoder(no_blocks):
    model = model_lib.build_model(Config(**SMALL), 4)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.random.uniform([2, 8, 8, 3]), training=True)["logits_sup"])
    variables, head = model.trainable_variables, model.supervised_head.variables
    for variable, gradient in zip(variables, tape.gradient(loss, variables)):
        assert (gradient is not None) == any(variable is each for each in head), variable.name


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("height, width", [(1, 1), (1, 2), (2, 2), (4, 2), (3, 4), (5, 3)])
def test_convolutions_match_a_loop(height, width, kernel_size, stride):
    inputs, kernel = (
        np.random.rand(2, height, width, 3),
        np.random.rand(kernel_size, kernel_size, 3, 4),
    )
    before = (kernel_size - 1) // 2
    padded = np.pad(inputs, [(0, 0), (before, kernel_size), (before, kernel_size), (0, 0)])
    expected = [
        [
            np.einsum("nijc,ijcf->nf", padded[:, y : y + kernel_size, x : x + kernel_size], kernel)
            for x in range(0, width, stride)
        ]
        for y in range(0, height, stride)
    ]
    layer = resnet.conv2d(4, kernel_size, stride, use_bias=False, dtype=tf.float64)
    layer.build(inputs.shape)
    layer.kernel.assign(kernel)
    assert_allclose(layer(inputs), np.moveaxis(expected, 2, 0), rtol=1e-12)


# ------------------------------------------------------------------------------------------------------ batch norm


@pytest.mark.parametrize("shape", [(8, 5, 5, 3), (16, 3)])
def test_batch_norm_matches_numpy(shape):
    """Inputs with four dimensions use the fused kernel."""
    layer = batch_norm.BatchNorm(momentum=0.7)
    inputs = default_rng(0).standard_normal(shape).astype(np.float32) * 3 + 1
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(inputs))
        outputs = layer(x, training=True)
        loss = tf.reduce_sum(tf.sin(outputs))
    axes = tuple(range(len(shape) - 1))
    mean, variance = inputs.mean(axes), inputs.var(axes)
    normalized = (inputs - mean) / np.sqrt(variance + 1e-5)
    assert_allclose(outputs, normalized, atol=2e-5)
    # The gradient has neither a constant part nor a part in the direction of the normalized inputs.
    gradient = np.cos(normalized)
    gradient -= gradient.mean(axes) + normalized * (gradient * normalized).mean(axes)
    expected = gradient / np.sqrt(variance + 1e-5)
    assert_allclose(tape.gradient(loss, x), expected, atol=2e-5)
    assert_allclose(layer.moving_mean, 0.3 * mean, rtol=1e-4, atol=1e-6)
    assert_allclose(layer.moving_variance, 0.7 + 0.3 * variance, rtol=1e-5)
    moving = [layer.moving_mean.numpy(), layer.moving_variance.numpy()]
    frozen = layer(inputs, training=False)
    assert_allclose(frozen, (inputs - moving[0]) / np.sqrt(moving[1] + 1e-5), rtol=1e-4, atol=1e-5)
    layer.trainable = False
    assert_array_equal(layer(inputs, training=True), frozen)
    assert_array_equal(layer.moving_mean, moving[0])


# ---------------------------------------------------------------------------------------------------- weight decay


def test_loss_includes_the_weight_decay_that_the_optimizer_does_not_apply(no_blocks):
    model = model_lib.build_model(Config(**SMALL), 4)
    kernel = model.supervised_head.linear_layer.dense.kernel
    expected = 0.25 * np.sum(np.square(kernel))
    assert_allclose(model_lib.add_weight_decay(model, 0.5, "lars"), expected, rtol=1e-5)
    decayed = [v for v in model.trainable_variables if not re.search("gamma|beta", v.name)]
    total = sum(float(np.sum(np.square(v))) for v in decayed)
    for optimizer in ("momentum", "adam"):
        assert_allclose(model_lib.add_weight_decay(model, 0.5, optimizer), 0.25 * total, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["lars", "momentum"])
def test_flags_set_momentum_and_batch_norm_decay(optimizer):
    config = Config(**SMALL, optimizer=optimizer, momentum=0.5, batch_norm_decay=0.25)
    model = model_lib.build_model(config, 4)
    assert model_lib.build_optimizer(config, 0.1, model).get_config()["momentum"] == 0.5
    decays = [
        layer.momentum for layer in model.submodules if isinstance(layer, batch_norm.BatchNorm)
    ]
    assert len(decays) > 10 and set(decays) == {0.25}


def test_lars_excludes_vectors_and_the_linear_head_from_weight_decay(no_blocks):
    model = model_lib.build_model(Config(**SMALL), 4)
    optimizer = model_lib.build_optimizer(Config(), 0.1, model)
    for variable in model.trainable_variables:
        is_excluded = any(variable is each for each in model.supervised_head.variables)
        is_excluded |= bool(re.search("gamma|beta|bias", variable.name))
        assert optimizer.exclude_from_weight_decay(variable) == is_excluded, variable.name
