"""LARS (You et al. 2017, arXiv:1708.03888), as a pure function and as a Keras optimizer around it."""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

EETA_DEFAULT = 0.001


def _l2_norm(tensor):
    """Scalar, float32 at least. Unlike `tf.norm`, it makes no squares of the tensor's size."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.sqrt(2 * tf.nn.l2_loss(tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor))


def trust_ratio(param: tf.Tensor, update: tf.Tensor, eeta: float) -> tf.Tensor:
    """eeta * |param| / |update| in l2 norms, or 1 where either norm is 0; a scalar, float32 at least."""
    param_norm, update_norm = _l2_norm(param), _l2_norm(update)
    ratio = eeta * tf.math.divide_no_nan(param_norm, update_norm)
    return tf.where((param_norm > 0) & (update_norm > 0), ratio, tf.ones_like(ratio))


def _scaled(param, update, learning_rate, adapt, eeta):
    """r lr update, in the dtype of `update`; r = 1 unless `adapt`."""
    rate = tf.cast(trust_ratio(param, update, eeta), update.dtype) * learning_rate if adapt else learning_rate
    return rate * update


def _decayed(param, grad, weight_decay):
    return grad + weight_decay * param if weight_decay else grad


def lars_update(param: tf.Tensor, grad: tf.Tensor, velocity: tf.Tensor, *, learning_rate: float | tf.Tensor,
                momentum: float, weight_decay: float = 0.0, adapt: bool = True, classic_momentum: bool = True,
                use_nesterov: bool = False, eeta: float = EETA_DEFAULT) -> tuple[tf.Tensor, tf.Tensor]:
    """One LARS step for one variable.

    With g = grad + weight_decay * param, trust ratio r and momentum m:

      classic momentum:  v' = m v + r(g) lr g;   param' = param - (m v' + r(g) lr g  if Nesterov else  v')
      popular momentum:  v' = m v + g;  u = (m v' + g  if Nesterov else  v');  param' = param - r(u) lr u

    Args:
      param: the variable's value, any shape.
      grad: its gradient.
      velocity: v, of the same shape, zero at first.
      learning_rate: scalar lr.
      momentum: scalar m.
      weight_decay: scalar.
      adapt: whether the trust ratio applies; else r = 1.
      classic_momentum: which of the two forms.
      use_nesterov: whether to look ahead.
      eeta: trust coefficient.

    Returns:
      The new param and the new velocity.
    """
    step = _decayed(param, grad, weight_decay)
    if classic_momentum:
        step = _scaled(param, step, learning_rate, adapt, eeta)
    velocity = momentum * velocity + step
    update = momentum * velocity + step if use_nesterov else velocity
    if not classic_momentum:
        update = _scaled(param, update, learning_rate, adapt, eeta)
    return param - update, velocity


class LARSOptimizer(keras.optimizers.legacy.Optimizer):
    """`lars_update` for every variable; its slot is called `Momentum`, as in the original's checkpoints."""

    def __init__(self, learning_rate: float | keras.optimizers.schedules.LearningRateSchedule, momentum: float = 0.9,
                 use_nesterov: bool = False, weight_decay: float = 0.0,
                 exclude_from_weight_decay: Callable | list[str] | None = None,
                 exclude_from_layer_adaptation: Callable | list[str] | None = None, classic_momentum: bool = True,
                 eeta: float = EETA_DEFAULT, name: str = "LARSOptimizer", **kwargs: Any):
        """Creates the optimizer.

        Args:
          learning_rate: number or `LearningRateSchedule`.
          momentum: number.
          use_nesterov: whether to look ahead.
          weight_decay: number, added to the gradient as weight_decay * param.
          exclude_from_weight_decay: a predicate on variables, or a list of patterns searched in their names.
          exclude_from_layer_adaptation: the same for the trust ratio; None: those excluded from weight decay.
          classic_momentum: which of the two forms of `lars_update`.
          eeta: trust coefficient.
          name: of the optimizer.
          **kwargs: for the base class.
        """
        super().__init__(name, **kwargs)
        self._set_hyper("learning_rate", learning_rate)
        self.momentum = momentum
        self.use_nesterov = use_nesterov
        self.weight_decay = weight_decay
        self.exclude_from_weight_decay = exclude_from_weight_decay
        self.exclude_from_layer_adaptation = exclude_from_layer_adaptation
        self.classic_momentum = classic_momentum
        self.eeta = eeta
        self._rules = {}

    def _create_slots(self, var_list):
        """Makes the slots, and decides for every variable what applies to it.

        Here, not at the update: there a replica sees its own copy, which a predicate may not recognise.
        """
        adaptation = self.exclude_from_layer_adaptation
        if adaptation is None:
            adaptation = self.exclude_from_weight_decay
        for var in var_list:
            slot = self.add_slot(var, "Momentum")
            decayed = not _matches(self.exclude_from_weight_decay, var)
            self._rules[slot.ref()] = dict(
                weight_decay=self.weight_decay if decayed else 0.0, adapt=not _matches(adaptation, var))

    def _resource_apply_dense(self, grad, var, apply_state=None):
        slot = self.get_slot(var, "Momentum")
        settings = (apply_state or {}).get((var.device, var.dtype.base_dtype)) or self._fallback_apply_state(
            var.device, var.dtype.base_dtype)
        learning_rate, rule = settings["lr_t"], self._rules[slot.ref()]
        if self.classic_momentum:
            return self._apply_in_place(var, grad, slot, learning_rate, **rule)
        param, velocity = lars_update(
            var, grad, slot, learning_rate=learning_rate, momentum=self.momentum, classic_momentum=False,
            use_nesterov=self.use_nesterov, eeta=self.eeta, **rule)
        return tf.group(slot.assign(velocity), var.assign(param))

    def _apply_in_place(self, var, grad, slot, learning_rate, weight_decay, adapt):
        """`lars_update` with classic momentum, by the operation that changes variable and slot where they lie."""
        step = _scaled(var, _decayed(var, grad, weight_decay), learning_rate, adapt, self.eeta)
        one, momentum = tf.constant(1, step.dtype), tf.constant(self.momentum, step.dtype)
        return tf.raw_ops.ResourceApplyMomentum(
            var=var.handle, accum=slot.handle, lr=one, grad=step, momentum=momentum, use_nesterov=self.use_nesterov)

    def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
        raise ValueError(f"LARS needs the gradient of the whole variable; {var.name} has a sparse one")

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same optimizer again."""
        names = ("momentum", "use_nesterov", "weight_decay", "exclude_from_weight_decay",
                 "exclude_from_layer_adaptation", "classic_momentum", "eeta")
        config = {name: getattr(self, name) for name in names}
        return {**super().get_config(), "learning_rate": self._serialize_hyperparameter("learning_rate"), **config}


def _matches(rule, var):
    """Whether `rule` (a predicate, a list of patterns, or None) picks out `var`."""
    if rule is None:
        return False
    if callable(rule):
        return bool(rule(var))
    return any(re.search(pattern, var.name) for pattern in rule)
