"""A small MLP on frozen features, for the probes of Table 3."""

from __future__ import annotations

import copy

import numpy as np

_SEED = 1
_HIDDEN_UNITS = 256
# Early stopping, with the default values of scikit-learn's MLPClassifier: training stops after
# `_PATIENCE` epochs in which the accuracy on held-out examples did not increase by more than
# `_MIN_GAIN`.
_VALIDATION_FRACTION, _PATIENCE, _MIN_GAIN = 0.1, 10, 1e-4
_MAX_EPOCHS = 100
_BLOCK_ROWS = 10_000  # number of examples in memory; a multiple of the MLP's batch size of 200


def mlp_accuracy(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> float:
    """Returns the test accuracy of an MLP with one hidden layer, trained with Adam and early stopping.

    Features may be memory maps, which are read in blocks.

    Args:
      train: (features [n, d], classes [n]).
      test: (features [m, d], classes [m]).
    """
    # Imported lazily, since only probes need it.
    from sklearn import model_selection, neural_network, preprocessing

    vectors, classes = train
    counts = np.unique(classes, return_counts=True)[1]
    can_stratify = counts.min() > 1 and _VALIDATION_FRACTION * len(classes) >= len(counts)
    fit, validation = model_selection.train_test_split(
        np.arange(len(classes)),
        test_size=_VALIDATION_FRACTION,
        stratify=classes if can_stratify else None,
        random_state=_SEED,
    )
    scaler = preprocessing.StandardScaler()
    for rows in _blocks(np.sort(fit)):
        scaler.partial_fit(vectors[rows])
    network = neural_network.MLPClassifier(_HIDDEN_UNITS, random_state=_SEED)
    random, labels = np.random.default_rng(_SEED), np.unique(classes)
    best_accuracy, best_network, num_epochs_without_gain = -1.0, None, 0
    for _ in range(_MAX_EPOCHS):
        for rows in _blocks(random.permutation(fit)):
            network.partial_fit(scaler.transform(vectors[rows]), classes[rows], classes=labels)
        accuracy = _accuracy(network, scaler, vectors, classes, validation)
        num_epochs_without_gain = (
            0 if accuracy > best_accuracy + _MIN_GAIN else num_epochs_without_gain + 1
        )
        if accuracy > best_accuracy:
            best_accuracy, best_network = accuracy, copy.deepcopy(network)
        if num_epochs_without_gain >= _PATIENCE:
            break
    return _accuracy(best_network, scaler, *test, np.arange(len(test[1])))


def _blocks(rows):
    """Divides row indices [n] into blocks of at most `_BLOCK_ROWS`."""
    return np.split(rows, range(_BLOCK_ROWS, len(rows), _BLOCK_ROWS))


def _accuracy(network, scaler, vectors, classes, rows):
    """Returns the accuracy of a network on the given rows of vectors [n, d]."""
    hits = [
        network.predict(scaler.transform(vectors[block])) == classes[block]
        for block in _blocks(rows)
    ]
    return float(np.concatenate(hits).mean())
