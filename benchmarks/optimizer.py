"""Time to update all variables of a ResNet with LARS, using our optimizer and using the original's formulas.

    python -m benchmarks.optimizer

The baseline implements the original's formulas, one variable at a time and without the optimizer base class. Our
optimizer and the baseline are timed alternately in one process, on separate variables. Prints one JSON line per case.
"""

from __future__ import annotations

import tensorflow as tf

import model as model_lib
from benchmarks import measure
from config import Config

_DEPTHS = (18, 50)
_ROUNDS = 15
_EETA = 0.001


def plain_update(param, grad, velocity, learning_rate, momentum, weight_decay, excluded):
    """Returns the updated parameter and velocity (classic momentum). The trust ratio is 1 if a norm is zero."""
    trust_ratio = 1.0
    if not excluded:
        grad = grad + weight_decay * param
        param_norm, grad_norm = tf.norm(param, ord=2), tf.norm(grad, ord=2)
        trust_ratio = tf.where(tf.greater(param_norm, 0), tf.where(
            tf.greater(grad_norm, 0), _EETA * param_norm / grad_norm, 1.0), 1.0)
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
            param, velocity = plain_update(variable, grad, slot, learning_rate, momentum, weight_decay, is_excluded)
            slot.assign(velocity)
            variable.assign(param)

    return update


def make_baseline_update(config, model, gradients):
    """Returns a function that applies `plain_update` to copies of the model's variables."""
    linear_head = {variable.ref() for variable in model.supervised_head.variables}
    update = make_plain_update([tf.Variable(variable) for variable in model.trainable_variables],
                               [v.shape.rank <= 1 or v.ref() in linear_head for v in model.trainable_variables],
                               config.learning_rate, config.momentum, config.weight_decay)
    return tf.function(lambda: update(gradients), autograph=False)


def main():
    """Prints one JSON line per network."""
    measure.report_machine()
    for depth in _DEPTHS:
        config = Config(resnet_depth=depth)
        model = model_lib.build_model(config, 1000)
        # Store the gradients in variables, since constants would be copied into the graphs.
        gradients = [tf.Variable(tf.random.stateless_normal(variable.shape, [0, index], stddev=1e-3))
                     for index, variable in enumerate(model.trainable_variables)]
        updates = {"ours": make_our_update(config, model, gradients),
                   "baseline": make_baseline_update(config, model, gradients)}
        seconds = measure.time_alternately(updates, _ROUNDS)
        measure.report("optimizer", f"LARS, ResNet-{depth}", "s", seconds["ours"], seconds["baseline"])


if __name__ == "__main__":
    main()
