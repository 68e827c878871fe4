"""The settings, data and devices that every part of a run needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from checkpoints import lock as lock_lib
from checkpoints.run_directory import Recorded
from config import Config
from runtime import signals
from sources.source import Source


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The settings, data, strategy and locks of a run.

    Attributes:
      config: settings, completed for the data and the run directory.
      source: the data set.
      strategy: the strategy of this process.
      is_chief: whether this process writes checkpoints, results and messages.
      stop: handler of stop signals. When any worker receives a signal, training saves a checkpoint
        and raises `errors.Stopped`.
      lock: lock on `config.model_dir`, held by the chief while it trains; otherwise, None.
      recorded: what the run or the checkpoint recorded.
      trained_examples: number of images in `config.eval_split` that were also used for training.
    """

    config: Config
    source: Source
    strategy: tf.distribute.Strategy
    is_chief: bool
    stop: signals.StopSignals
    lock: lock_lib.Lock | None = None
    recorded: Recorded = Recorded()
    trained_examples: int = 0

    def replace(self, **changes: Any) -> RunContext:
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def check_lock(self) -> None:
        """Raises `UserError` if `model_dir` was removed or replaced. Call this before writing to it."""
        if self.lock is not None:
            self.lock.check()
