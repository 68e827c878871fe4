"""Progress bars and timers."""

from __future__ import annotations

import shutil
import sys
import time

import tqdm

from runtime import console, signals


def _bar(*args, **kwargs):
    """A bar on standard output. On a terminal that claims to have no size, as some do, tqdm alone would show none."""
    size = shutil.get_terminal_size()
    return tqdm.tqdm(*args, **kwargs, ncols=size.columns, nrows=size.lines, file=sys.stdout)


class Progress:
    """Progress of a training: step, time left, images/s and a few metrics."""

    SHOWN = {"train/contrast_loss": "loss", "train/contrast_acc": "contrast_acc", "train/supervised_loss": "head_loss",
             "train/supervised_acc": "head_acc"}

    def __init__(self, start, total, batch_size, log_seconds, enabled=True):
        """Begins at step `start` of `total`; without a terminal, a line every `log_seconds`."""
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
    def images_per_second(self):
        """Mean rate over the timed steps."""
        return self._timed_steps * self._batch_size / self._seconds if self._seconds else 0.0

    def update(self, step, seconds, metrics, timed=True):
        """Reports `step`, reached `seconds` after the one before; `timed` is False for a call that compiled."""
        if timed:
            self._timed_steps += step - self._step
            self._seconds += seconds
        advanced, self._step = step - self._step, step
        if self._bar is not None:
            shown = {label: f"{metrics[name]:.3f}" for name, label in self.SHOWN.items() if name in metrics}
            self._bar.set_postfix({"img/s": f"{self.images_per_second:.0f}", **shown}, refresh=False)
            self._bar.update(advanced)
        elif self._enabled and (time.monotonic() - self._last_line >= self._log_seconds or step == self._total):
            self._last_line = time.monotonic()
            console.log(self._line(metrics))

    def _line(self, metrics):
        rate = self.images_per_second
        left = console.format_duration((self._total - self._step) * self._batch_size / rate) if rate else "?"
        shown = "  ".join(f"{label} {metrics[name]:.3f}" for name, label in self.SHOWN.items() if name in metrics)
        share = self._step / self._total
        return f"step {self._step}/{self._total}  {share:.0%}  left {left}  {rate:.0f} images/s  {shown}"

    def close(self):
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def track(iterable, total, description):
    """Iterates with a bar on a terminal, silently elsewhere; the program may be stopped at every turn."""
    for item in counter(iterable, total, description):
        signals.safe_point()
        yield item


def counter(iterable, total, description):
    """A tqdm bar on a terminal; silent elsewhere."""
    return _bar(iterable, total=total, desc=console.printable_name(description or "") or None, leave=False,
                disable=not sys.stdout.isatty())


def stopwatch():
    """A function that tells the seconds since now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
