"""Progress bars and timers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import tqdm

from runtime import console, signals

_T = TypeVar("_T")


def _bar(*args, **kwargs):
    """Returns a progress bar that writes to standard output.

    The bar's size is set explicitly, because tqdm shows no bar if the terminal's size is unknown.
    """
    size = shutil.get_terminal_size()
    return tqdm.tqdm(*args, **kwargs, ncols=size.columns, nrows=size.lines, file=sys.stdout)


class Progress:
    """Display of the training progress: step, remaining time, images per second and selected metrics.

    On a terminal, the display is a progress bar. Otherwise, it is a line that is printed every
    `log_seconds` seconds.
    """

    def __init__(
        self,
        start: int,
        total: int,
        batch_size: int,
        log_seconds: float,
        labels: Mapping[str, str],
        enabled: bool = True,
    ):
        """Creates the display at step `start`.

        Args:
          start: number of steps already completed.
          total: total number of steps.
          batch_size: images per step.
          log_seconds: minimum number of seconds between two lines.
          labels: dict mapping metric names to labels in the output. Other metrics are not shown.
          enabled: whether to show progress.
        """
        self._labels = labels
        self._total = total
        self._batch_size = batch_size
        self._log_seconds = log_seconds
        self._enabled = enabled
        self._last_line = time.monotonic()
        self._step, self._timed_steps, self._seconds = start, 0, 0.0
        self._bar = None
        if enabled and sys.stdout.isatty():
            self._bar = _bar(total=total, initial=start, bar_format="{desc} {bar}")

    @property
    def images_per_second(self) -> float:
        """Mean throughput in images per second, over the timed steps."""
        return self._timed_steps * self._batch_size / self._seconds if self._seconds else 0.0

    def update(
        self, step: int, seconds: float, metrics: Mapping[str, float], timed: bool = True
    ) -> None:
        """Displays `step` as the current step. `seconds` is the time since the previous update.

        If `seconds` includes tracing or compilation, pass `timed=False` to exclude it from the
        throughput.
        """
        if timed:
            self._timed_steps += step - self._step
            self._seconds += seconds
        advanced, self._step = step - self._step, step
        if self._bar is not None:
            self._bar.set_description_str(self._short_line(metrics), refresh=False)
            self._bar.update(advanced)
        elif self._enabled and (
            time.monotonic() - self._last_line >= self._log_seconds or step == self._total
        ):
            self._last_line = time.monotonic()
            console.log(self._line(metrics))

    def _time_left(self):
        rate = self.images_per_second
        return (
            console.format_duration((self._total - self._step) * self._batch_size / rate)
            if rate
            else "?"
        )

    def _line(self, metrics):
        values = "  ".join(
            f"{label} {metrics[name]:.3f}"
            for name, label in self._labels.items()
            if name in metrics
        )
        return (
            f"step {self._step}/{self._total}  {self._step / self._total:.0%}  {self._time_left()}"
            f" left  {self.images_per_second:.0f} images/s  {values}"
        )

    def _short_line(self, metrics):
        """Returns a line with as many metrics as fit next to a bar of two columns, in the order of `labels`."""
        line = (
            f"{self._step}/{self._total} {self._time_left()} left {self.images_per_second:.0f}"
            " img/s"
        )
        for name, label in self._labels.items():
            value = f" {label} {metrics[name]:.3g}" if name in metrics else ""
            if len(line) + len(value) > shutil.get_terminal_size().columns - 3:
                break
            line += value
        return line

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()


def track(iterable: Iterable[_T], total: int | None, description: str) -> Iterator[_T]:
    """Yields the items and, on a terminal, shows a progress bar. Calls `signals.safe_point` before each item."""
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
        desc=console.printable_name(description or "") or None,
        leave=False,
        disable=not sys.stdout.isatty(),
    )


def stopwatch() -> Callable[[], float]:
    """Starts a stopwatch. Returns a function that returns the number of elapsed seconds."""
    start = time.monotonic()
    return lambda: time.monotonic() - start
