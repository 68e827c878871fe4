"""scikit-learn's `digits` data set."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from sources.indexed import IndexedSource


def digits_source() -> IndexedSource:
    """Returns a source of scikit-learn's 1,797 handwritten digits (8x8 pixels).

    A fixed stratified split assigns four fifths of the digits to `train` and one fifth to `test`.
    """
    # Imported here because only this data set requires scikit-learn.
    from sklearn import datasets, model_selection

    digits = datasets.load_digits()
    images = np.repeat(
        np.round(digits.images * 255 / 16).astype(np.uint8)[..., np.newaxis], 3, axis=-1
    )
    train, test = model_selection.train_test_split(
        np.arange(len(images)), test_size=0.2, stratify=digits.target, random_state=0
    )
    labels = digits.target
    splits = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return IndexedSource("digits", splits, [*"0123456789"], tf.identity)
