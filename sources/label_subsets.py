"""Class-balanced subsets of the labels (paper, Appendix B.5)."""

from __future__ import annotations

import numpy as np

from runtime.errors import UserError


def choose_balanced(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """A share of labelled examples with as many of every class, as far as there are.

    Args:
      labels: int [n]; -1: no label, never chosen.
      fraction: in (0, 1], of the labelled examples, rounded.
      seed: which ones.

    Returns:
      sorted indices. Raises ValueError if there would be a class without examples.
    """
    random = np.random.default_rng(seed)
    members = {label: random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels[labels >= 0])}
    wanted = round(fraction * sum(map(len, members.values())))
    if not members:
        raise ValueError("no example at all, as none has a label")
    if wanted < len(members):
        raise ValueError(f"{wanted} examples for {len(members)} classes")
    # Rounds of one example per class, each in a new random order, until there are enough.
    turns = [(turn, random.random(), label) for label, rows in members.items() for turn in range(len(rows))]
    chosen = [members[label][turn] for turn, _, label in sorted(turns)[:wanted]]
    return np.sort(np.array(chosen, np.int64))


def choose_labeled(labels: np.ndarray, split: str, fraction: float, seed: int) -> np.ndarray:
    """Returns `choose_balanced`. Raises `UserError` with the smallest possible fraction if there are too few."""
    try:
        return choose_balanced(labels, fraction, seed)
    except ValueError as error:
        least = len(np.unique(labels[labels >= 0])) / max((labels >= 0).sum(), 1)
        least = -(-least * 1e5 // 1) / 1e5  # rounded up
        raise UserError(f"--label_fraction={fraction:g} of --train_split={split} is {error}: use at least {least:.5g}"
                        ) from error
