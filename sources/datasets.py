"""Opens the data set selected by `--dataset` and checks its splits."""

from __future__ import annotations

import re
from collections.abc import Collection

from config import Config
from runtime import console
from runtime.errors import UserError
from sources import digits, folders, lists
from sources.source import Source
from sources.tfds_source import TfdsSource

_MANY_IMAGES = 1000  # minimum number of unlabeled images of which only a twentieth is held out


def open_source(
    dataset: str,
    data_dir: str | None = None,
    labels: bool = True,
    may_prepare: bool = True,
    image_key: str | None = None,
    label_key: str | None = None,
    group_pattern: str | None = None,
) -> Source:
    """Opens the data set selected by `--dataset`: `digits`, `folder:PATH`, `list:FILE`, or a name that TFDS knows.

    Args:
      dataset: value of `--dataset`.
      data_dir: directory of prepared TFDS data, or None for the TFDS default; or the directory of
        the images of a list.
      labels: whether to use the labels in the data.
      may_prepare: whether a data set that is not in `data_dir` may be downloaded and prepared.
      image_key, label_key: names of the columns of a list, or of the features of a TFDS data set, that
        contain images and labels.
      group_pattern: regular expression that finds the group of an image in its path.

    Raises:
      UserError: the data set is unknown or cannot be read.
    """
    source: Source
    if dataset == "digits":
        source = digits.digits_source()
    elif dataset.startswith("folder:"):
        source = folders.folder_source(dataset[len("folder:") :], labels, group_pattern)
    elif dataset.startswith("list:"):
        source = lists.list_source(
            dataset[len("list:") :], data_dir, image_key, label_key, group_pattern
        )
    else:
        source = TfdsSource(dataset, data_dir, may_prepare, image_key, label_key)
    if labels and source.num_classes == 1 and not source.multi_label:
        console.log(f"no labels: {source.name} has only one class ({source.class_names[0]})")
        labels = False
    if not labels:
        source.drop_labels()
    return source


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
    except (ValueError, KeyError, NotImplementedError) as error:
        # NotImplementedError: TFDS cannot slice `all`.
        name = split.partition("[")[0]
        if name in source.split_names and re.fullmatch(
            r"\[-?\d*:-?\d*\]", split.removeprefix(name)
        ):
            raise UserError(
                f"--{flag}={split}: the slice is longer than the split, which has"
                f" {source.num_examples(name)} examples. Use a smaller number, or a percentage such"
                f" as {name}[:90%]."
            ) from error
        raise UserError(
            f"--{flag}={split}: {source.name} has no such split. Use"
            f" {', '.join(source.split_names)}, or a slice of them, such as [:90%]."
        ) from error
    if count == 0:
        raise UserError(
            f"--{flag}={split}: this slice of {source.name} is empty. Use a larger slice."
        )
    source.check_files(split)
    return count


def open_configured(config: Config, may_prepare: bool = True) -> Source:
    """Calls `open_source` with the settings of a run."""
    source = open_source(
        config.dataset,
        config.data_dir,
        config.labels,
        may_prepare,
        config.image_key,
        config.label_key,
        config.group_pattern,
    )
    source.conversion = config.conversion
    return source


# Training and evaluation splits of a data set with only one split. The second pair is for at least
# 1,000 images without labels.
HELD_OUT_SPLITS = ("train[:80%]", "train[80%:]"), ("train[:95%]", "train[95%:]")


def choose_splits(
    source: Source, train_split: str, eval_split: str, given: Collection[str], hold_out: bool
) -> tuple[str, str]:
    """Returns the training and the evaluation split. Replaces defaults that do not exist in the data set.

    If the default evaluation split does not exist, `test` is used. If `train` is the only split,
    its last fifth is held out for evaluation. If there are no labels, only the last twentieth of at
    least 1,000 images is held out, and with `--train_split=train`, training images are evaluated.

    Args:
      source: the data set.
      train_split: value of `--train_split`.
      eval_split: value of `--eval_split`.
      given: names of the settings that the user set. These are not replaced.
      hold_out: whether images may be held out.
    """
    if "eval_split" in given or eval_split in source.split_names:
        return train_split, eval_split
    if "test" in source.split_names:
        return train_split, "test"
    if hold_out and source.split_names == ["train"]:
        if "train_split" not in given:
            is_large = source.num_classes is None and source.num_examples("train") >= _MANY_IMAGES
            return HELD_OUT_SPLITS[is_large]
        if source.num_classes is None and train_split == "train":
            return train_split, train_split
    return train_split, eval_split
