"""Records of what results were computed from, under the key `computed_from` in result_<step>.json and simclr.json."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from checkpoints import run_directory
from config import Config, settings_with
from runtime.paths import without_directories
from sources.source import Source

KEY = "computed_from"


@functools.lru_cache(2)  # For large folders, computing the digest takes seconds.
def source_digest(source: Source) -> str:
    """Returns the `run_directory.description_digest` of a data set."""
    return run_directory.description_digest(source.describe_data())


def describe(
    config: Config, source: Source, weights: str | None, step: int | None, trained_examples: int
) -> dict:
    """Returns a JSON-serializable record of what the results of an evaluation are computed from.

    Args:
      config: settings of the evaluation. The record contains those with the roles `evaluation` and
        `labels`.
      source: the data set. The record contains its name, without the directories of an image
        folder, and its digest.
      weights: digest of the weights; see `WeightFile.digest`.
      step: training step at which the weights were saved, if known.
      trained_examples: number of images in `eval_split` that were also used for training.
    """
    count = source.num_examples(config.eval_split)
    return dict(
        {name: getattr(config, name) for name in settings_with("evaluation", "labels")},
        dataset=without_directories(source.name),
        data=source_digest(source),
        examples=min(count, config.eval_steps * config.eval_batch_size or count),
        weights=weights,
        step=step,
        trained_examples=trained_examples,
    )


def differences(results: Mapping, other: Mapping, with_labels: bool) -> list[str]:
    """Returns the names of the entries that must be equal in comparable results, but differ.

    Args:
      results, other: contents of result_<step>.json.
      with_labels: whether the results depend on the labels in `train_split`.
    """
    first, second = results.get(KEY, {}), other.get(KEY, {})
    ignored = {"weights", "step", "eval_protocol", "trained_examples", "eval_batch_size"}
    if not with_labels:
        ignored.update(settings_with("labels"))
    return sorted(
        name
        for name in (first.keys() | second.keys()) - ignored
        if first.get(name) != second.get(name)
    )
