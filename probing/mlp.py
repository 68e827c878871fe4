"""A small MLP on frozen features, for the probes of Table 3."""

from __future__ import annotations

import numpy as np
import tf_keras as keras

_SEED = 1
_HIDDEN_UNITS = 256
_BATCH_SIZE = 200
_MAX_EPOCHS = 100
# Early stopping, with the default values of scikit-learn's MLPClassifier: training stops after
# `_PATIENCE` epochs in which the accuracy on held-out examples did not increase by more than
# `_MIN_GAIN`. One of `_VALIDATION_SHARE` training examples is held out.
_VALIDATION_SHARE, _PATIENCE, _MIN_GAIN = 10, 10, 1e-4


class _Batches(keras.utils.Sequence):
    """Batches of rows of features, which may be a memory map. Each epoch has another order."""

    def __init__(self, vectors: np.ndarray, classes: np.ndarray, rows: np.ndarray):
        self._vectors, self._classes, self._rows = vectors, classes, rows
        self._random = np.random.default_rng(_SEED)

    def __len__(self) -> int:
        return -(-len(self._rows) // _BATCH_SIZE)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows[index * _BATCH_SIZE : (index + 1) * _BATCH_SIZE]
        return self._vectors[rows], self._classes[rows]

    def on_epoch_end(self) -> None:
        self._rows = self._random.permutation(self._rows)


def mlp_accuracy(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> float:
    """Returns the test accuracy of an MLP with one hidden layer, trained with Adam and early stopping.

    Features may be memory maps, which are read in batches.

    Args:
      train: (features [n, d], classes [n]).
      test: (features [m, d], classes [m]).
    """
    # Imported lazily, since only probes need it.
    from sklearn import preprocessing

    rows = np.random.default_rng(_SEED).permutation(len(train[1]))
    held_out, rows = np.split(rows, [-(-len(rows) // _VALIDATION_SHARE)])
    batches, scaler = _Batches(*train, rows), preprocessing.StandardScaler()
    for index in range(len(batches)):
        scaler.partial_fit(batches[index][0])
    num_classes, initializer = 1 + train[1].max(), keras.initializers.GlorotUniform(_SEED)
    network = keras.Sequential(
        [
            keras.layers.Normalization(mean=scaler.mean_, variance=scaler.var_),
            keras.layers.Dense(_HIDDEN_UNITS, "relu", kernel_initializer=initializer),
            keras.layers.Dense(num_classes, "softmax", kernel_initializer=initializer),
        ]
    )
    network.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    stop = keras.callbacks.EarlyStopping(
        "val_accuracy", _MIN_GAIN, _PATIENCE, restore_best_weights=True
    )
    network.fit(
        batches,
        epochs=_MAX_EPOCHS,
        verbose=0,
        callbacks=[stop],
        validation_data=_Batches(*train, held_out),
        shuffle=False,
    )
    return network.evaluate(_Batches(*test, np.arange(len(test[1]))), verbose=0)[1]
