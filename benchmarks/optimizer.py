"""One LARS update of all variables of a ResNet: time against the original's formulas.

    python -m benchmarks.optimizer

Yardstick: the original's formulas, written out below, variable by variable, without any optimizer's bookkeeping. Both
are timed in turn in one process, each on its own variables. Every case prints one JSON line.
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
    """New param and velocity: classic momentum, norms by `tf.norm`, nested choices for norms of 0."""
    ratio = 1.0
    if not excluded:
        grad = grad + weight_decay * param
        param_norm, grad_norm = tf.norm(param, ord=2), tf.norm(grad, ord=2)
        ratio = tf.where(tf.greater(param_norm, 0), tf.where(
            tf.greater(grad_norm, 0), _EETA * param_norm / grad_norm, 1.0), 1.0)
    velocity = momentum * velocity + learning_rate * ratio * grad
    return param - velocity, velocity


def ours(config, model, gradients):
    """The update by the optimizer of a training run."""
    optimizer = model_lib.build_optimizer(config, config.learning_rate, model)
    optimizer._create_all_weights(model.trainable_variables)

    @tf.function(autograph=False)
    def update():
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return update


def plain_updater(variables, excluded, learning_rate, momentum, weight_decay):
    """A function that updates `variables` by `plain_update`, given their gradients; `excluded` as there, for each."""
    slots = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    def update(gradients):
        for variable, grad, slot, left_out in zip(variables, gradients, slots, excluded):
            param, velocity = plain_update(variable, grad, slot, learning_rate, momentum, weight_decay, left_out)
            slot.assign(velocity)
            variable.assign(param)

    return update


def yardstick(config, model, gradients):
    """The update by `plain_update`, of variables that start as the model's."""
    head = {variable.ref() for variable in model.supervised_head.variables}
    update = plain_updater([tf.Variable(variable) for variable in model.trainable_variables],
                           [v.shape.rank <= 1 or v.ref() in head for v in model.trainable_variables],
                           config.learning_rate, config.momentum, config.weight_decay)
    return tf.function(lambda: update(gradients), autograph=False)


def main():
    """Prints all cases."""
    measure.report_machine()
    for depth in _DEPTHS:
        config = Config(resnet_depth=depth)
        model = model_lib.build_model(config, 1000)
        # In variables: constants of this size would become part of the graphs.
        gradients = [tf.Variable(tf.random.stateless_normal(variable.shape, [0, number], stddev=1e-3))
                     for number, variable in enumerate(model.trainable_variables)]
        updates = {"ours": ours(config, model, gradients), "yardstick": yardstick(config, model, gradients)}
        times = measure.side_by_side(updates, _ROUNDS)
        measure.report("optimizer", f"LARS, ResNet-{depth}", "s", times["ours"], times["yardstick"])


if __name__ == "__main__":
    main()
