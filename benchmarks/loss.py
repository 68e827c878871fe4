"""Time and peak memory of NT-Xent and its gradient for several batch sizes, with and without blocks of rows.

    python -m benchmarks.loss [--sizes=512,1024]

Our implementation is `large_batch.blocked_nt_xent`. The baseline is
`objective.add_contrastive_loss`, which keeps all similarities in memory. They are timed alternately
in one process. Memory use is measured as the increase in peak memory, in a separate process for
each implementation. The baseline is skipped for 2N > `_LARGEST_PLAIN`, because it needs about 15 GB
at 2N = 32,768. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json

import tensorflow as tf

import metrics
import objective
from benchmarks import measure
from large_batch import blocked_nt_xent

_SIZES = tuple(2**power for power in range(9, 16))
_LARGEST_PLAIN = 2**14
_WIDTH = 128
TEMPERATURE = 0.1
# The outputs are the loss, the accuracy and the entropy.
_NUM_OUTPUTS = {"loss": 1, "loss_and_metrics": 3}


def plain(hidden):
    """Returns loss, accuracy and entropy, computed from all similarities at once."""
    loss, logits_ab, labels = objective.add_contrastive_loss(hidden, True, TEMPERATURE)
    return (
        loss,
        metrics.contrastive_accuracy(logits_ab, labels),
        metrics.contrastive_entropy(logits_ab),
    )


def blocked(hidden):
    """Returns loss, accuracy and entropy, computed in blocks whose size is chosen automatically."""
    return blocked_nt_xent.contrastive_loss(hidden, True, TEMPERATURE)


def make_computation(form, case, size):
    """Returns a function without arguments that computes the outputs of `case` and the gradient for 2N = `size`."""
    hidden = tf.random.stateless_normal([size, _WIDTH], [0, 0])

    @tf.function(autograph=False)
    def compute(hidden):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            outputs = form(hidden)[: _NUM_OUTPUTS[case]]
        return outputs, tape.gradient(outputs[0], hidden)

    return lambda: [tensor.numpy() for tensor in tf.nest.flatten(compute(hidden))]


def measure_seconds(case, size):
    """Returns a dict mapping implementations to seconds per call. Omits the baseline for large sizes."""
    forms = [blocked, plain] if size <= _LARGEST_PLAIN else [blocked]
    rounds = min(max(2**15 // size, 5), 31)
    return measure.time_alternately(
        {form.__name__: make_computation(form, case, size) for form in forms}, rounds
    )


def measure_megabytes(form, case, size):
    """Returns the increase in this process's peak memory during a computation."""
    # Libraries allocate their buffers here, outside the measurement.
    make_computation(form, case, 16)()
    compute = make_computation(form, case, size)
    before = measure.peak_megabytes()
    compute()
    return measure.peak_megabytes() - before


def measure_one(quantity, case, size, form=None):
    """Measures the time (if `quantity` is "seconds") or the memory. Child processes call this function."""
    forms = {"plain": plain, "blocked": blocked}
    if quantity == "seconds":
        return measure_seconds(case, int(size))
    return measure_megabytes(forms[form], case, int(size))


def main():
    """Measures each case in its own process, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes", type=measure.parse_sizes, default=_SIZES, help="comma-separated values of 2N"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_one(*arguments.child)))
        return
    measure.report_machine()
    for size in arguments.sizes:
        for case in _NUM_OUTPUTS:
            name = f"{case}, 2N={size}"
            seconds = measure.in_child("benchmarks.loss", "--child", "seconds", case, size)
            measure.report("loss", name, "s", seconds["blocked"], seconds.get("plain"))
            megabytes = {
                form: measure.in_child("benchmarks.loss", "--child", "megabytes", case, size, form)
                for form in seconds
            }
            measure.report("loss", name, "MB", megabytes["blocked"], megabytes.get("plain"))


if __name__ == "__main__":
    main()
