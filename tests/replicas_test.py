"""Checks that the number of replicas does not affect training, and that local batch norm is computed per replica."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

import objective
from checkpoints import loading
from runtime import batch_norm, replicas
from support import replica_worker
from support.replica_worker import assert_equal

ONE = tf.distribute.get_strategy()
BLUR = {"use_blur": True, "image_size": 20}  # With fewer than 20 pixels, blur has no effect.
PLAIN, LOCAL = {"use_blur": False}, {"use_blur": False, "global_bn": False}


def assert_different(results, expected, words):
    """Asserts that at least one array whose name contains `words` differs by more than rounding errors."""
    names = [name for name in expected if words in name]
    assert names and any(
        np.abs(results[name] - expected[name]).max() > 1e-3 * np.abs(expected[name]).max()
        for name in names
    ), words


@pytest.fixture(scope="module")
def four_replicas(tmp_path_factory):
    """Starts a process with four replicas. Yields a function that waits for the process and returns its results."""
    out = tmp_path_factory.mktemp("four") / "out.npz"
    command = [sys.executable, replica_worker.__file__, "4", str(out), json.dumps(BLUR)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait():
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        with np.load(out) as arrays:
            return {name.replace("|", "/"): arrays[name] for name in arrays}

    yield wait
    process.kill()


def test_two_replicas_match_one_replica_and_local_batch_norm_matches_a_naive_implementation(
    four_replicas, two_replicas, float64
):
    one, two, local = (
        replica_worker.train_case(*case)
        for case in ((ONE, PLAIN), (two_replicas, PLAIN), (two_replicas, LOCAL))
    )
    assert one["train/contrast_loss"] > 1
    assert min(np.abs(value).max() for name, value in one.items() if "gradient" in name) > 1e-9
    assert_equal(two, one)
    for words in ("contrast_loss", "gradient", "step 1", "step 3"):
        assert_different(local, one, words)
    expected = naive_local_step(replica_worker.make_config(LOCAL), 2)
    assert_equal({name: local[name] for name in expected}, expected)


@pytest.mark.parametrize("rows", [3, None])
def test_gather_and_its_gradient_match_hand_computed_values(rows, two_replicas):
    z = default_rng(0).standard_normal((3, 2))
    weights = default_rng(1).standard_normal((6, 2))

    def gather_and_differentiate(z):
        context = tf.distribute.get_replica_context()
        local_z = z * tf.cast(context.replica_id_in_sync_group + 1, z.dtype)
        with tf.GradientTape() as tape:
            tape.watch(local_z)
            gathered = replicas.gather(local_z, two_replicas)
            loss = tf.reduce_sum(gathered**2 * weights)
        return gathered, tape.gradient(loss, local_z)

    function = tf.function(
        lambda z: two_replicas.run(gather_and_differentiate, args=(z,)),
        autograph=False,
        input_signature=[tf.TensorSpec([rows, 2], tf.float64)],
    )
    values, gradients = map(two_replicas.experimental_local_results, function(z))
    expected = np.concatenate([z, 2 * z])
    for value in values:
        assert_allclose(value, expected, rtol=1e-12)
    # The gradients are those of the sum of the losses of both replicas.
    assert_allclose(np.concatenate(gradients), 4 * expected * weights, rtol=1e-12)


@pytest.mark.parametrize(
    "shape, relu, is_compiled",
    [((3, 2, 5, 4), False, False), ((6, 4), True, False), ((3, 2, 5, 4), True, True)],
)
def test_synchronized_batch_norm_communicates_once_and_matches_automatic_differentiation(
    shape, relu, is_compiled, two_replicas, float64, monkeypatch
):
    """Compares with moments that are averaged by two all-reduces, and with one replica."""
    monkeypatch.setattr(replicas, "are_gpus", lambda _: is_compiled)
    random = default_rng(0)
    x, weights = random.normal(3, 2, (2, 2, *shape))
    gamma, beta = tf.constant(random.normal(size=(2, shape[-1])))
    calls, all_reduce = [], tf.distribute.ReplicaContext.all_reduce
    monkeypatch.setattr(
        tf.distribute.ReplicaContext,
        "all_reduce",
        lambda *arguments: calls.append(arguments) or all_reduce(*arguments),
    )

    def reference(x, gamma, beta, epsilon, relu):
        axes = list(range(len(shape) - 1))
        mean, variance = tf.nn.moments(x, axes)
        strategy = tf.distribute.get_strategy()
        global_mean = replicas.mean(mean, strategy)
        variance = replicas.mean(variance + (mean - global_mean) ** 2, strategy)
        scale = gamma * tf.math.rsqrt(variance + epsilon)
        outputs = x * scale + (beta - global_mean * scale)
        return tf.nn.relu(outputs) if relu else outputs, global_mean, variance

    def differentiate(x, weights, function):
        with tf.GradientTape() as tape:
            tape.watch([x, gamma, beta])
            outputs, *moments = function(x, gamma, beta, 1e-3, relu)
            loss = tf.reduce_sum(weights * tf.sin(outputs))
        return [outputs, *moments], tape.gradient(loss, [x, gamma, beta])

    def run(function):
        def of_replica(context):
            index = context.replica_id_in_sync_group
            return tf.constant(x[index]), tf.constant(weights[index])

        parts = two_replicas.experimental_distribute_values_from_function(of_replica)
        results = tf.function(
            lambda parts: two_replicas.run(differentiate, (*parts, function)), autograph=False
        )(parts)
        return tf.nest.map_structure(
            lambda value: np.stack(two_replicas.experimental_local_results(value)), results
        )

    outputs, gradients = run(batch_norm.synchronized_batch_norm)
    assert len(calls) == 4  # two on each of two replicas
    expected_outputs, expected_gradients = run(reference)
    for result, expected in zip(outputs, expected_outputs):
        if is_compiled:  # XLA rounds differently.
            assert_allclose(result, expected, rtol=0, atol=1e-14 * np.abs(expected).max())
        else:
            assert_array_equal(result, expected)
    one_outputs, one_gradients = differentiate(
        *(tf.concat([*v], 0) for v in (x, weights)), reference
    )
    assert_allclose(np.concatenate(outputs[0]), one_outputs[0], rtol=0, atol=1e-12)
    for result, expected, one in zip(gradients, expected_gradients, one_gradients):
        scale = np.abs(expected).max()
        assert_allclose(result, expected, rtol=0, atol=1e-12 * scale)
        total = np.concatenate(result) if result.ndim > 2 else result.sum(0)
        assert_allclose(total, one, rtol=0, atol=1e-12 * scale)


def naive_local_step(config, count):
    """Computes step 1 with local batch norm on one device, using one forward pass per replica and a joint loss."""
    model = replica_worker.build_model(config)
    variables = loading.variables_by_key(model=model)
    start = {key: variable.numpy() for key, variable in variables.items()}
    views, _ = replica_worker.batch_of(config)
    firsts, seconds, statistics = [], [], []
    with tf.GradientTape() as tape:
        for part in zip(*(np.split(view, count) for view in views)):
            for key, variable in variables.items():
                variable.assign(start[key])
            output = model(np.concatenate(part), training=True)["proj_head_output"]
            first, second = tf.split(output, 2)
            firsts.append(first), seconds.append(second)
            statistics.append({key: v.numpy() for key, v in variables.items() if not v.trainable})
        loss, logits, labels = objective.add_contrastive_loss(
            tf.concat(firsts + seconds, 0), config.hidden_norm, config.temperature
        )
    encoder = {
        key: variable
        for key, variable in variables.items()
        if variable.trainable and "supervised" not in key
    }
    gradients = tape.gradient(loss, encoder)
    return {
        "train/contrast_loss": np.float32(loss),
        "train/contrast_acc": np.mean(
            np.argmax(labels, 1) == np.argmax(logits, 1), dtype=np.float32
        ),
        **{f"gradient: {key}": gradient.numpy() for key, gradient in gradients.items()},
        **{
            f"step 1: {key}": np.mean([values[key] for values in statistics], axis=0)
            for key in statistics[0]
        },
    }


def test_four_replicas_with_blur_match_one_replica(four_replicas, float64):
    assert_equal(four_replicas(), replica_worker.train_case(ONE, BLUR))


def test_each_replica_has_local_positives_and_global_negatives(two_replicas):
    # [replica, view, width]. Each replica has three first views, followed by three second views.
    hidden = default_rng(1).standard_normal((2, 6, 5))
    parts = two_replicas.experimental_distribute_values_from_function(
        lambda context: tf.constant(hidden[context.replica_id_in_sync_group])
    )
    function = tf.function(
        lambda parts: two_replicas.run(
            lambda part: objective.add_contrastive_loss(part, False, 0.5, two_replicas)[1:],
            args=(parts,),
        )
    )
    logits, labels = (two_replicas.experimental_local_results(value) for value in function(parts))
    all_b = np.concatenate([hidden[0, 3:], hidden[1, 3:]])
    for replica in range(2):
        assert_array_equal(labels[replica], np.eye(6, 12)[3 * replica : 3 * replica + 3])
        assert_allclose(logits[replica], hidden[replica, :3] @ all_b.T / 0.5, rtol=1e-12)
