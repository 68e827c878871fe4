"""Progress bars and timers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import tqdm

from runtime import console, signals

_T = TypeVar("_T")
_LINE_SECONDS = 10.0  # between progress lines, if the output is not a terminal
_TIMED_STEPS = 10  # number of steps after which the end of a long training is announced
_LONG_SECONDS = 600.0


def _bar(*args: Any, **kwargs: Any) -> tqdm.tqdm:
    """Returns a progress bar that writes to standard output.

    The bar's size is set explicitly, because tqdm shows no bar if the terminal's size is unknown.
    """
    size = shutil.get_terminal_size()
    return tqdm.tqdm(*args, **kwargs, ncols=size.columns, nrows=size.lines, file=sys.stdout)


class Progress:
    """Display of the training progress: a progress bar on a terminal, otherwise a line every 10 seconds."""

    def __init__(self, start: int, total: int, batch_size: int, enabled: bool = True):
        """Creates the display at step `start` of `total` steps. Each step processes `batch_size` images."""
        self._total, self._batch_size = total, batch_size
        self._step, self._timed_steps, self._seconds = start, 0, 0.0
        self._shows_lines, self._since_line = enabled and not sys.stdout.isatty(), stopwatch()
        self._announces_end = enabled
        self._bar = _bar(
            total=total, initial=start, unit="step", disable=not enabled or self._shows_lines
        )

    @property
    def images_per_second(self) -> float:
        """Mean throughput in images per second, over the timed steps."""
        return self._timed_steps * self._batch_size / self._seconds if self._seconds else 0.0

    def update(
        self, step: int, seconds: float, metrics: Mapping[str, float], timed: bool = True
    ) -> None:
        """Displays `step` as the current step, and the metrics.

        Args:
          step: number of completed steps.
          seconds: time since the previous update.
          metrics: the metrics to show, keyed by label.
          timed: False if `seconds` includes compilation, to exclude it from the throughput.
        """
        new_steps, self._step = step - self._step, step
        if timed:
            self._timed_steps += new_steps
            self._seconds += seconds
        self._bar.set_postfix(metrics, False)
        self._bar.update(new_steps)
        rate = self.images_per_second
        left = (self._total - step) * self._batch_size / rate if rate else 0.0
        time_left = console.format_duration(left) if rate else "?"
        if self._announces_end and self._timed_steps >= _TIMED_STEPS:
            self._announces_end = False
            if left > _LONG_SECONDS:
                console.log(f"expected end of training: {console.format_end(left)}")
        if self._shows_lines and (self._since_line() >= _LINE_SECONDS or step == self._total):
            self._since_line = stopwatch()
            values = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            console.log(
                f"step {step}/{self._total}  {step / self._total:.0%}  {time_left} left "
                f" {rate:.0f} images/s  {values}"
            )

    def close(self) -> None:
        """Closes the progress bar."""
        self._bar.close()


def track(iterable: Iterable[_T], description: str, total: int | None = None) -> Iterator[_T]:
    """Yields the items and, on a terminal, shows a progress bar. Calls `signals.safe_point` before each item.

    `total` is the number of items, if it is known and `iterable` has no length.
    """
    for item in terminal_bar(iterable, total, description):
        signals.safe_point()
        yield item


def terminal_bar(
    iterable: Iterable[_T] | None, total: int | None, description: str
) -> tqdm.tqdm[_T]:
    """Returns a tqdm bar over `iterable` that is shown only on a terminal."""
    return _bar(
        iterable,
        total=total,
        desc=console.printable_name(description),
        leave=False,
        disable=not sys.stdout.isatty(),
    )


def stopwatch() -> Callable[[], float]:
    """Starts a stopwatch. Returns a function that returns the number of elapsed seconds."""
    start = time.monotonic()
    return lambda: time.monotonic() - start
