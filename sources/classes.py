"""Classes by name: the classes of a data set and the columns of a linear head."""

from __future__ import annotations

_NAMED = 3  # names that a message lists


def match_columns(names: list[str], head_names: list[str]) -> list[int] | None:
    """Returns, for each class of a data set, its column in a linear head, or -1 if the head lacks the class.

    Args:
      names: names of the data set's classes.
      head_names: names of the classes that the head was trained on, in the order of its columns.

    Returns:
      list of column numbers, or None if neither contains all names of the other, so that the classes are not the same.
    """
    if not (set(names) <= set(head_names) or set(head_names) <= set(names)):
        return None
    columns = {name: column for column, name in enumerate(head_names)}
    return [columns.get(name, -1) for name in names]


def differences(names: list[str] | None, other_names: list[str] | None, label: str, other_label: str) -> str:
    """Returns the first differences between two lists of class names as text.

    Args:
      names: names of classes, or None without labels.
      other_names: names to compare with.
      label: what has `names`, such as "the data set".
      other_label: what has `other_names`.
    """
    parts = [_only_in(names or [], other_names or [], label), _only_in(other_names or [], names or [], other_label)]
    found = [part for part in parts if part]
    return "; ".join(found) if found else f"{label} and {other_label} have the same classes in another order"


def _only_in(names, other_names, label):
    only = [name for name in names if name not in set(other_names)]
    more = f" and {len(only) - _NAMED} more" if len(only) > _NAMED else ""
    return f"only in {label}: {', '.join(only[:_NAMED])}{more}" if only else ""
