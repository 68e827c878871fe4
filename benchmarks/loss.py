"""NT-Xent with its gradient, row-blocked against the plain form: time and peak memory over batch sizes.

    python -m benchmarks.loss

Yardstick: the original's formula, written out below, which holds all similarities at once. Every case prints one JSON
line. Both forms are timed in turn in one process; the memory of each is that of its own process, less what it held
before. Beyond `_LARGEST_PLAIN` the plain form is left out: at 2N = 32,768 it needs some 15 GB.
"""

from __future__ import annotations

import json
import sys

import tensorflow as tf

import metrics
from benchmarks import measure
from large_batch import blocked_nt_xent

_SIZES = tuple(2**power for power in range(9, 16))
_LARGEST_PLAIN = 2**14
_WIDTH = 128
_TEMPERATURE = 0.1
_WITH = {"loss": 1, "loss_and_metrics": 3}  # case -> how many of loss, accuracy and entropy are wanted


def plain(hidden):
    """Loss, accuracy and entropy from four matrices of logits, with the self-similarities pushed down by a mask."""
    hidden = tf.math.l2_normalize(hidden, -1)
    first, second = tf.split(hidden, 2, 0)
    images = tf.shape(first)[0]
    labels, mask = tf.one_hot(tf.range(images), 2 * images), tf.one_hot(tf.range(images), images)
    logits_aa = tf.matmul(first, first, transpose_b=True) / _TEMPERATURE - mask * 1e9
    logits_bb = tf.matmul(second, second, transpose_b=True) / _TEMPERATURE - mask * 1e9
    logits_ab = tf.matmul(first, second, transpose_b=True) / _TEMPERATURE
    logits_ba = tf.matmul(second, first, transpose_b=True) / _TEMPERATURE
    loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
    loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
    accuracy, entropy = metrics.contrastive_accuracy(logits_ab, labels), metrics.contrastive_entropy(logits_ab)
    return tf.reduce_mean(loss_a + loss_b), accuracy, entropy


def blocked(hidden):
    """The same from `objective`, with blocks of the automatic size."""
    return blocked_nt_xent.contrastive_loss(hidden, True, _TEMPERATURE)


def computation(form, case, size):
    """A function without arguments that computes what `case` wants, and the gradient, for 2N = `size`."""
    hidden = tf.random.stateless_normal([size, _WIDTH], [0, 0])

    @tf.function(autograph=False)
    def compute(hidden):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            wanted = form(hidden)[:_WITH[case]]
        return wanted, tape.gradient(wanted[0], hidden)

    return lambda: [value.numpy() for value in tf.nest.flatten(compute(hidden))]


def seconds(case, size):
    """Seconds of each form, by name; the plain one only up to `_LARGEST_PLAIN`."""
    forms = [blocked, plain] if size <= _LARGEST_PLAIN else [blocked]
    rounds = min(max(2**15 // size, 5), 31)
    return measure.side_by_side({form.__name__: computation(form, case, size) for form in forms}, rounds)


def megabytes(form, case, size):
    """What the process grows by when it computes `form`, at its peak."""
    computation(form, case, 16)()  # What the libraries take once is no part of it.
    compute = computation(form, case, size)
    before = measure.peak_megabytes()
    compute()
    return measure.peak_megabytes() - before


def measure_one(quantity, case, size, form=None):
    """What a child process answers."""
    forms = {"plain": plain, "blocked": blocked}
    return seconds(case, int(size)) if quantity == "seconds" else megabytes(forms[form], case, int(size))


def main():
    """Prints all cases, each measured in its own process."""
    measure.report_machine()
    for size in _SIZES:
        for case in _WITH:
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
