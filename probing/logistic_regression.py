"""Logistic regression on frozen features, fitted by L-BFGS.

The strength of the l2 regularization follows one of two conventions:
- `l2_of_sum`: the objective is the sum of the cross-entropies plus l2_of_sum * |W|^2 / 2, as in the
  paper (B.8.1). All functions that fit weights use this convention.
- `l2_per_example` = l2_of_sum / number of examples: the objective is the mean of the
  cross-entropies plus l2_per_example * |W|^2 / 2. This convention makes strengths comparable across
  data sets of different sizes.

Examples are processed in blocks, so fits on features in a memory map (see `features.collect`) use
little more memory than the weights, the L-BFGS history and the Hessian [d, d].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import threadpoolctl
from scipy import optimize, special

from runtime import progress

# for standardized features
L2_PER_EXAMPLE_CHOICES = tuple(10.0**exponent for exponent in range(-4, 2))
_HELD_OUT_FRACTION = 0.2
_BLOCK_ROWS = 4096  # number of examples processed at once
_CACHED_BYTES = 2**28  # training sets up to this size are kept in memory as float64
PATH_ITERATIONS = 3000
# stopping threshold: maximum norm of the preconditioned gradient of the mean loss
PATH_TOLERANCE = 1e-6
PATH_LOSS_TOLERANCE = 1e-7  # stopping threshold: relative decrease of the mean loss per iteration


def lbfgs_accuracy(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int = 0
) -> dict[str, float]:
    """Evaluates l2-regularized multinomial logistic regression, following B.8.1 of the paper.

    Unlike in the paper, features are standardized, and only a few regularization strengths are
    tried, so that the evaluation is fast. The strength is selected on a held-out fifth of the
    training examples. The final fit uses all training examples.

    Args:
      train: (features [n, d], labels [n]).
      test: (features [m, d], labels [m]).
      seed: seed for selecting the held-out examples.

    Returns:
      A dict with `accuracy`, the test accuracy in [0, 1], and `l2_per_example`, the selected
      strength.
    """
    from sklearn import model_selection  # Imported lazily, since only this protocol needs it.

    inputs, labels = train
    _, counts = np.unique(labels, return_counts=True)
    can_stratify = counts.min() > 1 and _HELD_OUT_FRACTION * len(labels) >= len(counts)
    fit, held_out = model_selection.train_test_split(
        np.arange(len(labels)),
        test_size=_HELD_OUT_FRACTION,
        stratify=labels if can_stratify else None,
        random_state=seed,
    )
    # Include at least one example of each class in the fit.
    missing = [
        row for label, row in zip(*np.unique(labels, return_index=True)) if label not in labels[fit]
    ]
    fit, held_out = np.append(fit, missing).astype(int), np.setdiff1d(held_out, missing)
    selection = held_out if len(held_out) else fit
    path, losses = LogisticPath(inputs, labels, np.sort(fit), standardize=True), {}
    # `LogisticPath` requires decreasing strengths.
    strengths = sorted(L2_PER_EXAMPLE_CHOICES, reverse=True)
    for l2_per_example in progress.track(strengths, "logistic regression"):
        # Select by cross-entropy, since accuracies on few examples are coarse and often tie.
        losses[l2_per_example] = path.fit(l2_per_example * len(fit)).cross_entropy(
            inputs, labels, selection
        )
    best = min(L2_PER_EXAMPLE_CHOICES, key=losses.get)
    path = LogisticPath(inputs, labels, standardize=True).fit(best * len(labels))
    return dict(accuracy=path.accuracy(*test), l2_per_example=best)


class LogisticPath:
    """Regularization path: logistic regressions with decreasing l2 strength, each starting from the previous solution.

    Each fit minimizes the sum of the cross-entropies plus l2_of_sum * |W|^2 / 2 by L-BFGS (paper,
    B.8.1). Biases are not regularized. Labels [n] yield a softmax classifier. Labels [n, classes]
    with values 1, 0 and -1 (ignored) yield one binary classifier per class.

    The optimization is preconditioned with the class-averaged Hessian at an earlier point on the
    path. This does not change the minimum, but greatly reduces the number of iterations.
    """

    _loss: Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]

    def __init__(
        self,
        inputs: np.ndarray,
        labels: np.ndarray,
        rows: np.ndarray | None = None,
        standardize: bool = False,
    ):
        """Creates the path.

        Args:
          inputs: features [n, d], possibly in a memory map.
          labels: [n] or [n, classes].
          rows: indices of the training examples. None: all examples.
          standardize: whether to divide the features by their standard deviations, so that the
            scale of a feature does not affect the regularization.
        """
        # Imported lazily, since most runs fit no logistic regression.
        from sklearn import preprocessing

        self._inputs, self._rows = inputs, np.arange(len(inputs)) if rows is None else rows
        labels = labels[self._rows]
        self._classes = _fittable_classes(labels)
        if labels.ndim == 2:
            self._num_classes, self._targets = labels.shape[1], labels[:, self._classes]
            self._loss = _binary_loss
        else:
            self._num_classes, self._targets = (
                self._classes.max() + 1,
                np.searchsorted(self._classes, labels),
            )
            self._loss = _softmax_loss
        count, width = len(self._rows), inputs.shape[1]
        scaler = preprocessing.StandardScaler(with_std=standardize)
        for block in _slices(count):
            scaler.partial_fit(inputs[self._rows[block]])
        self._mean, self._scale = scaler.mean_, scaler.scale_ if standardize else 1.0
        self._basis = self._cached = None
        if count < width or 8 * count * (width + 1) <= _CACHED_BYTES:
            self._cached = self._prepare(self._rows)
        # The optimal weights are linear combinations of the inputs. With fewer examples than
        # features, solve for the weights' coordinates in the span of the inputs.
        if count < width:
            self._basis, triangle = np.linalg.qr(self._cached[:, :-1].T)
            self._cached = np.append(triangle.T, self._cached[:, -1:], axis=1)
        # One row per input or coordinate, and a last row of biases.
        self._weights = np.zeros([1 + min(count, width), len(self._classes)])
        # number of loss evaluations since the preconditioner was computed
        self._evaluations = np.inf

    def _prepare(self, rows: np.ndarray) -> np.ndarray:
        """Returns centered and scaled inputs as float64, with an appended column of ones for the biases."""
        prepared = np.ones([len(rows), len(self._mean) + 1])
        np.subtract(self._inputs[rows], self._mean, out=prepared[:, :-1])
        prepared[:, :-1] /= self._scale
        return prepared

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (inputs, targets) for blocks of training examples. Inputs are expressed in the basis, if any."""
        for block in _slices(len(self._rows)):
            inputs = (
                self._prepare(self._rows[block]) if self._cached is None else self._cached[block]
            )
            yield inputs, self._targets[block]

    def fit(self, l2_of_sum: float) -> LogisticPath:
        """Fits the weights, starting from the previous solution, and returns self."""
        decay = np.full([len(self._weights), 1], l2_of_sum / len(self._rows))
        decay[-1] = 0
        # Recompute the preconditioner once the L-BFGS iterations have cost as much as computing it.
        if self._evaluations >= len(self._weights) / (2 * len(self._classes)):
            self._hessian_root, self._evaluations = self._compute_hessian_root(decay), 0
            self._preconditioner = np.linalg.inv(self._hessian_root)
        preconditioner = self._preconditioner

        def objective(flat):
            weights = preconditioner @ flat.reshape(self._weights.shape)
            total_loss, total_grad = 0.0, np.zeros_like(weights)
            for inputs, targets in self._blocks():
                loss, logit_grad = self._loss(inputs @ weights, targets)
                total_loss += loss
                total_grad += inputs.T @ logit_grad
            decayed = decay * weights
            gradient = preconditioner.T @ (total_grad / len(self._rows) + decayed)
            return total_loss / len(self._rows) + np.vdot(decayed, weights) / 2, gradient.ravel()

        with scipy_blas_threads().limit(limits=1):
            result = optimize.minimize(
                objective,
                (self._hessian_root @ self._weights).ravel(),
                jac=True,
                method="L-BFGS-B",
                options=dict(
                    maxiter=PATH_ITERATIONS,
                    maxfun=2 * PATH_ITERATIONS,
                    maxcor=20,
                    gtol=PATH_TOLERANCE,
                    ftol=PATH_LOSS_TOLERANCE,
                ),
            )
        self._weights = preconditioner @ result.x.reshape(self._weights.shape)
        self._evaluations += result.nfev
        return self

    def _compute_hessian_root(self, decay: np.ndarray) -> np.ndarray:
        """Returns the upper triangular matrix R such that R' R is the class-averaged Hessian at the current weights."""
        hessian = np.zeros([len(self._weights)] * 2)
        for inputs, targets in self._blocks():
            # The gradient with respect to a logit is p or p - 1, or 0 if the label is unknown, so
            # the second derivative, p (1 - p), is |gradient| (1 - |gradient|).
            slope = abs(self._loss(inputs @ self._weights, targets)[1])
            hessian += inputs.T @ (inputs * np.mean(slope * (1 - slope), 1, keepdims=True))
        hessian /= len(self._rows)
        # Add a ridge, since the Hessian is singular if features are constant or there are few
        # examples.
        ridge = 1e-9 * hessian.diagonal().max() + 1e-12
        return np.linalg.cholesky(hessian + np.diag(decay[:, 0] + ridge)).T

    @property
    def kernel(self) -> np.ndarray:
        """Weights [classes, d] of the fitted classes, without biases."""
        kernel = self._weights[:-1] if self._basis is None else self._basis @ self._weights[:-1]
        return kernel.T / self._scale

    def scores(self, inputs: np.ndarray) -> np.ndarray:
        """Returns logits [n, classes] for inputs [n, d], with -inf for classes that could not be fitted."""
        scores = np.full([len(inputs), self._num_classes], -np.inf)
        kernel = self.kernel.T
        for block in _slices(len(inputs)):
            scores[block, self._classes] = (inputs[block] - self._mean) @ kernel + self._weights[-1]
        return scores

    def accuracy(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        """Returns the fraction of inputs [n, d] whose label [n] has the highest score."""
        hits = [
            self.scores(inputs[block]).argmax(1) == labels[block] for block in _slices(len(inputs))
        ]
        return float(np.mean(np.concatenate(hits)))

    def cross_entropy(self, inputs: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> float:
        """Returns the mean cross-entropy of the examples with indices `rows`.

        Probabilities below 1e-12 are replaced by 1e-12. Otherwise, classes that could not be fitted
        would have an infinite cross-entropy.
        """
        total = 0.0
        for block in _slices(len(rows)):
            examples = rows[block]
            log_probabilities = special.log_softmax(self.scores(inputs[examples]), 1)
            # Sum the log-probabilities of the labels.
            total += np.maximum(
                log_probabilities[np.arange(len(examples)), labels[examples]], np.log(1e-12)
            ).sum()
        return -total / len(rows)


def _slices(count: int) -> Iterator[slice]:
    """Yields slices that divide `count` rows into blocks."""
    for start in range(0, count, _BLOCK_ROWS):
        yield slice(start, start + _BLOCK_ROWS)


@functools.cache
def scipy_blas_threads() -> threadpoolctl.ThreadpoolController:
    """Returns a controller for the threads of SciPy's bundled BLAS.

    Without a limit, these threads compete with NumPy's BLAS threads, which makes fits three times
    slower.
    """
    pools = threadpoolctl.ThreadpoolController()
    return pools.select(
        filepath=[pool["filepath"] for pool in pools.info() if "scipy.libs" in pool["filepath"]]
    )


def has_two_classes(labels: np.ndarray) -> bool:
    """Returns whether a classifier can be fitted.

    Labels [n] must have at least two distinct values. Labels [n, classes] must have a column that
    contains both 1 and 0.
    """
    return len(_fittable_classes(labels)) >= (1 if labels.ndim == 2 else 2)


def _fittable_classes(labels: np.ndarray) -> np.ndarray:
    """Returns the classes that can be fitted.

    These are the distinct values of labels [n], or the indices of those columns of labels [n,
    classes] that contain both 1 and 0.
    """
    return (
        np.flatnonzero((labels == 1).any(0) & (labels == 0).any(0))
        if labels.ndim == 2
        else np.unique(labels)
    )


def _softmax_loss(logits: np.ndarray, columns: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the sum of the cross-entropies of logits [n, classes] with labels [n], and the gradient [n, classes]."""
    log_probabilities, correct = special.log_softmax(logits, 1), (np.arange(len(columns)), columns)
    gradient = np.exp(log_probabilities)
    gradient[correct] -= 1
    return -log_probabilities[correct].sum(), gradient


def _binary_loss(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the sum of the binary cross-entropies of logits [n, classes], and the gradient [n, classes].

    Targets [n, classes] are 1, 0 or -1 (ignored).
    """
    is_present, is_known = targets == 1, targets >= 0
    losses, gradient = (
        np.logaddexp(0, logits) - is_present * logits,
        special.expit(logits) - is_present,
    )
    return np.sum(losses * is_known), gradient * is_known
