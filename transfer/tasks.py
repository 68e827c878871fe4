"""The paper's twelve transfer data sets, their splits and metrics, and the grids of settings (paper, B.8)."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from runtime.errors import UserError

HELD_OUT = "80%"  # where the part of the training split begins that is held out, if there is no validation split


METRICS = ("top_1", "mean_per_class", "mean_average_precision")  # see `measures`


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, how it is divided, and what it is judged by."""

    title: str
    dataset: str | None  # for --dataset; None: TFDS does not have it, so that it must be in a folder
    metric: str = "top_1"  # of `METRICS`
    train: str = "train"
    validation: str | None = None  # None: the last fifth of `train`
    test: str = "test"

    @property
    def train_split(self) -> str:
        """The split that models are trained on during model selection."""
        return self.train if self.validation else f"{self.train}[:{HELD_OUT}]"

    @property
    def validation_split(self) -> str:
        """The split that hyper-parameters are selected on."""
        return self.validation or f"{self.train}[{HELD_OUT}:]"

    @property
    def trainval_split(self) -> str:
        """The split that the final model is trained on, with the selected hyper-parameters."""
        return f"{self.train}+{self.validation}" if self.validation else self.train


# The paper's twelve. Food-101 calls its test images validation; of DTD and SUN397 it is the first division; TFDS has
# drawn 30 training images a class of Caltech-101, with its own seed.
TASKS = {
    "food101": Task("Food-101", "food101", test="validation"),
    "cifar10": Task("CIFAR-10", "cifar10"),
    "cifar100": Task("CIFAR-100", "cifar100"),
    "birdsnap": Task("Birdsnap", None),
    "sun397": Task("SUN397", "sun397/standard-part1-120k"),
    "cars": Task("Stanford Cars", "cars196"),
    "aircraft": Task("FGVC Aircraft", None, "mean_per_class", validation="validation"),
    "voc2007": Task("PASCAL VOC 2007", "voc/2007", "mean_average_precision", validation="validation"),
    "dtd": Task("DTD", "dtd", validation="validation"),
    "pets": Task("Oxford-IIIT Pets", "oxford_iiit_pet", "mean_per_class"),
    "caltech101": Task("Caltech-101", "caltech101", "mean_per_class"),
    "flowers": Task("Oxford 102 Flowers", "oxford_flowers102", "mean_per_class", validation="validation"),
}


def task_of(arguments: argparse.Namespace) -> Task:
    """The `Task` that parsed arguments ask for. Raises `UserError`."""
    if arguments.task is None and arguments.dataset is None:
        raise UserError(f"give --task, one of {', '.join(TASKS)}, or --dataset, as for run.py")
    given = {name: getattr(arguments, name) for name in ("dataset", "metric", "train", "validation", "test")}
    given = {name: value for name, value in given.items() if value is not None}
    task = dataclasses.replace(TASKS[arguments.task], **given) if arguments.task else Task(arguments.dataset, **given)
    if task.dataset is None:
        raise UserError(f"--task={arguments.task}: TFDS does not have {task.title}: give --dataset=folder:DIR")
    if task.validation is None and not task.train.isidentifier():
        raise UserError(f"--train={task.train}: of a part of a split, nothing is held out by itself: give --validation")
    return task


@dataclasses.dataclass(frozen=True)
class Grid:
    """What fine-tuning, or training from a random initialisation, chooses from (paper, B.8.1)."""

    learning_rates: tuple
    weight_decays: tuple  # to be divided by the learning rate
    steps: int


GRIDS = {
    "finetune": Grid(tuple(np.logspace(-4, -1, 7)), (0.0, *np.logspace(-6, -3, 7)), 20_000),
    "scratch": Grid(tuple(np.logspace(-3, 0, 7)), tuple(np.logspace(-5, -1.5, 8)), 40_000),
}
