"""Logistic regression on frozen features, fitted by L-BFGS.

The strength of the l2 regularization follows one of two conventions:
- `l2_of_sum`: the objective is the sum of the cross-entropies plus l2_of_sum * |W|^2 / 2, as in the paper (B.8.1). All
  functions that fit weights use this convention.
- `l2_per_example` = l2_of_sum / number of examples: the objective is the mean of the cross-entropies plus
  l2_per_example * |W|^2 / 2. This convention makes strengths comparable across data sets of different sizes.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from probing import features
from runtime import progress

L2_PER_EXAMPLE_CHOICES = tuple(10.0**exponent for exponent in range(-4, 2))  # for standardized features
_HELD_OUT_FRACTION = 0.2
_MAX_ITERATIONS = 300
_HESSIAN_ROWS = 4096  # number of examples per block when computing a Hessian
PATH_ITERATIONS = 3000
PATH_TOLERANCE = 1e-6  # stopping threshold: maximum norm of the preconditioned gradient of the mean loss
PATH_LOSS_TOLERANCE = 1e-7  # stopping threshold: relative decrease of the mean loss per iteration


def lbfgs_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int = 0
                   ) -> dict[str, float]:
    """Evaluates l2-regularized multinomial logistic regression, following B.8.1 of the paper.

    Unlike in the paper, features are standardized and only a few strengths are tried, which is fast on small data sets.
    The strength is selected on a held-out fifth of the training examples. The final fit uses all training examples.

    Args:
      train: (features [n, d], labels [n]).
      test: (features [m, d], labels [m]).
      seed: seed for selecting the held-out examples.

    Returns:
      A dict with the test `accuracy`, in [0, 1], and `l2_per_example`, the selected strength.

    Raises:
      UserError: the features contain NaN or Inf.
    """
    from sklearn import model_selection  # Imported lazily, since only this protocol needs it.

    features.check_feature_sets(train, test, "lbfgs")
    inputs, labels = train
    counts = np.bincount(labels)
    can_stratify = counts[counts > 0].min() > 1 and _HELD_OUT_FRACTION * len(labels) >= (counts > 0).sum()
    fit, held_out = model_selection.train_test_split(
        np.arange(len(labels)), test_size=_HELD_OUT_FRACTION, stratify=labels if can_stratify else None,
        random_state=seed)
    # Include at least one example of each class in the fit.
    missing = [row for label, row in zip(*np.unique(labels, return_index=True)) if label not in labels[fit]]
    fit, held_out = np.append(fit, missing).astype(int), np.setdiff1d(held_out, missing)
    # Select by cross-entropy, since accuracies on few examples are coarse and often tie.
    selection = held_out if len(held_out) else fit
    losses = [_cross_entropy(_fit(inputs[fit], labels[fit], l2_per_example * len(fit)),
                             inputs[selection], labels[selection])
              for l2_per_example in progress.track(
                  L2_PER_EXAMPLE_CHOICES, len(L2_PER_EXAMPLE_CHOICES), "logistic regression")]
    best = L2_PER_EXAMPLE_CHOICES[int(np.argmin(losses))]
    accuracy = _fit(inputs, labels, best * len(labels)).score(*test)
    return dict(accuracy=float(accuracy), l2_per_example=best)


class LogisticPath:
    """Regularization path: logistic regressions with decreasing l2 strength, each starting from the previous solution.

    Each fit minimizes the sum of the cross-entropies plus l2_of_sum * |W|^2 / 2 by L-BFGS (paper, B.8.1). Biases are
    not regularized. Labels [n] yield a softmax classifier. Labels [n, classes] with values 1, 0 and -1 (ignored) yield
    one binary classifier per class.

    The optimization is preconditioned with the class-averaged Hessian at an earlier point on the path. This
    does not change the minimum, but greatly reduces the number of iterations.
    """

    def __init__(self, inputs: np.ndarray, labels: np.ndarray):
        """Creates the path for inputs [n, d] and labels [n] or [n, classes]."""
        self._loss, self._curvatures, self._classes, self._num_classes = _make_loss(labels)
        self._mean = inputs.mean(0, dtype=np.float64)
        # The optimal weights are linear combinations of the inputs. With fewer examples than features, solve for the
        # weights' coordinates in the span of the inputs.
        centered, self._basis = inputs - self._mean, None
        if len(inputs) < inputs.shape[1]:
            self._basis, triangle = np.linalg.qr(centered.T)
            centered = triangle.T
        self._inputs = np.append(centered, np.ones([len(inputs), 1]), axis=1)  # The last column is for the biases.
        self._weights = np.zeros([self._inputs.shape[1], len(self._classes)])
        self._evaluations = np.inf  # number of loss evaluations since the preconditioner was computed

    def fit(self, l2_of_sum: float) -> LogisticPath:
        """Fits the weights, starting from the previous solution, and returns self."""
        from scipy import optimize

        decay = np.full([len(self._weights), 1], l2_of_sum / len(self._inputs))
        decay[-1] = 0
        # Recompute the preconditioner once the L-BFGS iterations have cost as much as computing it.
        if self._evaluations >= len(self._weights) / (2 * len(self._classes)):
            self._hessian_root, self._evaluations = self._compute_hessian_root(decay), 0
            self._preconditioner = np.linalg.inv(self._hessian_root)
        preconditioner = self._preconditioner

        def objective(flat):
            weights = preconditioner @ flat.reshape(self._weights.shape)
            loss, logit_grad = self._loss(self._inputs @ weights)
            decayed = decay * weights
            gradient = preconditioner.T @ (self._inputs.T @ logit_grad + decayed)
            return loss + np.vdot(decayed, weights) / 2, gradient.ravel()

        options = dict(maxiter=PATH_ITERATIONS, maxfun=2 * PATH_ITERATIONS, maxcor=20, gtol=PATH_TOLERANCE,
                       ftol=PATH_LOSS_TOLERANCE)
        with scipy_blas_threads().limit(limits=1):
            result = optimize.minimize(objective, (self._hessian_root @ self._weights).ravel(), jac=True,
                                       method="L-BFGS-B", options=options)
        self._weights = preconditioner @ result.x.reshape(self._weights.shape)
        self._evaluations += result.nfev
        return self

    def _compute_hessian_root(self, decay):
        """Returns the upper triangular matrix R such that R' R is the class-averaged Hessian at the current weights."""
        curvatures = self._curvatures(self._inputs @ self._weights)[:, np.newaxis]
        blocks = [slice(row, row + _HESSIAN_ROWS) for row in range(0, len(self._inputs), _HESSIAN_ROWS)]
        # Process the inputs in blocks, since a second copy of them may not fit in memory.
        hessian = sum(self._inputs[rows].T @ (self._inputs[rows] * curvatures[rows]) for rows in blocks)
        hessian /= len(self._inputs)
        # Add a ridge, since the Hessian is singular if features are constant or there are few examples.
        ridge = 1e-9 * hessian.diagonal().max() + 1e-12
        return np.linalg.cholesky(hessian + np.diag(decay[:, 0] + ridge)).T

    @property
    def kernel(self) -> np.ndarray:
        """Weights [classes, d] of the fitted classes, without biases."""
        return (self._weights[:-1] if self._basis is None else self._basis @ self._weights[:-1]).T

    def scores(self, inputs: np.ndarray) -> np.ndarray:
        """Returns logits [n, classes] for inputs [n, d], with -inf for classes that could not be fitted."""
        scores = np.full([len(inputs), self._num_classes], -np.inf)
        scores[:, self._classes] = (inputs - self._mean) @ self.kernel.T + self._weights[-1]
        return scores


