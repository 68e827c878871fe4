"""Logistic regression on frozen features by L-BFGS.

Strengths of the l2 regularisation have one of two units, which their names say:
- `l2_of_sum`: as in the paper (B.8.1), the sum of the cross-entropies + l2_of_sum / 2 |W|^2 is minimised. All functions
  that fit weights take this one.
- `l2_per_example`: l2_of_sum / number of examples, so that the mean of the cross-entropies + l2_per_example / 2 |W|^2
  is minimised. Strengths for sets of different sizes are compared in this unit.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from probing import features
from runtime import progress

L2_PER_EXAMPLE_CHOICES = tuple(10.0**exponent for exponent in range(-4, 2))  # for standardised features
_HELD_OUT = 0.2
_MAX_ITERATIONS = 300
_ROWS = 4096  # of a Hessian, at once
PATH_ITERATIONS, PATH_TOLERANCE = 3000, 1e-6  # of the gradient of the mean, its largest part, in units of the curvature
PATH_IMPROVEMENT = 1e-7  # of the mean loss in an iteration: with less, it has arrived


def lbfgs_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int = 0
                   ) -> dict[str, float]:
    """Returns the test accuracy of l2-regularised multinomial logistic regression, after the paper's B.8.1.

    Unlike there, features are standardised, and few strengths are tried: it is quick on small sets. The strength per
    example is chosen on a held-out fifth of the training examples, then the fit is repeated on all of them.

    Args:
      train: (features [n, d], labels [n]).
      test: (features [m, d], labels [m]).
      seed: of the held-out part.

    Returns:
      dict: `accuracy`, in [0, 1], and `l2_per_example`, the strength chosen.

    Raises:
      UserError: the features contain NaN or Inf.
    """
    from sklearn import model_selection  # Here: only this protocol needs it.

    features.check_feature_sets(train, test, "lbfgs")
    inputs, labels = train
    counts = np.bincount(labels)
    stratify = labels if counts[counts > 0].min() > 1 and _HELD_OUT * len(labels) >= (counts > 0).sum() else None
    fit, held_out = model_selection.train_test_split(
        np.arange(len(labels)), test_size=_HELD_OUT, stratify=stratify, random_state=seed)
    # At least one of each class is fitted.
    missing = [row for label, row in zip(*np.unique(labels, return_index=True)) if label not in labels[fit]]
    fit, held_out = np.append(fit, missing).astype(int), np.setdiff1d(held_out, missing)
    # By cross-entropy: accuracies of a small part are coarse, and tie.
    judged = held_out if len(held_out) else fit
    losses = [_cross_entropy(_fit(inputs[fit], labels[fit], l2_per_example * len(fit)), inputs[judged], labels[judged])
              for l2_per_example in progress.track(
                  L2_PER_EXAMPLE_CHOICES, len(L2_PER_EXAMPLE_CHOICES), "logistic regression")]
    best = L2_PER_EXAMPLE_CHOICES[int(np.argmin(losses))]
    accuracy = _fit(inputs, labels, best * len(labels)).score(*test)
    return dict(accuracy=float(accuracy), l2_per_example=best)


class LogisticPath:
    """Logistic regressions of one set of examples with weaker and weaker l2 regularisation, each started at the last.

    Each minimises the sum of the cross-entropies + l2_of_sum / 2 |W|^2 by L-BFGS (paper, B.8.1); the biases are free.
    Labels [n] make a softmax over the classes; labels [n, classes] of 1, 0, or -1 for left out, one classifier per
    class against the rest.

    L-BFGS sees weights in units of the curvature at an earlier point of the path, averaged over the classes: what was
    an ellipsoid is nearly a ball. The minimum is the same, and is reached in a fraction of the iterations.
    """

    def __init__(self, inputs: np.ndarray, labels: np.ndarray):
        """Takes inputs [n, d] and labels [n] or [n, classes]."""
        self._loss, self._curvatures, self._classes, self._num_classes = _loss_of(labels)
        self._mean = inputs.mean(0, dtype=np.float64)
        # The optimal weights are combinations of the inputs. With fewer examples than features, solve for their
        # coordinates in the span of the inputs.
        centred, self._basis = inputs - self._mean, None
        if len(inputs) < inputs.shape[1]:
            self._basis, triangle = np.linalg.qr(centred.T)
            centred = triangle.T
        self._inputs = np.append(centred, np.ones([len(inputs), 1]), axis=1)  # The last is for the biases.
        self._weights = np.zeros([self._inputs.shape[1], len(self._classes)])
        self._evaluations = np.inf  # since the units were measured

    def fit(self, l2_of_sum: float) -> LogisticPath:
        """Fits the weights with this strength, starting at those of the last fit; returns self."""
        from scipy import optimize

        decay = np.full([len(self._weights), 1], l2_of_sum / len(self._inputs))
        decay[-1] = 0
        # Measured again when evaluations have cost as much as that does.
        if self._evaluations >= len(self._weights) / (2 * len(self._classes)):
            self._inverse_units, self._evaluations = self._curvature_root(decay), 0
            self._units = np.linalg.inv(self._inverse_units)
        units = self._units

        def objective(flat):
            weights = units @ flat.reshape(self._weights.shape)
            loss, slopes = self._loss(self._inputs @ weights)
            decayed = decay * weights
            return loss + np.vdot(decayed, weights) / 2, (units.T @ (self._inputs.T @ slopes + decayed)).ravel()

        options = dict(maxiter=PATH_ITERATIONS, maxfun=2 * PATH_ITERATIONS, maxcor=20, gtol=PATH_TOLERANCE,
                       ftol=PATH_IMPROVEMENT)
        with scipy_blas_threads().limit(limits=1):
            found = optimize.minimize(objective, (self._inverse_units @ self._weights).ravel(), jac=True,
                                      method="L-BFGS-B", options=options)
        self._weights = units @ found.x.reshape(self._weights.shape)
        self._evaluations += found.nfev
        return self

    def _curvature_root(self, decay):
        """An upper triangle R, such that R' R is the mean of the classes' Hessians at these weights, biases last."""
        curvatures = self._curvatures(self._inputs @ self._weights)[:, np.newaxis]
        blocks = range(0, len(self._inputs), _ROWS)  # A second copy of large inputs would not fit.
        hessian = sum(self._inputs[row:row + _ROWS].T @ (self._inputs[row:row + _ROWS] * curvatures[row:row + _ROWS])
                      for row in blocks) / len(self._inputs)
        ridge = 1e-9 * hessian.diagonal().max() + 1e-12  # As features may be constant, and examples few.
        return np.linalg.cholesky(hessian + np.diag(decay[:, 0] + ridge)).T

    @property
    def kernel(self) -> np.ndarray:
        """Weights [classes, d], without biases, of the classes that were seen."""
        return (self._weights[:-1] if self._basis is None else self._basis @ self._weights[:-1]).T

    def scores(self, inputs: np.ndarray) -> np.ndarray:
        """Logits [n, classes] of inputs [n, d]; -inf for classes that could not be learnt."""
        scores = np.full([len(inputs), self._num_classes], -np.inf)
        scores[:, self._classes] = (inputs - self._mean) @ self.kernel.T + self._weights[-1]
        return scores


@functools.cache
def scipy_blas_threads() -> Any:
    """The threads of scipy's own copy of BLAS, if it has one: they and NumPy's hold each other up, threefold."""
    import scipy.optimize  # noqa: F401 (for it to be loaded)
    import threadpoolctl

    pools = threadpoolctl.ThreadpoolController()
    return pools.select(filepath=[pool["filepath"] for pool in pools.info() if "scipy.libs" in pool["filepath"]])


def has_two_classes(labels: np.ndarray) -> bool:
    """Whether labels [n] are of two classes, or labels [n, classes] have both a 1 and a 0 of any class."""
    return len(_classes_to_learn(labels)) >= (1 if labels.ndim == 2 else 2)


def _classes_to_learn(labels):
    """Index of the classes that can be learnt."""
    return np.flatnonzero((labels == 1).any(0) & (labels == 0).any(0)) if labels.ndim == 2 else np.unique(labels)


def _loss_of(labels):
    """What logits cost: two functions, the classes that can be learnt (an index), and the number of all classes.

    The functions take logits [n, classes that can be learnt]. The first returns the mean of the cross-entropies, and
    its gradient, of the same shape; the second its second derivatives, times n, as means over the classes [n].
    """
    from scipy import special

    classes = _classes_to_learn(labels)
    if labels.ndim == 2:
        shown, known = labels[:, classes] == 1, labels[:, classes] >= 0

        def loss(logits):
            losses, slopes = np.logaddexp(0, logits) - shown * logits, special.expit(logits) - shown
            return np.sum(losses * known) / len(labels), slopes * known / len(labels)

        return loss, lambda logits: _variances(special.expit(logits) * known), classes, labels.shape[1]
    rows, places = np.arange(len(labels)), np.searchsorted(classes, labels)

    def loss(logits):
        logits = logits - logits.max(1, keepdims=True)
        slopes = np.exp(logits)
        sums = slopes.sum(1, keepdims=True)
        slopes /= sums
        slopes[rows, places] -= 1
        return np.mean(np.log(sums[:, 0]) - logits[rows, places]), slopes / len(labels)

    return loss, lambda logits: _variances(special.softmax(logits, 1)), classes, classes.max() + 1


def _variances(probabilities):
    """Of draws with probabilities [n, classes], as means over the classes [n]."""
    return (probabilities * (1 - probabilities)).mean(1)


def _fit(inputs, labels, l2_of_sum):
    """Returns a logistic regression on standardised inputs; minimises sum of cross-entropies + l2_of_sum / 2 |W|^2."""
    from sklearn import exceptions, linear_model, pipeline, preprocessing

    model = linear_model.LogisticRegression(C=1.0 / l2_of_sum, solver="lbfgs", max_iter=_MAX_ITERATIONS)
    with warnings.catch_warnings():  # A fit cut short is one more candidate, judged like the others.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        return pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(inputs, labels)


def _cross_entropy(model, inputs, labels):
    """Mean cross-entropy; classes that the fit never saw count as probability 1e-12."""
    column = {label: index for index, label in enumerate(model.classes_)}
    rows = model.predict_proba(inputs)
    chosen = [row[column[label]] if label in column else 0.0 for row, label in zip(rows, labels)]
    return -np.mean(np.log(np.maximum(chosen, 1e-12)))
