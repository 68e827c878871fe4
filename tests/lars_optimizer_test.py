"""LARS, compared with recorded and hand-computed steps."""

import json

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose

from lars_optimizer import LARSOptimizer, lars_update
from support import golden

ARRAYS = golden.load("lars")
NAMES = [str(name) for name in ARRAYS["names"]]


def run_case(case, **changes):
    """Yields the step index and the variables after each of the four steps in a recorded case."""
    variables = [tf.Variable(ARRAYS[f"{case}/init/{name}"], name=name) for name in NAMES]
    settings = {**json.loads(str(ARRAYS[f"{case}/config"])), **changes}
    optimizer = LARSOptimizer(**settings)
    for step in range(4):
        optimizer.apply_gradients(
            [
                (tf.constant(ARRAYS[f"{case}/grad{step}/{name}"]), variable)
                for name, variable in zip(NAMES, variables)
            ]
        )
        yield step, variables


@pytest.mark.parametrize("case", [str(case) for case in ARRAYS["cases"]])
def test_steps_match_the_original(case):
    for step, variables in run_case(case):
        for name, variable in zip(NAMES, variables):
            expected = ARRAYS[f"{case}/param{step}/{name}"]
            assert_allclose(variable, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_lars_predicates_select_the_same_variables_as_name_patterns():
    def rule(variable):
        return variable.shape.rank <= 1 or "head_supervised" in variable.name

    for step, variables in run_case("case0", exclude_from_weight_decay=rule):
        for name, variable in zip(NAMES, variables):
            assert_allclose(variable, ARRAYS[f"case0/param{step}/{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "classic, nesterov, expected",
    [
        # For param [3, 4] (norm 5), gradient [0, 2] and weight decay 0.5, g = [1.5, 4] has norm
        # sqrt(18.25).
        (True, False, lambda g, r: [3, 4] - r * 0.1 * g),
        (True, True, lambda g, r: [3, 4] - (0.9 * r * 0.1 * g + r * 0.1 * g)),
        (False, False, lambda g, r: [3, 4] - r * 0.1 * g),
        # The update is 1.9 * g, and its trust ratio is r / 1.9.
        (False, True, lambda g, r: [3, 4] - r * 0.1 * g),
    ],
)
def test_first_step_matches_hand_computed_values(classic, nesterov, expected):
    g = np.array([1.5, 4.0])
    ratio = 0.001 * 5 / np.sqrt(18.25)
    param, _ = lars_update(
        tf.constant([3.0, 4.0], tf.float64),
        tf.constant([0.0, 2.0], tf.float64),
        tf.zeros(2, tf.float64),
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.5,
        classic_momentum=classic,
        use_nesterov=nesterov,
    )
    assert_allclose(param, expected(g, ratio), rtol=1e-12)


@pytest.mark.parametrize("use_nesterov", [False, True])
@pytest.mark.parametrize("classic_momentum", [False, True])
def test_optimizer_matches_lars_update_in_float64(classic_momentum, use_nesterov):
    settings = dict(
        momentum=0.9, weight_decay=0.1, classic_momentum=classic_momentum, use_nesterov=use_nesterov
    )
    variable = tf.Variable([[3.0, 4.0, -1.0]], dtype=tf.float64)
    optimizer = LARSOptimizer(tf.constant(0.3, tf.float64), **settings)
    param, velocity = tf.constant(variable), tf.zeros_like(variable)
    for grad in np.random.default_rng(0).standard_normal((3, 1, 3)):
        optimizer.apply_gradients([(tf.constant(grad), variable)])
        param, velocity = lars_update(
            param, grad, velocity, learning_rate=tf.constant(0.3, tf.float64), **settings
        )
        assert_allclose(variable, param, rtol=1e-14)
        assert_allclose(optimizer.get_slot(variable, "Momentum"), velocity, rtol=1e-14)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_norms_do_not_overflow_in_half_precision(dtype):
    param, grad = (
        tf.fill([200, 200], tf.constant(8, dtype)),
        tf.fill([200, 200], tf.constant(2, dtype)),
    )
    new, _ = lars_update(
        param, grad, tf.zeros_like(param), learning_rate=100.0, momentum=0.9, eeta=0.01
    )
    assert new.dtype == dtype  # With norms of 1600 and 400, the step is 0.01 * 4 * 100 * 2 = 8.
    assert_allclose(tf.cast(new, tf.float32), np.zeros([200, 200]), atol=0.05)


def test_trust_ratio_is_1_if_a_norm_is_zero():
    for param, grad in (([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])):
        new, _ = lars_update(
            tf.constant(param), tf.constant(grad), tf.zeros(2), learning_rate=0.5, momentum=0.9
        )
        assert_allclose(new, np.subtract(param, np.multiply(0.5, grad)))


def test_get_config_restores_all_arguments():
    optimizer = LARSOptimizer(0.2, 0.8, True, 1e-3, ["bias"], ["gamma", "beta"], False, 0.01)
    copy = LARSOptimizer.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
    assert copy.exclude_from_weight_decay == ["bias"] and copy.exclude_from_layer_adaptation == [
        "gamma",
        "beta",
    ]
