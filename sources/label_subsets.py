"""Class-balanced subsets of the labeled examples (paper, section 6)."""

from __future__ import annotations

import numpy as np

from runtime.errors import UserError


def choose_balanced(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses a fraction of the labeled examples, with the same number of examples per class if possible.

    Classes with too few examples contribute all their examples.

    Args:
      labels: int [n]; -1 marks examples without a label, which are never chosen.
      fraction: fraction of the labeled examples, in (0, 1]. The resulting number of examples is
        rounded.
      seed: seed for the random choice.

    Returns:
      Sorted indices of the chosen examples, int64.

    Raises:
      ValueError: a class would have no examples.
    """
    random = np.random.default_rng(seed)
    members = [
        random.permutation(np.flatnonzero(labels == label))
        for label in np.unique(labels[labels >= 0])
    ]
    count = round(fraction * sum(map(len, members)))
    if count < max(len(members), 1):
        raise ValueError(f"{count} examples are too few for {len(members)} classes")
    # Each round chooses one example per class and visits the classes in a new random order. The
    # rounds end when enough examples have been chosen.
    turns = [(turn, random.random(), row) for rows in members for turn, row in enumerate(rows)]
    return np.sort(np.array([row for *_, row in sorted(turns)[:count]], np.int64))


def choose_labeled(
    labels: np.ndarray, split: str, fraction: float, seed: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """Calls `choose_balanced`. If it fails, raises a `UserError` that states the smallest valid fraction.

    If `groups`, int [n], is given, chooses whole groups. The first label of a group counts.
    """
    if groups is None:
        groups = np.arange(len(labels))
    names, first = np.unique(np.where(labels >= 0, groups, -1), return_index=True)
    candidates = labels[first]
    try:
        chosen = names[choose_balanced(candidates, fraction, seed)]
    except ValueError as error:
        candidates = candidates[candidates >= 0]
        minimum = np.ceil(len(np.unique(candidates)) / len(candidates) * 1e5) / 1e5
        raise UserError(
            f"--label_fraction={fraction:g}: in --train_split={split}, {error}. Use at least"
            f" {minimum:.5g}."
        ) from error
    return np.flatnonzero(np.isin(groups, chosen) & (labels >= 0))
