"""Tests of micro-batches (against a single gradient tape) and mixed precision (dtypes, skipped steps, checkpoints)."""

import re

import numpy as np
import pytest
import tensorflow as tf

import data
import data_util
import model as model_lib
import objective
import simclr
import train
from checkpoints import checkpoint_files, training_log
from checkpoints.training_state import TrainingState
from config import Config, parse_settings
from support import SMALL, runs
from support.errors import rejects
from support.replica_worker import trainable_model

pytestmark = pytest.mark.usefixtures("stem_only_resnet")
SETTINGS = dict(
    SMALL,
    train_batch_size=8,
    learning_rate=0.02,
    train_steps=10,
    warmup_epochs=0.0,
    weight_decay=1e-3,
)
CLASSES, ONE_REPLICA = 4, tf.distribute.get_strategy()


def make_state(config, directory, strategy=ONE_REPLICA, loss_scale=64.0):
    """Returns a `TrainingState`. With the default loss scale of Keras, the first steps would overflow."""
    with strategy.scope():
        model = trainable_model(config, CLASSES)
        optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 64), model)
        if config.precision == "mixed_float16":
            optimizer._loss_scale.current_loss_scale.assign(loss_scale)
        return TrainingState(model, optimizer, str(directory), 1)


def make_step(config, state, strategy=ONE_REPLICA):
    return train.TrainStep(state.model, state.optimizer, config.replace(seed=5), strategy)


def batches(config):
    random, size = np.random.default_rng(0), config.image_size
    views = 2 if config.pretraining else 1
    return [
        (
            tuple(np.split(random.uniform(0, 1, (8, size, size, 3 * views)), views, -1)),
            random.integers(0, CLASSES, 8),
        )
        for _ in range(2)
    ]


def take_steps(config, state, order=range(8), strategy=ONE_REPLICA):
    """Takes one training step per batch, with its rows in the given order. Returns the reported scalars."""
    rows, reported = config.train_batch_size // strategy.num_replicas_in_sync, []
    examples = tf.nest.map_structure(
        lambda *arrays: np.concatenate([array[[*order]] for array in arrays]), *batches(config)
    )
    dataset = tf.data.Dataset.from_tensor_slices(examples).batch(rows, drop_remainder=True)
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: dataset))
    run_steps = train.make_run_steps(make_step(config, state, strategy))
    for _ in batches(config):
        scalars, num_finite_steps = run_steps(iterator, tf.constant(1))
        reported.append(
            {
                **{name: np.float32(value) for name, value in scalars.items()},
                "finite": bool(num_finite_steps),
            }
        )
    return reported


def step_with_one_tape(config, state, views, labels, micro):
    """Takes a step with one gradient tape over all micro-batches, as a reference for the two-pass implementation."""
    model, optimizer = state.model, state.optimizer
    with tf.GradientTape() as tape:
        pairs = simclr.views(views, config.replace(seed=5), optimizer.iterations)
        outputs = [
            model(tf.concat([view[row : row + micro] for view in pairs], 0), training=True)
            for row in range(0, 8, micro)
        ]
        halves = zip(*(tf.split(output["proj_head_output"], 2) for output in outputs))
        hidden = tf.concat([part for half in halves for part in half], 0)
        contrast, _, _ = objective.add_alternative_contrastive_loss(
            hidden,
            config.contrastive_loss,
            config.hidden_norm,
            config.temperature,
            config.effective_margin,
            config.semi_hard,
        )
        head = tf.reduce_mean(
            [
                objective.add_supervised_loss(
                    tf.one_hot(np.tile(labels[row : row + micro], 2), CLASSES), output["logits_sup"]
                )
                for row, output in zip(range(0, 8, micro), outputs)
            ]
        )
        total = (
            contrast
            + head
            + model_lib.add_weight_decay(model, config.weight_decay, config.optimizer)
        )
    gradients = tape.gradient(total, model.trainable_variables)
    head_refs = {variable.ref() for variable in model.supervised_head.variables}
    ratio = model_lib.linear_head_rate_ratio(config)
    # The optimizer of `state` multiplies the gradients itself.
    optimizer.gradient_transformers = []
    gradients = [
        gradient * ratio if variable.ref() in head_refs else gradient
        for gradient, variable in zip(gradients, model.trainable_variables)
    ]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return {
        "train/contrast_loss": contrast,
        "train/supervised_loss": head,
        "train/total_loss": total,
    }


def assert_same_variables(one, other):
    for actual, expected in zip(
        one.model.variables + one.optimizer.variables(),
        other.model.variables + other.optimizer.variables(),
    ):
        np.testing.assert_allclose(
            actual.numpy(), expected.numpy(), rtol=1e-9, atol=1e-12, err_msg=actual.name
        )


def assert_all_changed(weights, start):
    assert all((new != old).any() for new, old in zip(weights, start))


