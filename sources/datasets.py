"""Opens the data set selected by `--dataset` and checks its splits."""

from __future__ import annotations

from runtime.errors import UserError
from sources import digits, folders
from sources.source import Source
from sources.tfds_source import TfdsSource


def open_source(dataset: str, data_dir: str | None = None, follow_links: bool = False) -> Source:
    """Opens the data set selected by `--dataset`: `digits`, `folder:PATH`, or a TFDS name.

    Args:
      dataset: value of `--dataset`.
      data_dir: directory of prepared TFDS data, or None for the TFDS default.
      follow_links: whether to follow links that point outside the image folder.

    Raises:
      UserError: the data set is unknown or cannot be read.
    """
    if dataset == "digits":
        return digits.digits_source()
    if dataset.startswith("folder:"):
        return folders.folder_source(dataset[len("folder:"):], follow_links)
    return TfdsSource(dataset, data_dir)


def check_split(source: Source, flag: str, split: str) -> int:
    """Returns the number of examples in a split.

    Args:
      source: the data set.
      flag: name of the flag that selects the split, without dashes, for error messages.
      split: a split or a slice of it.

    Raises:
      UserError: the split is unknown or empty, or its files are missing or empty.
    """
    try:
        count = source.num_examples(split)
    except (ValueError, KeyError, NotImplementedError) as error:  # NotImplementedError: TFDS cannot slice `all`.
        raise UserError(
            f"--{flag}={split}: {source.name} has no such split. Use {', '.join(source.split_names)}, or a slice such "
            "as train[:90%].") from error
    if count == 0:
        raise UserError(f"--{flag}={split}: this slice of {source.name} is empty. Use a larger slice.")
    source.check_files(split)
    return count


def choose_eval_split(source: Source, eval_split: str, explicit: bool) -> str:
    """Returns `eval_split`, or `test` if `eval_split` is a default that does not exist in the data set.

    Args:
      source: the data set.
      eval_split: value of `--eval_split`.
      explicit: whether the user set the flag.
    """
    if not explicit and eval_split not in source.split_names and "test" in source.split_names:
        return "test"
    return eval_split
