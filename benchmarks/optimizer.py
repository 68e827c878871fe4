"""Time to update all variables of a ResNet with LARS, using our optimizer and using the original's formulas.

    python -m benchmarks.optimizer [--depths=18,50] [--rounds=15]

The baseline implements the original's formulas, one variable at a time and without the optimizer
base class. Our optimizer and the baseline are timed alternately in one process, on separate
variables. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse

import tensorflow as tf

import model as model_lib
from benchmarks import measure
from config import Config

_EETA = 0.001


def plain_update(param, grad, velocity, learning_rate, momentum, weight_decay, excluded):
    """Returns the updated parameter and velocity (classic momentum). The trust ratio is 1 if a norm is zero."""
    trust_ratio = 1.0
    if not excluded:
        grad = grad + weight_decay * param
        param_norm, grad_norm = tf.norm(param, ord=2), tf.norm(grad, ord=2)
        trust_ratio = tf.where(
            tf.greater(param_norm, 0),
            tf.where(tf.greater(grad_norm, 0), _EETA * param_norm / grad_norm, 1.0),
            1.0,
        )
    velocity = momentum * velocity + learning_rate * trust_ratio * grad
    return param - velocity, velocity


def make_our_update(config, model, gradients):
    """Returns a function that updates the model with the optimizer used in training."""
    optimizer = model_lib.build_optimizer(config, config.learning_rate, model)
    optimizer._create_all_weights(model.trainable_variables)

    @tf.function(autograph=False)
    def update():
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return update


def make_plain_update(variables, excluded, learning_rate, momentum, weight_decay):
    """Returns a function that applies `plain_update` to the variables; `excluded` is a list of booleans."""
    slots = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    def update(gradients):
        for variable, grad, slot, is_excluded in zip(variables, gradients, slots, excluded):
            param, velocity = plain_update(
                variable, grad, slot, learning_rate, momentum, weight_decay, is_excluded
            )
            slot.assign(velocity)
            variable.assign(param)

    return update


def make_baseline_update(config, model, gradients):
    """Copies the model's variables. Returns a function that applies `plain_update` to the copies, and the copies."""
    linear_head = {variable.ref() for variable in model.supervised_head.variables}
    copies = [tf.Variable(variable) for variable in model.trainable_variables]
    update = make_plain_update(
        copies,
        [v.shape.rank <= 1 or v.ref() in linear_head for v in model.trainable_variables],
        config.learning_rate,
        config.momentum,
        config.weight_decay,
    )
    return tf.function(lambda: update(gradients), autograph=False), copies


def make_gradients(model):
    """Returns random gradients. They are variables, since constants would be copied into the graphs."""
    return [
        tf.Variable(tf.random.stateless_normal(variable.shape, [0, index], stddev=1e-3))
        for index, variable in enumerate(model.trainable_variables)
    ]


def main():
    """Prints one JSON line per network."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--depths", type=measure.parse_sizes, default=(18, 50), help="comma-separated ResNet depths"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="measurements per optimizer; the median is reported"
    )
    arguments = parser.parse_args()
    measure.report_machine()
    for depth in arguments.depths:
        config = Config(resnet_depth=depth)
        model = model_lib.build_model(config, 1000)
        gradients = make_gradients(model)
        updates = {
            "ours": make_our_update(config, model, gradients),
            "baseline": make_baseline_update(config, model, gradients)[0],
        }
        seconds = measure.time_alternately(updates, arguments.rounds)
        measure.report(
            "optimizer", f"LARS, ResNet-{depth}", "s", seconds["ours"], seconds["baseline"]
        )


if __name__ == "__main__":
    main()
