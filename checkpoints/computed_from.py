"""Records of what results were computed from, under the key `computed_from` in result.json and simclr.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from checkpoints import run_directory
from config import Config, settings_with
from runtime.paths import without_directories
from sources.source import Source

KEY = "computed_from"


@dataclasses.dataclass(frozen=True)
class ComputedFrom:
    """What the results of an evaluation were computed from.

    Attributes:
      weights: digest of the weights; see `WeightFile.digest`.
      step: training step at which the weights were saved.
      dataset: name of the data set, without the directories of an image folder.
      data: digest of the data; see `run_directory.data_digest`.
      split: the evaluated split.
      examples: number of evaluated images.
      trained_examples: number of images in `split` that were also used for training.
      protocol: comma-separated protocols; the other attributes are the settings of these names.
    """

    weights: str
    step: int | None
    dataset: str
    data: str
    split: str
    examples: int
    trained_examples: int
    protocol: str
    train_split: str
    label_fraction: float
    label_seed: int
    image_size: int
    eval_center_crop: bool
    eval_batch_size: int
    ft_proj_selector: int


def describe(
    config: Config,
    source: Source,
    weights: str,
    step: int | None,
    trained_examples: int,
    **others: str,
) -> dict:
    """Returns a `ComputedFrom` as a JSON-serializable dict. `others` replaces attributes."""
    count = source.num_examples(config.eval_split)
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(ComputedFrom)
        if hasattr(config, field.name)
    }
    record = ComputedFrom(
        **settings
        | dict(
            weights=weights,
            step=step,
            dataset=without_directories(source.name),
            data=run_directory.data_digest(source.describe_data()),
            split=config.eval_split,
            examples=min(count, config.eval_steps * config.eval_batch_size or count),
            trained_examples=trained_examples,
            protocol=config.eval_protocol,
        )
        | others
    )
    return dataclasses.asdict(record)


def differences(results: Mapping, other: Mapping, with_labels: bool) -> list[str]:
    """Returns the names of the entries that must be equal in comparable results, but differ.

    Args:
      results, other: contents of result.json.
      with_labels: whether the results depend on the labels in `train_split`.
    """
    first, second = results.get(KEY, {}), other.get(KEY, {})
    ignored = {"weights", "step", "protocol", "trained_examples", "eval_batch_size"}
    ignored |= set() if with_labels else set(settings_with("labels"))
    return sorted(
        name for name in {**first, **second}.keys() - ignored if first.get(name) != second.get(name)
    )
