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
    """Returns a bar on standard output, of the terminal's size; tqdm shows none on terminals that report the size 0."""
    size = shutil.get_terminal_size()
    return tqdm.tqdm(*args, **kwargs, ncols=size.columns, nrows=size.lines, file=sys.stdout)


class Progress:
    """Progress of a training: step, time left, images/s and a few metrics.

    On a terminal it is a bar, elsewhere a line every `log_seconds`.
    """

    def __init__(self, start: int, total: int, batch_size: int, log_seconds: float, labels: Mapping[str, str],
                 enabled: bool = True):
        """Starts at step `start` of `total` steps.

        Args:
          start, total: steps.
          batch_size: images per step.
          log_seconds: least seconds between two lines.
          labels: dict: name of a metric -> its label in the output. Other metrics are not printed.
          enabled: print anything at all.
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
            self._bar = _bar(total=total, initial=start, unit="step")

    @property
    def images_per_second(self) -> float:
        """The mean rate over the timed steps."""
        return self._timed_steps * self._batch_size / self._seconds if self._seconds else 0.0

    def update(self, step: int, seconds: float, metrics: Mapping[str, float], timed: bool = True) -> None:
        """Reports `step`, reached `seconds` after the previous update; `timed` is False for a call that compiled."""
        if timed:
            self._timed_steps += step - self._step
            self._seconds += seconds
        advanced, self._step = step - self._step, step
        if self._bar is not None:
            shown = {label: f"{metrics[name]:.3f}" for name, label in self._labels.items() if name in metrics}
            self._bar.set_postfix({"img/s": f"{self.images_per_second:.0f}", **shown}, refresh=False)
            self._bar.update(advanced)
        elif self._enabled and (time.monotonic() - self._last_line >= self._log_seconds or step == self._total):
            self._last_line = time.monotonic()
            console.log(self._line(metrics))

    def _line(self, metrics):
        rate = self.images_per_second
        left = console.format_duration((self._total - self._step) * self._batch_size / rate) if rate else "?"
        shown = "  ".join(f"{label} {metrics[name]:.3f}" for name, label in self._labels.items() if name in metrics)
        share = self._step / self._total
        return f"step {self._step}/{self._total}  {share:.0%}  left {left}  {rate:.0f} images/s  {shown}"

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()


def track(iterable: Iterable[_T], total: int | None, description: str) -> Iterator[_T]:
    """Yields the items with a bar on a terminal, silently elsewhere; every item is a `signals.safe_point`."""
    for item in terminal_bar(iterable, total, description):
        signals.safe_point()
        yield item


def terminal_bar(iterable: Iterable[_T] | None, total: int | None, description: str) -> tqdm.tqdm[_T]:
    """Returns a tqdm bar over `iterable`, which is shown on a terminal only."""
    return _bar(iterable, total=total, desc=console.printable_name(description or "") or None, leave=False,
                disable=not sys.stdout.isatty())


def stopwatch() -> Callable[[], float]:
    """Returns a function that returns the seconds since this call."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
