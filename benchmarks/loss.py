"""Time and peak memory of NT-Xent with its gradient, in blocks of rows and in the plain form, by batch size.

    python -m benchmarks.loss

Ours: `large_batch.blocked_nt_xent`. Baseline: `objective.add_contrastive_loss`, which holds all similarities at once.
Prints one JSON line per case. Both forms are timed alternately in one process; the memory of each is measured in its
own process, as the increase of the peak. Above `_LARGEST_PLAIN` the plain form is not run: at 2N = 32,768 it needs
about 15 GB.
"""

from __future__ import annotations

import json
import sys

import tensorflow as tf

import metrics
import objective
from benchmarks import measure
from large_batch import blocked_nt_xent

_SIZES = tuple(2**power for power in range(9, 16))
_LARGEST_PLAIN = 2**14
_WIDTH = 128
_TEMPERATURE = 0.1
_NUM_VALUES = {"loss": 1, "loss_and_metrics": 3}  # case -> number of values, of loss, accuracy and entropy


def plain(hidden):
    """Returns loss, accuracy and entropy, from all similarities at once."""
    loss, logits_ab, labels = objective.add_contrastive_loss(hidden, True, _TEMPERATURE)
    return loss, metrics.contrastive_accuracy(logits_ab, labels), metrics.contrastive_entropy(logits_ab)


def blocked(hidden):
    """Returns the same, from blocks of the automatic size."""
    return blocked_nt_xent.contrastive_loss(hidden, True, _TEMPERATURE)


def computation(form, case, size):
    """Returns a function without arguments that computes the values of `case`, and the gradient, for 2N = `size`."""
    hidden = tf.random.stateless_normal([size, _WIDTH], [0, 0])

    @tf.function(autograph=False)
    def compute(hidden):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            values = form(hidden)[:_NUM_VALUES[case]]
        return values, tape.gradient(values[0], hidden)

    return lambda: [value.numpy() for value in tf.nest.flatten(compute(hidden))]


def seconds(case, size):
    """Returns a dict: name of a form -> seconds; without the plain form above `_LARGEST_PLAIN`."""
    forms = [blocked, plain] if size <= _LARGEST_PLAIN else [blocked]
    rounds = min(max(2**15 // size, 5), 31)
    return measure.side_by_side({form.__name__: computation(form, case, size) for form in forms}, rounds)


def megabytes(form, case, size):
    """Returns by how much a computation raises the peak memory of this process."""
    computation(form, case, 16)()  # Excludes what the libraries allocate once.
    compute = computation(form, case, size)
    before = measure.peak_megabytes()
    compute()
    return measure.peak_megabytes() - before


def measure_one(quantity, case, size, form=None):
    """Measures one quantity, in a child process."""
    forms = {"plain": plain, "blocked": blocked}
    return seconds(case, int(size)) if quantity == "seconds" else megabytes(forms[form], case, int(size))


def main():
    """Prints all cases, each measured in its own process."""
    measure.report_machine()
    for size in _SIZES:
        for case in _NUM_VALUES:
            name = f"{case}, 2N={size}"
            times = measure.in_child("benchmarks.loss", "seconds", case, size)
            measure.report("loss", name, "s", times["blocked"], times.get("plain"))
            held = {form: measure.in_child("benchmarks.loss", "megabytes", case, size, form) for form in times}
            measure.report("loss", name, "MB", held["blocked"], held.get("plain"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure_one(*sys.argv[1:])))
    else:
        main()
