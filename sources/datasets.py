"""The data set that `--dataset` names, and its splits."""

from __future__ import annotations

from runtime.errors import UserError
from sources import digits, folders
from sources.source import Source
from sources.tfds_source import TfdsSource


def open_source(dataset: str, data_dir: str | None = None, follow_links: bool = False) -> Source:
    """The source that `--dataset` names. Raises `UserError`."""
    if dataset == "digits":
        return digits.digits_source()
    if dataset.startswith("folder:"):
        return folders.folder_source(dataset[len("folder:"):], follow_links)
    return TfdsSource(dataset, data_dir)


# --------------------------------------------------------------------------------------------------------------- checks


def check_split(source: Source, flag: str, split: str) -> int:
    """Returns the number of examples of a split. Raises `UserError` if it is unknown or empty, or lacks files."""
    try:
        count = source.num_examples(split)
    except (ValueError, KeyError, NotImplementedError) as error:  # The latter: TFDS does not slice `all`.
        raise UserError(
            f"--{flag}={split}: {source.name} has no such split; it has {', '.join(source.split_names)}, and slices "
            "such as train[:90%]") from error
    if count == 0:
        raise UserError(f"--{flag}={split} of {source.name} is empty: widen the slice")
    source.check_files(split)
    return count


def choose_eval_split(source: Source, eval_split: str, explicit: bool) -> str:
    """The evaluation split: `eval_split`, or `test` if it was not `explicit` and does not exist."""
    if not explicit and eval_split not in source.split_names and "test" in source.split_names:
        return "test"
    return eval_split