def test_losses_state_whether_they_need_labels_and_how_many_views_they_compare(
    tmp_path, monkeypatch
):
    for module in (data, simclr):
        monkeypatch.setattr(module, "view_policies", lambda _: (data_util.Policy(),) * 3)
    settings = dict(train_steps=1, mode="train_then_eval", eval_protocol="contrastive")
    with rejects("^--contrastive_loss=nt_xent: this loss compares 2 views .* are 3.$"):
        runs.run(tmp_path, **settings)
    assert not checkpoint_files.list_steps(str(tmp_path))

    def function(z, labels, *_):
        return tf.reduce_mean(z), {"views": tf.constant(z.shape[0] / labels.shape[0])}

    loss = simclr.Loss(function, needs_labels=True, num_views=None)
    monkeypatch.setitem(simclr.LOSSES, "nt_xent", loss)
    with rejects("^--contrastive_loss=nt_xent: digits has no labels."):
        runs.run(tmp_path, labels=False, **settings)
    runs.run(tmp_path, **settings)
    row, evaluation = training_log.read_history(str(tmp_path))
    assert row["train/views"] == evaluation["eval/views"] == 3


def test_reported_scalars_are_means_over_the_steps():
    class FakeStep(train.TrainStep):
        def __call__(self, value):
            return {"new": 2 * value, "is_finite": tf.cast(value != 5, tf.float32)}

    batches = iter(tf.data.Dataset.from_tensor_slices(([1.0, 3.0, 5.0, 9.0],)))
    step = FakeStep(None, None, Config(**SETTINGS), ONE_REPLICA)
    means, num_finite_steps = train.make_run_steps(step)(batches, 4)
    assert num_finite_steps == 2 and means == {"new": 9.0}


@pytest.mark.parametrize(
    "flags",
    [
        "--micro_batch_size=8 --linear_head_learning_rate=0.1",
        "--micro_batch_size=2 --optimizer=momentum --contrastive_loss=nt_logistic --semi_hard",
    ],
)
def test_micro_batch_gradients_and_statistics_match_those_of_a_single_tape(
    flags, float64, tmp_path
):
    # With fewer than 20 pixels, blur has no effect.
    config = Config(**{**SETTINGS, "image_size": 20}, **parse_settings(flags))
    state, reference = make_state(config, tmp_path), make_state(config, tmp_path)
    start = state.model.get_weights()
    reported = take_steps(config, state)
    for scalars, (views, labels) in zip(reported, batches(config)):
        for name, value in step_with_one_tape(
            config, reference, views, labels, config.micro_batch_size
        ).items():
            assert scalars[name] == pytest.approx(float(value), rel=1e-6), name
    assert_same_variables(state, reference)
    assert_all_changed(state.model.get_weights(), start)


def test_micro_batches_give_the_same_results_on_one_and_two_replicas(
    two_replicas, float64, tmp_path
):
    config = Config(**SETTINGS, micro_batch_size=4, use_blur=False, linear_head_learning_rate=0.1)
    one, two = make_state(config, tmp_path), make_state(config, tmp_path, two_replicas)
    # A micro-batch of four rows contains two rows from each replica.
    expected = take_steps(config, one, order=[0, 1, 4, 5, 2, 3, 6, 7])
    reported = take_steps(config, two, strategy=two_replicas)
    for scalars, expected_scalars in zip(reported, expected):
        assert scalars == pytest.approx(expected_scalars, rel=1e-5)
    assert_same_variables(two, one)


def test_fine_tuning_gives_the_same_weights_with_and_without_micro_batches(float64, tmp_path):
    config = Config(
        **SETTINGS, train_mode="finetune", optimizer="momentum", fine_tune_after_block=4
    )
    states = []
    for micro in (0, 4):  # Batch norm statistics are frozen, so micro-batches make no difference.
        state = make_state(config, tmp_path)
        state.model.freeze(4)
        states.append(state)
        take_steps(config.replace(micro_batch_size=micro), state)
    assert_same_variables(*states)
    assert states[0].step == 2


# ------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("precision, micro", [("mixed_bfloat16", 0), ("mixed_float16", 4)])
def test_half_precision_losses_are_close_to_float32_losses(precision, micro, tmp_path):
    config = Config(**SETTINGS, micro_batch_size=micro)
    expected = take_steps(config, make_state(config, tmp_path))[0]
    config = config.replace(precision=precision)
    state = make_state(config, tmp_path)
    start = state.model.get_weights()
    reported = take_steps(config, state)[0]
    for name in ("train/contrast_loss", "train/supervised_loss"):
        assert reported[name] == pytest.approx(expected[name], rel=0.02), name
    assert reported["train/contrast_loss"] != expected["train/contrast_loss"]
    assert_all_changed(state.model.get_weights(), start)


def test_variables_and_head_outputs_stay_in_float32():
    half = model_lib.build_model(Config(**SETTINGS, precision="mixed_bfloat16"), CLASSES)
    images = tf.random.stateless_uniform([4, 8, 8, 3], [1, 2])
    for training in (True, False):
        outputs = half(images, training=training)
        for name, value in outputs.items():
            is_half = name.startswith(("initial", "block"))
            assert value.dtype == (tf.bfloat16 if is_half else tf.float32), name
    assert {variable.dtype for variable in half.variables} == {tf.float32}
    # Each model has its own precision policy.
    full = model_lib.build_model(Config(**SETTINGS), CLASSES)
    assert full(images, training=False)["initial_max_pool"].dtype == tf.float32


