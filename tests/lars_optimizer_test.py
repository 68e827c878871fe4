"""LARS, compared with recorded and hand-computed steps."""

import json

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose

from lars_optimizer import LARSOptimizer, lars_update
from support import golden

ARRAYS = golden.load("lars")
NAMES = [*map(str, ARRAYS["names"])]


def check_steps(case, **changes):
    """Asserts that the variables after each of the four steps of a recorded case match."""
    variables = [tf.Variable(ARRAYS[f"{case}/init/{name}"], name=name) for name in NAMES]
    settings = {**json.loads(str(ARRAYS[f"{case}/config"])), **changes}
    optimizer = LARSOptimizer(**settings)
    for step in range(4):
        gradients = [tf.constant(ARRAYS[f"{case}/grad{step}/{name}"]) for name in NAMES]
        optimizer.apply_gradients(zip(gradients, variables))
        for name, variable in zip(NAMES, variables):
            expected = ARRAYS[f"{case}/param{step}/{name}"]
            assert_allclose(variable, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", [*map(str, ARRAYS["cases"])])
def test_steps_match_the_original(case):
    check_steps(case)


def test_lars_predicates_select_the_same_variables_as_name_patterns():
    def rule(variable):
        return variable.shape.rank <= 1 or "head_supervised" in variable.name

    check_steps("case0", exclude_from_weight_decay=rule)


@pytest.mark.parametrize("use_nesterov", [False, True])
@pytest.mark.parametrize("classic_momentum", [False, True])
def test_optimizer_matches_lars_update_in_float64(classic_momentum, use_nesterov):
    settings = {
        "learning_rate": tf.constant(0.3, tf.float64),
        "momentum": 0.9,
        "weight_decay": 0.1,
        "classic_momentum": classic_momentum,
        "use_nesterov": use_nesterov,
    }
    variable, optimizer = (
        tf.Variable(tf.constant([[3, 4, -1]], tf.float64)),
        LARSOptimizer(**settings),
    )
    param, velocity = tf.constant(variable), tf.zeros_like(variable)
    for grad in np.random.default_rng(0).standard_normal((3, 1, 3)):
        optimizer.apply_gradients([(tf.constant(grad), variable)])
        param, velocity = lars_update(param, grad, velocity, **settings)
        assert_allclose(variable, param, rtol=1e-14)
        assert_allclose(optimizer.get_slot(variable, "Momentum"), velocity, rtol=1e-14)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_norms_do_not_overflow_in_half_precision(dtype):
    param, grad, velocity = (tf.fill([200, 200], tf.constant(value, dtype)) for value in (8, 2, 0))
    new, _ = lars_update(param, grad, velocity, learning_rate=100.0, momentum=0.9, eeta=0.01)
    # With norms of 1600 and 400, the step is 0.01 * 4 * 100 * 2 = 8.
    assert new.dtype == dtype and np.abs(new).max() <= 0.05


def test_trust_ratio_is_1_if_a_norm_is_zero():
    zeros, values = tf.zeros(2), tf.constant([1.0, 2.0])
    for param, grad in ((zeros, values), (values, zeros)):
        new, _ = lars_update(param, grad, zeros, learning_rate=0.5, momentum=0.9)
        assert_allclose(new, param - 0.5 * grad)


def test_get_config_restores_all_arguments():
    optimizer = LARSOptimizer(0.2, 0.8, True, 1e-3, ["bias"], ["gamma", "beta"], False, 0.01)
    copy = LARSOptimizer.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
    assert copy.exclude_from_weight_decay == ["bias"]
    assert copy.exclude_from_layer_adaptation == ["gamma", "beta"]
