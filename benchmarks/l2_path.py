"""Linear transfer's sweep over 45 strengths of l2: time and losses of the warm-started path against 45 cold fits.

    python -m benchmarks.l2_path [--features=FILE.npz] [--examples=N]

FILE is a features_fit.npz of `python transfer.py linear --out=DIR`; without one, the digits behind a random layer of
512 ReLUs. Yardstick: scikit-learn's logistic regression, each fit from zero, with the same tolerance and iterations.
Losses are those that both minimise, for each example.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np

import features
import progress
import transfer
from benchmarks import measure


def default_features():
    """Handwritten digits behind a random layer: [1437, 512] and labels."""
    from sklearn import datasets, model_selection

    inputs, labels = datasets.load_digits(return_X_y=True)
    inputs, _, labels, _ = model_selection.train_test_split(inputs / 16, labels, test_size=0.2, random_state=0)
    random = np.random.default_rng(0)
    layer, bias = random.normal(size=(64, 512)) / 8, random.normal(size=512) / 8
    return np.maximum(inputs @ layer + bias, 0).astype(np.float32), labels


def loss(scores, kernel, labels, l2):
    """Mean cross-entropy, and l2 / 2 of the kernel's squares over the number of examples."""
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean() + l2 / 2 * np.sum(kernel**2) / len(labels)


def cold_fits(inputs, labels):
    """Losses of fits from zero, the strongest l2 first, and their seconds."""
    from sklearn import linear_model

    begin, losses, inputs = time.perf_counter(), [], np.float64(inputs)
    for l2 in progress.track(transfer.L2_CHOICES, len(transfer.L2_CHOICES), "cold fits"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = linear_model.LogisticRegression(C=1 / l2, tol=features.PATH_TOLERANCE,
                                                    max_iter=features.PATH_ITERATIONS).fit(inputs, labels)
        losses.append(loss(model.decision_function(inputs), model.coef_, labels, l2))
    return np.array(losses), time.perf_counter() - begin


def path_fits(inputs, labels):
    """The same of `features.LogisticPath`."""
    begin, losses = time.perf_counter(), []
    path = features.logistic_path(inputs, labels)
    for l2 in progress.track(transfer.L2_CHOICES, len(transfer.L2_CHOICES), "path"):
        path.fit(l2)
        losses.append(loss(path.scores(inputs), path.kernel, labels, l2))
    return np.array(losses), time.perf_counter() - begin


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--features", help="a .npz file of vectors and labels")
    parser.add_argument("--examples", type=int, help="how many of them; unset: all")
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
    warm, ours = path_fits(inputs, labels)
    for kind, mean in (("", 0.0), (", inputs centred for both", inputs.mean(0, dtype=np.float64))):
        cold, yardstick = cold_fits(inputs - mean, labels)
        case = f"{len(labels)} examples, {inputs.shape[1]} features, 45 strengths{kind}"
        measure.report("l2_path", case, "s", ours, yardstick,
                       greatest_excess_of_loss=float(f"{(warm - cold).max():.2g}"))


if __name__ == "__main__":
    main()
