"""Compares class names, and maps a data set's classes to the columns of a linear head."""

from __future__ import annotations

from collections.abc import Iterable

from runtime import console


def match_columns(names: list[str], head_names: list[str]) -> list[int] | None:
    """Returns each class's column in a linear head, or -1 for classes that the head does not have.

    Args:
      names: class names of the data set.
      head_names: class names that the head was trained on, in the order of its columns.

    Returns:
      A list of column indices, or None if neither list of names is a subset of the other.
    """
    if not (set(names) <= set(head_names) or set(head_names) <= set(names)):
        return None
    return indices_of(names, head_names)


def indices_of(names: Iterable[str | None], class_names: list[str]) -> list[int]:
    """Returns the index of each name in `class_names`, or -1 for names that it does not contain."""
    indices = {name: index for index, name in enumerate(class_names)}
    return [indices.get(name, -1) for name in names]


def differences(
    names: list[str] | None, other_names: list[str] | None, label: str, other_label: str
) -> str:
    """Describes the first differences between two lists of class names.

    Args:
      names: class names, or None if there are no labels.
      other_names: class names to compare with, or None if there are no labels.
      label: description of the object with the classes `names`, such as "the data set".
      other_label: description of the object with the classes `other_names`.
    """
    names, other_names = names or [], other_names or []
    clauses = []
    for place, own, others in ((label, names, other_names), (other_label, other_names, names)):
        if only := [name for name in own if name not in others]:
            clauses.append(f"only in {place}: {console.join_first(only, limit=3)}")
    return (
        "; ".join(clauses)
        or f"{label} and {other_label} have the same classes in a different order"
    )