@pytest.mark.parametrize(
    "flags, dtype",
    [
        ("--precision=mixed_float16", tf.float16),
        ("--precision=mixed_bfloat16 --sk_ratio=0.0625 --stem=imagenet", tf.bfloat16),
    ],
)
def test_convolutions_use_half_precision_and_batch_norm_and_loss_use_float32(
    flags, dtype, tmp_path
):
    config = Config(**SETTINGS, **parse_settings(flags))
    step, batch = make_step(config, make_state(config, tmp_path)), batches(config)[0]
    graph = (
        tf.function(step, autograph=False)
        .get_concrete_function(
            tuple(tf.constant(view, tf.float32) for view in batch[0]), tf.constant(batch[1])
        )
        .graph
    )

    def attributes(name, pattern):
        nodes = [node for node in graph.get_operations() if re.fullmatch(pattern, node.type)]
        return [node.get_attr(name) for node in nodes]

    # GPUs use tensor cores for NHWC in half precision.
    for kind in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert {*attributes("T", kind)} == {dtype}
        assert {*attributes("data_format", kind)} == {b"NHWC"}
    assert {*attributes("U", "FusedBatchNorm.*")} == {tf.float32}
    products = attributes("T", "MatMul")
    # The similarities, the last layer of the projection head, the linear head and their gradients
    # are in float32.
    assert products.count(tf.float32) >= 9
    assert products.count(dtype) >= 3 * (config.num_proj_layers - 1)
    assert {*attributes("T", ".*SoftmaxCrossEntropyWithLogits")} == {tf.float32}
    assert {variable.dtype for variable in step.optimizer.variables()} <= {tf.float32, tf.int64}


def test_a_step_with_overflowing_gradients_is_skipped_and_counted(two_replicas, tmp_path):
    config = Config(**SETTINGS, precision="mixed_float16")
    state = make_state(config, tmp_path, two_replicas, 1e30)
    # The step counter is omitted.
    weights = state.model.trainable_variables + state.optimizer.variables()[1:]
    start = [variable.numpy() for variable in weights]
    first, _ = take_steps(config, state, strategy=two_replicas)
    assert (
        first["train/skipped_steps"] == 1
        and first["train/loss_scale"] == np.float32(1e30)
        and first["finite"]
    )
    assert state.step == 2 and state.optimizer.loss_scale.numpy() == np.float32(2.5e29)
    for variable, old in zip(weights, start):
        np.testing.assert_array_equal(variable, old)


@pytest.mark.parametrize("precision, micro", [("float32", 0), ("mixed_float16", 4)])
def test_steps_with_nan_weights_are_reported_as_non_finite(precision, micro, tmp_path):
    config = Config(**SETTINGS, micro_batch_size=micro, precision=precision)
    state = make_state(config, tmp_path)
    assert all(step["finite"] for step in take_steps(config, state))
    kernel = state.model.trainable_variables[0]
    kernel.assign(tf.tensor_scatter_nd_update(kernel, [[0] * 4], [np.nan]))
    assert not any(step["finite"] for step in take_steps(config, state))


def test_overflow_at_the_minimum_loss_scale_is_reported_as_non_finite(tmp_path, monkeypatch):
    config = Config(**SETTINGS, precision="mixed_float16")
    state = make_state(config, tmp_path, loss_scale=1.0)
    scaled = state.optimizer.get_unscaled_gradients
    monkeypatch.setattr(
        state.optimizer,
        "get_unscaled_gradients",
        lambda gradients: [gradient * np.inf for gradient in scaled(gradients)],
    )
    first, _ = take_steps(config, state)
    assert (
        first["train/skipped_steps"] == 1
        and np.isfinite(first["train/total_loss"])
        and not first["finite"]
    )


@pytest.mark.parametrize(
    "precision, new_precision", [("float32", "mixed_float16"), ("mixed_float16", "mixed_float16")]
)
def test_a_run_can_be_resumed_with_a_different_precision(precision, new_precision, tmp_path):
    config = Config(**SETTINGS, precision=precision)
    state = make_state(config, tmp_path, loss_scale=128.0)
    take_steps(config, state)
    other = make_state(config.replace(precision=new_precision), tmp_path)
    other.resume(state.save())
    assert other.step == 2
    np.testing.assert_equal(other.model.get_weights(), state.model.get_weights())
    for variable, same in zip(other.model.trainable_variables, state.model.trainable_variables):
        actual = other.optimizer.get_slot(variable, "Momentum").numpy()
        np.testing.assert_array_equal(actual, state.optimizer.get_slot(same, "Momentum"))
        assert actual.any()
    if precision == new_precision:
        assert other.optimizer.loss_scale == 128.0
