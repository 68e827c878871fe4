"""LARS (You et al. 2017, arXiv:1708.03888), as a pure function and as a Keras optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from runtime import replicas

EETA_DEFAULT = 0.001


def _l2_norm(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the l2 norm, computed in at least float32. Unlike `tf.norm`, this function does not store the squares."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.sqrt(
        2 * tf.nn.l2_loss(tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor)
    )


def trust_ratio(param: tf.Tensor, update: tf.Tensor, eeta: float) -> tf.Tensor:
    """Returns eeta * |param| / |update| (l2 norms), or 1 if either norm is 0, as a scalar in at least float32."""
    param_norm, update_norm = _l2_norm(param), _l2_norm(update)
    ratio = eeta * tf.math.divide_no_nan(param_norm, update_norm)
    return tf.where((param_norm > 0) & (update_norm > 0), ratio, tf.ones_like(ratio))


@replicas.compiled_on_gpus
def lars_update(
    param: tf.Tensor,
    grad: tf.Tensor,
    velocity: tf.Tensor,
    *,
    learning_rate: float | tf.Tensor,
    momentum: float,
    weight_decay: float = 0.0,
    adapt: bool = True,
    classic_momentum: bool = True,
    use_nesterov: bool = False,
    eeta: float = EETA_DEFAULT,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes one LARS step for one variable.

    With g = grad + weight_decay * param, trust ratio r, learning rate lr, momentum m and velocity
    v:

      classic momentum:  v' = m v + r(g) lr g
                         param' = param - v'            (Nesterov: param - (m v' + r(g) lr g))
      popular momentum:  v' = m v + g
                         param' = param - r(u) lr u     with u = v'  (Nesterov: u = m v' + g)

    Args:
      param: value of the variable, of any shape.
      grad: gradient, of the same shape.
      velocity: v, of the same shape; zeros before the first step.
      learning_rate: scalar lr.
      momentum: scalar m.
      weight_decay: scalar.
      adapt: whether to apply the trust ratio; otherwise r = 1.
      classic_momentum: classic momentum if True, popular momentum if False.
      use_nesterov: whether to use Nesterov momentum.
      eeta: trust coefficient.

    Returns:
      The new param and the new velocity.
    """

    def scale(update):
        ratio = tf.cast(trust_ratio(param, update, eeta), update.dtype) if adapt else 1
        return ratio * learning_rate * update

    step = grad + weight_decay * param if weight_decay else grad
    if classic_momentum:
        step = scale(step)
    velocity = momentum * velocity + step
    update = momentum * velocity + step if use_nesterov else velocity
    if not classic_momentum:
        update = scale(update)
    return param - update, velocity


class LARSOptimizer(keras.optimizers.legacy.Optimizer):
    """Optimizer that applies `lars_update`. The velocity slot is named `Momentum`, as in the original's checkpoints."""

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        momentum: float = 0.9,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        exclude_from_weight_decay: Callable | list[str] | None = None,
        exclude_from_layer_adaptation: Callable | list[str] | None = None,
        classic_momentum: bool = True,
        eeta: float = EETA_DEFAULT,
        name: str = "LARSOptimizer",
        **kwargs: Any,
    ):
        """Creates the optimizer.

        Args:
          learning_rate: float or `LearningRateSchedule`.
          momentum: float.
          use_nesterov: whether to use Nesterov momentum.
          weight_decay: float; weight_decay * param is added to the gradient.
          exclude_from_weight_decay: rule that selects the variables to exclude from weight decay: a
            predicate on variables, or a list of regular expressions that are searched for in
            variable names.
          exclude_from_layer_adaptation: rule that selects the variables to which the trust ratio is
            not applied, in the same form. If None, `exclude_from_weight_decay` is used.
          classic_momentum: see `lars_update`.
          eeta: trust coefficient.
          name: name of the optimizer.
          **kwargs: arguments for the base class.
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

    def _create_slots(self, var_list: list[tf.Variable]) -> None:
        """Creates the slots and evaluates the exclusion rules for every variable.

        The rules are evaluated here because updates see a replica's local copy of a variable, which
        a predicate might not recognize.
        """
        adaptation = self.exclude_from_layer_adaptation
        if adaptation is None:
            adaptation = self.exclude_from_weight_decay
        for var in var_list:
            slot = self.add_slot(var, "Momentum")
            decayed = not _matches(self.exclude_from_weight_decay, var)
            self._rules[slot.ref()] = dict(
                weight_decay=self.weight_decay if decayed else 0.0,
                adapt=not _matches(adaptation, var),
            )

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: dict | None = None
    ) -> tf.Operation:
        slot = self.get_slot(var, "Momentum")
        settings = (apply_state or {}).get(
            (var.device, var.dtype.base_dtype)
        ) or self._fallback_apply_state(var.device, var.dtype.base_dtype)
        # The function takes tensors, not variables.
        param, velocity = lars_update(
            *map(tf.convert_to_tensor, (var, grad, slot)),
            learning_rate=settings["lr_t"],
            momentum=self.momentum,
            classic_momentum=self.classic_momentum,
            use_nesterov=self.use_nesterov,
            eeta=self.eeta,
            **self._rules[slot.ref()],
        )
        return tf.group(slot.assign(velocity), var.assign(param))

    def _resource_apply_sparse(
        self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor, apply_state: dict | None = None
    ) -> None:
        raise ValueError(f"LARS does not support sparse gradients (variable {var.name})")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments that recreate this optimizer."""
        names = (
            "momentum",
            "use_nesterov",
            "weight_decay",
            "exclude_from_weight_decay",
            "exclude_from_layer_adaptation",
            "classic_momentum",
            "eeta",
        )
        config = {name: getattr(self, name) for name in names}
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter("learning_rate"),
            **config,
        }


def _matches(rule: Callable | list[str] | None, var: tf.Variable) -> bool:
    """Returns whether `rule` (a predicate, a list of patterns, or None) matches `var`."""
    if rule is None:
        return False
    if callable(rule):
        return bool(rule(var))
    return any(re.search(pattern, var.name) for pattern in rule)
