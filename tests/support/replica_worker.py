"""Training steps for `replicas_test.py`: on one or two replicas, or on four replicas in a separate process.

python tests/support/replica_worker.py 4 OUT.npz '{"use_blur": true, "image_size": 20}'
"""

import json
import os
import sys
import tempfile
import unittest.mock

import numpy as np

REPLICAS = int(sys.argv[1]) if __name__ == "__main__" else None
if REPLICAS:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

import data  # noqa: E402
import lars_optimizer  # noqa: E402
import model as model_lib  # noqa: E402
import resnet  # noqa: E402
import train  # noqa: E402
from checkpoints import loading  # noqa: E402
from checkpoints.training_state import TrainingState  # noqa: E402
from config import Config, parse_settings  # noqa: E402
from runtime import batch_norm  # noqa: E402
from train import TrainStep  # noqa: E402

BATCH, CLASSES, SEED = 8, 4, 5
SMALL = parse_settings(
    f"--dataset=digits --resnet_depth=10 --image_size=8 --train_batch_size={BATCH} --seed={SEED}"
    " --num_proj_layers=2 --proj_out_dim=16 --learning_rate=0.3 --warmup_epochs=0"
    " --linear_head_learning_rate=0.1"
)
ONE_BLOCK = (False, (1,))  # Tracing four block groups would take several times as long.


class RecordingLARS(lars_optimizer.LARSOptimizer):
    """LARS optimizer that stores the last gradient, summed over the replicas, in a slot."""

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        for var in var_list:
            self.add_slot(var, "gradient")

    def _resource_apply_dense(self, grad, var, apply_state=None):
        with tf.control_dependencies([self.get_slot(var, "gradient").assign(grad)]):
            return super()._resource_apply_dense(grad, var, apply_state)


def two_replicas_on_one_device():
    """Returns a strategy with two replicas whose variables are on the same device.

    XLA cannot compile a function that uses variables on several CPUs. The second CPU does not
    exist, so TensorFlow uses the first one instead.
    """
    return tf.distribute.MirroredStrategy(
        ["/cpu:0", "/cpu:99"], tf.distribute.ReductionToOneDevice()
    )


def make_config(settings):
    """Returns the `Config` of a test case."""
    return Config(**{**SMALL, **settings})


def batch_of(config):
    """Returns the global batch: two views, each float64 [8, size, size, 3], and labels [8]."""
    size = config.image_size
    views = np.random.default_rng(0).uniform(0, 1, (BATCH, size, size, 6))
    return tuple(np.split(views, 2, -1)), np.arange(BATCH) % CLASSES


def trainable_model(config, classes=CLASSES, seed=3):
    """Returns a model with fixed weights. Every batch norm gamma is 1, so gradients reach all layers."""
    keras.utils.set_random_seed(seed)
    model = model_lib.build_model(config, classes)
    for layer in model.submodules:
        if isinstance(layer, batch_norm.BatchNorm):
            layer.gamma.assign(tf.ones_like(layer.gamma))
    return model


def build_model(config):
    """Returns a trainable model with one block."""
    with unittest.mock.patch.dict(resnet.DEPTHS, {config.resnet_depth: ONE_BLOCK}):
        return trainable_model(config)


def build(config):
    """Returns a model with fixed weights and its optimizer."""
    model = build_model(config)
    schedule = model_lib.build_schedule(config, 64)
    return model, model_lib.build_optimizer(config, schedule, model)


def distributed_batches(config, strategy):
    """Returns an iterator that repeats one global batch. The replicas get equal shares of its rows, in order."""
    size = BATCH // strategy.num_replicas_in_sync
    rows = tf.data.Dataset.from_tensor_slices(batch_of(config))
    return iter(
        data.distribute(strategy, lambda *_: rows.repeat().batch(size, drop_remainder=True))
    )


def train_case(strategy, settings):
    """Takes three training steps.

    Returns:
      A dict that contains the scalars, gradients and moving statistics of the first step, and the
      variables and momentum slots after the last step.
    """
    config = make_config(settings)
    with strategy.scope():
        model = build_model(config)
        head = model_lib._head_refs(model)
        optimizer = RecordingLARS(
            model_lib.build_schedule(config, 64),
            config.momentum,
            weight_decay=config.weight_decay,
            exclude_from_weight_decay=lambda var: var.shape.rank <= 1 or var.ref() in head,
        )
        model_lib.create_slots(optimizer, model)
        state = TrainingState(model, optimizer, tempfile.gettempdir(), 1)
    batches = distributed_batches(config, strategy)
    run_steps = train.make_run_steps(TrainStep(model, optimizer, config, strategy))
    variables, results = loading.variables_by_key(model=model), {}

    def record(prefix, tensors):
        results.update({f"{prefix}{name}": np.asarray(tensor) for name, tensor in tensors.items()})

    def slots(name):
        return {
            key: optimizer.get_slot(variable, name)
            for key, variable in variables.items()
            if variable.trainable
        }

    scalars, _ = run_steps(batches, tf.constant(1))
    record("", {name: np.float32(value) for name, value in scalars.items()})
    record("step 1: ", {key: each for key, each in variables.items() if not each.trainable})
    record("gradient: ", slots("gradient"))
    run_steps(batches, tf.constant(2))
    assert state.step == 3
    record("step 3: ", variables)
    record("momentum: ", slots("Momentum"))
    return results


def assert_equal(results, expected, rtol=1e-9):
    """Asserts that arrays match within the larger of 1e-12 and `rtol` times their largest absolute value."""
    assert set(results) == set(expected)
    for name, value in expected.items():
        # Only logged scalars have the type float32.
        tolerance = 2e-7 if np.asarray(value).dtype == np.float32 else rtol
        np.testing.assert_allclose(
            results[name],
            value,
            rtol=0,
            atol=max(tolerance * np.abs(value).max(), 1e-12),
            err_msg=name,
        )


if __name__ == "__main__":
    keras.backend.set_floatx("float64")
    # Graph optimization is disabled, because it takes longer than the steps.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    mirrored = tf.distribute.MirroredStrategy([f"/cpu:{number}" for number in range(REPLICAS)])
    np.savez(
        sys.argv[2],
        **{
            name.replace("/", "|"): value
            for name, value in train_case(mirrored, json.loads(sys.argv[3])).items()
        },
    )
