"""The paper's twelve transfer data sets with their splits and metrics, and the hyper-parameter grids (B.8)."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from runtime.errors import UserError

METRICS = ("top_1", "mean_per_class", "mean_average_precision")


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, its splits and its metric."""

    title: str
    dataset: str | None  # Value of --dataset, or None if the data set is not in TFDS.
    metric: str = "top_1"  # One of `METRICS`.
    train: str = "train"
    validation: str | None = None  # If this is None, the last 20 % of `train` is used.
    test: str = "test"

    @property
    def train_split(self) -> str:
        """The split that models are trained on during model selection."""
        return self.train if self.validation else f"{self.train}[:80%]"

    @property
    def validation_split(self) -> str:
        """The split that hyper-parameters are selected on."""
        return self.validation or f"{self.train}[80%:]"

    @property
    def splits(self) -> dict[str, str]:
        """The splits for training and model selection, and the test split, keyed by name."""
        return dict(train=self.train_split, validation=self.validation_split, test=self.test)

    @property
    def trainval_split(self) -> str:
        """The split that the final model is trained on, with the selected hyper-parameters."""
        return f"{self.train}+{self.validation}" if self.validation else self.train


# Food-101's test split is named "validation". For DTD and SUN397, the first official split is used.
# For Caltech-101, TFDS samples 30 training images per class with a seed that differs from the
# paper's.
TASKS = {
    "food101": Task("Food-101", "food101", test="validation"),
    "cifar10": Task("CIFAR-10", "cifar10"),
    "cifar100": Task("CIFAR-100", "cifar100"),
    "birdsnap": Task("Birdsnap", None),
    "sun397": Task("SUN397", "sun397/standard-part1-120k"),
    "cars": Task("Stanford Cars", "cars196"),
    "aircraft": Task("FGVC Aircraft", None, "mean_per_class", validation="validation"),
    "voc2007": Task(
        "PASCAL VOC 2007", "voc/2007", "mean_average_precision", validation="validation"
    ),
    "dtd": Task("DTD", "dtd", validation="validation"),
    "pets": Task("Oxford-IIIT Pets", "oxford_iiit_pet", "mean_per_class"),
    "caltech101": Task("Caltech-101", "caltech101", "mean_per_class"),
    "flowers": Task(
        "Oxford 102 Flowers", "oxford_flowers102", "mean_per_class", validation="validation"
    ),
}


def task_from_arguments(arguments: argparse.Namespace) -> Task:
    """Returns the `Task` that the parsed arguments select. Raises `UserError` if they are insufficient."""
    if arguments.task is None and arguments.dataset is None:
        raise UserError(
            f"--task, --dataset: neither is set. Pass --task (one of {', '.join(TASKS)}) or"
            " --dataset."
        )
    overrides = {
        name: value
        for name in ("dataset", "metric", "train", "validation", "test")
        if (value := getattr(arguments, name)) is not None
    }
    task = TASKS.get(arguments.task, Task(arguments.dataset, None))
    task = dataclasses.replace(task, **overrides)
    if task.dataset is None:
        raise UserError(
            f"--task={arguments.task}: {task.title} is not in TFDS. Pass --dataset=folder:DIR."
        )
    if task.validation is None and not task.train.isidentifier():
        raise UserError(
            f"--train={task.train}: no default validation split can be derived from this split."
            " Pass --validation."
        )
    return task


@dataclasses.dataclass(frozen=True)
class Grid:
    """The hyper-parameter grid for fine-tuning or for training from scratch (paper, B.8.1)."""

    learning_rates: tuple
    weight_decays: tuple  # The optimizer receives weight_decay / learning_rate.
    steps: int  # This is the number of training steps per trial.


GRIDS = {
    "finetune": Grid(tuple(np.logspace(-4, -1, 7)), (0.0, *np.logspace(-6, -3, 7)), 20_000),
    "scratch": Grid(tuple(np.logspace(-3, 0, 7)), tuple(np.logspace(-5, -1.5, 8)), 40_000),
}
