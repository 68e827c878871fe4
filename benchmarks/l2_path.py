"""Time and losses of the linear evaluation sweep over 45 l2 strengths, compared with 45 independent fits.

    python -m benchmarks.l2_path [--features=FILE.npz] [--examples=N] [--skip_sklearn]

FILE is a features_train.npz written by `python -m transfer linear`. By default, the features are
activations of a random layer of 512 ReLUs on digits. Our implementation starts each fit from the
previous solution. Three baselines initialize each fit to zero. The first baseline is our L-BFGS.
The second is scikit-learn on centered inputs, with the same tolerance and maximum number of
iterations, which takes hours for tens of thousands of examples. The third is the same as the
second, but with SciPy's BLAS limited to one thread, as in our L-BFGS. All minimize the same loss,
which is reported per example.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np

from benchmarks import measure
from probing import logistic_regression
from runtime import progress
from transfer import linear_evaluation


def default_features():
    """Returns the activations [1437, 512] of a randomly initialized layer on handwritten digits, and the labels."""
    from sklearn import datasets, model_selection

    inputs, labels = datasets.load_digits(return_X_y=True)
    inputs, _, labels, _ = model_selection.train_test_split(
        inputs / 16, labels, test_size=0.2, random_state=0
    )
    random = np.random.default_rng(0)
    layer, bias = random.normal(size=(64, 512)) / 8, random.normal(size=512) / 8
    return np.maximum(inputs @ layer + bias, 0).astype(np.float32), labels


def loss(scores, kernel, labels, l2_of_sum):
    """Returns the mean cross-entropy of n examples plus the penalty l2_of_sum * |kernel|^2 / (2 * n)."""
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean() + l2_of_sum / 2 * np.sum(
        kernel**2
    ) / len(labels)


def path_fits(inputs, labels):
    """Yields the losses along the path, strongest l2 first."""
    path = logistic_regression.LogisticPath(inputs, labels)
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        path.fit(l2_of_sum)
        yield loss(path.scores(inputs), path.kernel, labels, l2_of_sum)


def cold_fits(inputs, labels):
    """Yields the losses of independent fits, each initialized to zero."""
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        path = logistic_regression.LogisticPath(inputs, labels).fit(l2_of_sum)
        yield loss(path.scores(inputs), path.kernel, labels, l2_of_sum)


def sklearn_fits(inputs, labels):
    """Yields the losses of scikit-learn's fits."""
    from sklearn import linear_model

    inputs = inputs - inputs.mean(0, dtype=np.float64)
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn warns if a fit does not converge.
            model = linear_model.LogisticRegression(
                C=1 / l2_of_sum,
                tol=logistic_regression.PATH_TOLERANCE,
                max_iter=logistic_regression.PATH_ITERATIONS,
            ).fit(inputs, labels)
        yield loss(model.decision_function(inputs), model.coef_, labels, l2_of_sum)


def single_thread_sklearn_fits(inputs, labels):
    """Yields the loss of each scikit-learn fit. SciPy's BLAS is limited to one thread, as in our implementation."""
    with logistic_regression.scipy_blas_threads().limit(limits=1):
        yield from sklearn_fits(inputs, labels)


def time_fits(fits, name):
    """Returns the losses [45] and the total time of the fits in seconds."""
    begin = time.perf_counter()
    losses = list(progress.track(fits, len(linear_evaluation.L2_OF_SUM_CHOICES), name))
    return np.array(losses), time.perf_counter() - begin


def main():
    """Prints one JSON line per baseline."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--features", help=".npz file with the arrays 'vectors' and 'labels' (default: see above)"
    )
    parser.add_argument("--examples", type=int, help="number of examples to use (default: all)")
    parser.add_argument(
        "--skip_sklearn", action="store_true", help="omit the scikit-learn baselines"
    )
    arguments = parser.parse_args()
    measure.report_machine()
    if arguments.features:
        with np.load(arguments.features) as file:
            inputs, labels = file["vectors"], file["labels"]
    else:
        inputs, labels = default_features()
    inputs, labels = inputs[: arguments.examples], labels[: arguments.examples]
    if labels.ndim > 1:
        parser.error(
            f"--features={arguments.features}: the file has multiple labels per example. Use"
            " another file."
        )
    path_losses, path_seconds = time_fits(path_fits(inputs, labels), "path")
    baselines = {"our L-BFGS, zero initialization": cold_fits}
    if not arguments.skip_sklearn:
        baselines |= {
            "scikit-learn": sklearn_fits,
            "scikit-learn, one BLAS thread": single_thread_sklearn_fits,
        }
    for name, fits in baselines.items():
        losses, seconds = time_fits(fits(inputs, labels), name)
        case = f"{len(labels)} examples, {inputs.shape[1]} features, 45 strengths, against {name}"
        measure.report(
            "l2_path",
            case,
            "s",
            path_seconds,
            seconds,
            max_loss_excess=float(f"{(path_losses - losses).max():.2g}"),
        )


if __name__ == "__main__":
    main()
