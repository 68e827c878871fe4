"""Linear transfer's sweep over 45 strengths of l2: time and losses of the path against 45 cold fits.

    python -m benchmarks.l2_path [--features=FILE.npz] [--examples=N] [--without_library]

FILE is a features_train.npz of `python -m transfer linear --out=DIR`; without one, the digits behind a random layer of
512 ReLUs. Yardsticks: the path's own L-BFGS, each fit from zero, and scikit-learn's, from zero, too, on centred inputs,
with the same tolerance and iterations (which takes hours for tens of thousands of examples), as it comes, and with one
thread of scipy's own BLAS, as ours. Losses are those that all minimise, for each example.
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
    """Handwritten digits behind a random layer: [1437, 512] and labels."""
    from sklearn import datasets, model_selection

    inputs, labels = datasets.load_digits(return_X_y=True)
    inputs, _, labels, _ = model_selection.train_test_split(inputs / 16, labels, test_size=0.2, random_state=0)
    random = np.random.default_rng(0)
    layer, bias = random.normal(size=(64, 512)) / 8, random.normal(size=512) / 8
    return np.maximum(inputs @ layer + bias, 0).astype(np.float32), labels


def loss(scores, kernel, labels, l2_of_sum):
    """Mean cross-entropy, and l2_of_sum / 2 of the kernel's squares over the number of examples."""
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean() + l2_of_sum / 2 * np.sum(kernel**2) / len(labels)


def path_fits(inputs, labels):
    """Losses of the path, the strongest l2 first."""
    path = logistic_regression.LogisticPath(inputs, labels)
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        path.fit(l2_of_sum)
        yield loss(path.scores(inputs), path.kernel, labels, l2_of_sum)


def cold_fits(inputs, labels):
    """The same, each fit from zero."""
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        path = logistic_regression.LogisticPath(inputs, labels).fit(l2_of_sum)
        yield loss(path.scores(inputs), path.kernel, labels, l2_of_sum)


def library_fits(inputs, labels):
    """The same by scikit-learn."""
    from sklearn import linear_model

    inputs = inputs - inputs.mean(0, dtype=np.float64)
    for l2_of_sum in linear_evaluation.L2_OF_SUM_CHOICES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It ends after so many iterations.
            model = linear_model.LogisticRegression(C=1 / l2_of_sum, tol=logistic_regression.PATH_TOLERANCE,
                                                    max_iter=logistic_regression.PATH_ITERATIONS).fit(inputs, labels)
        yield loss(model.decision_function(inputs), model.coef_, labels, l2_of_sum)


def frugal_library_fits(inputs, labels):
    """The same, with threads as ours."""
    with logistic_regression.scipy_blas_threads().limit(limits=1):
        yield from library_fits(inputs, labels)


def timed(fits, name):
    """Losses [45], and seconds."""
    begin = time.perf_counter()
    losses = list(progress.track(fits, len(linear_evaluation.L2_OF_SUM_CHOICES), name))
    return np.array(losses), time.perf_counter() - begin


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--features", help="a .npz file of vectors and labels")
    parser.add_argument("--examples", type=int, help="how many of them; unset: all")
    parser.add_argument("--without_library", action="store_true", help="without scikit-learn's")
    arguments = parser.parse_args()
    measure.report_machine()
    if arguments.features:
        with np.load(arguments.features) as file:
            inputs, labels = file["vectors"], file["labels"]
    else:
        inputs, labels = default_features()
    inputs, labels = inputs[:arguments.examples], labels[:arguments.examples]
    if labels.ndim > 1:
        parser.error(f"--features={arguments.features} has several labels an example: name another")
    warm, ours = timed(path_fits(inputs, labels), "path")
    yardsticks = {"the same from zero": cold_fits}
    if not arguments.without_library:
        yardsticks |= {"scikit-learn": library_fits, "scikit-learn, one thread of scipy's": frugal_library_fits}
    for name, fits in yardsticks.items():
        cold, yardstick = timed(fits(inputs, labels), name)
        case = f"{len(labels)} examples, {inputs.shape[1]} features, 45 strengths, against {name}"
        measure.report("l2_path", case, "s", ours, yardstick,
                       greatest_excess_of_loss=float(f"{(warm - cold).max():.2g}"))


if __name__ == "__main__":
    main()