@functools.cache
def scipy_blas_threads() -> Any:
    """Returns a controller for the threads of SciPy's bundled BLAS.

    Without a limit, these threads compete with NumPy's BLAS threads, which made fits three times slower.
    """
    import scipy.optimize  # noqa: F401 (loads the library)
    import threadpoolctl

    pools = threadpoolctl.ThreadpoolController()
    return pools.select(filepath=[pool["filepath"] for pool in pools.info() if "scipy.libs" in pool["filepath"]])


def has_two_classes(labels: np.ndarray) -> bool:
    """Returns whether labels [n] contain two classes, or labels [n, classes] contain a class with both 1 and 0."""
    return len(_fittable_classes(labels)) >= (1 if labels.ndim == 2 else 2)


def _fittable_classes(labels):
    """Returns the indices of the classes in labels [n], or of the classes with both 1 and 0 in labels [n, classes]."""
    return np.flatnonzero((labels == 1).any(0) & (labels == 0).any(0)) if labels.ndim == 2 else np.unique(labels)


def _make_loss(labels):
    """Returns a loss function for `labels`, its curvature function, the fittable classes and the number of classes.

    Both functions take logits [n, fittable classes]. The loss function returns the mean cross-entropy and its
    gradient with respect to the logits. The curvature [n] is n times the class-averaged diagonal of the Hessian.
    """
    from scipy import special

    classes = _fittable_classes(labels)
    if labels.ndim == 2:
        is_present, is_known = labels[:, classes] == 1, labels[:, classes] >= 0

        def loss(logits):
            losses, gradient = np.logaddexp(0, logits) - is_present * logits, special.expit(logits) - is_present
            return np.sum(losses * is_known) / len(labels), gradient * is_known / len(labels)

        return loss, lambda logits: _variances(special.expit(logits) * is_known), classes, labels.shape[1]
    rows, columns = np.arange(len(labels)), np.searchsorted(classes, labels)

    def loss(logits):
        logits = logits - logits.max(1, keepdims=True)
        gradient = np.exp(logits)
        sums = gradient.sum(1, keepdims=True)
        gradient /= sums
        gradient[rows, columns] -= 1
        return np.mean(np.log(sums[:, 0]) - logits[rows, columns]), gradient / len(labels)

    return loss, lambda logits: _variances(special.softmax(logits, 1)), classes, classes.max() + 1


def _variances(probabilities):
    """Returns the Bernoulli variances of probabilities [n, classes], averaged over the classes."""
    return (probabilities * (1 - probabilities)).mean(1)


def _fit(inputs, labels, l2_of_sum):
    """Fits a logistic regression on standardized inputs."""
    from sklearn import exceptions, linear_model, pipeline, preprocessing

    model = linear_model.LogisticRegression(C=1.0 / l2_of_sum, solver="lbfgs", max_iter=_MAX_ITERATIONS)
    with warnings.catch_warnings():  # A fit that has not converged is a valid candidate.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        return pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(inputs, labels)


def _cross_entropy(model, inputs, labels):
    """Returns the mean cross-entropy; classes that were not fitted have probability 1e-12."""
    columns = {label: index for index, label in enumerate(model.classes_)}
    rows = model.predict_proba(inputs)
    probabilities = [row[columns[label]] if label in columns else 0.0 for row, label in zip(rows, labels)]
    return -np.mean(np.log(np.maximum(probabilities, 1e-12)))
