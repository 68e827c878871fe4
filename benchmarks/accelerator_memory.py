"""Parts `loss` and `micro_batches` of `benchmarks.accelerator`: time and peak memory."""

from __future__ import annotations

import functools
import time

import tensorflow as tf

from benchmarks import accelerator_speed, measure
from benchmarks import loss as loss_lib
from large_batch import blocked_nt_xent

_OUTPUTS = "loss_and_metrics"  # a key of `benchmarks.loss`


def loss(size, rounds, block_rows):
    """Yields the time and the peak memory of NT-Xent, with its metrics and its gradient, for 2N = `size`.

    The baseline, `objective.add_contrastive_loss`, is measured last, so that its failure does not
    affect the other lines. Its lines have the key `baseline`. If it fails, for example for lack of
    memory, the key is `baseline_error`.

    Args:
      size: number of projections.
      rounds: timed calls of each form.
      block_rows: numbers of rows per block to measure, in addition to the number that training
        chooses.
    """
    forms = {
        "blocks": loss_lib.blocked,
        **{
            f"blocks of {rows} rows": functools.partial(_blocked, block_rows=rows)
            for rows in block_rows
        },
        "plain": loss_lib.plain,
    }
    for name, form in forms.items():
        case, compute = f"loss, 2N={size}, {name}", loss_lib.make_computation(form, _OUTPUTS, size)
        loss_lib.make_computation(form, _OUTPUTS, 16)()  # Libraries allocate their buffers here.
        try:
            values = {
                "MB": measure.peak_of(compute),
                "s": measure.time_alternately({name: compute}, rounds)[name],
            }
        except tf.errors.OpError as error:
            if name != "plain":
                raise
            yield measure.line(
                "accelerator", case, None, None, None, baseline_error=measure.describe(error)
            )
        else:
            for unit, value in values.items():
                yield measure.line(
                    "accelerator",
                    case,
                    unit,
                    *((None, value) if name == "plain" else (value, None)),
                )


def _blocked(hidden, block_rows):
    return blocked_nt_xent.contrastive_loss(
        hidden, True, loss_lib.TEMPERATURE, block_rows=block_rows
    )


def micro_batches(depth, size, batch, micro, precision):
    """Yields the peak memory and the time of a training step. `micro` is the size of a micro-batch; 0 disables them.

    The peak includes the views of the batch, in float32. The time is that of the second step.
    """
    run_steps = accelerator_speed.build_run_steps(
        depth, size, batch, precision, use_blur=False, micro_batch_size=micro
    )
    batches = accelerator_speed.Repeat(*accelerator_speed.random_batch(batch, size))
    seconds = []

    def run():
        for _ in range(2):
            begin = time.perf_counter()
            float(run_steps(batches, tf.constant(1))[0]["train/total_loss"])
            seconds.append(time.perf_counter() - begin)

    megabytes = measure.peak_of(run)
    case = f"memory, ResNet-{depth}, {size} pixels, batch {batch}, {precision}"
    case += f", micro-batches of {micro}" if micro else ", without micro-batches"
    yield measure.line("accelerator", case, "MB", megabytes, None)
    yield measure.line("accelerator", case, "s", seconds[-1], None)
