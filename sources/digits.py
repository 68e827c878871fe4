"""scikit-learn's `digits` data set."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from sources.indexed import IndexedSource


@functools.cache
def _load_digits() -> Any:
    """Loads scikit-learn's data set. The result is cached, because parsing the text file is slow."""
    # Imported here and below because only this data set requires scikit-learn.
    from sklearn import datasets

    return datasets.load_digits()


def digits_source() -> IndexedSource:
    """Returns a source of scikit-learn's 1,797 handwritten digits (8x8 pixels).

    A fixed stratified split assigns four fifths of the digits to `train` and one fifth to `test`.
    """
    from sklearn import model_selection

    digits = _load_digits()
    images = np.repeat(
        np.round(digits.images * 255 / 16).astype(np.uint8)[..., np.newaxis], 3, axis=-1
    )
    train, test = model_selection.train_test_split(
        np.arange(len(images)), test_size=0.2, stratify=digits.target, random_state=0
    )
    labels = digits.target.astype(np.int64)
    splits = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return IndexedSource("digits", splits, [str(digit) for digit in range(10)], tf.identity)
