"""Checks and measurements on a machine with an accelerator: correctness, speed, memory and accuracy.

    python -m benchmarks.accelerator [--parts=step,loss] [--only=TEXT] [--out=FILE]
    [--max_seconds=540] [--small]
        [--runs_dir=DIR] [--tfds_dir=DIR] [--flags=FLAGS]

Each part consists of cases. Each case has a time limit, and runs in a separate process, so that it
releases the memory of the device. The last JSON line of a case contains `error`, which is null if
the case succeeded. After a failure, the next case starts. With `--out=FILE`, the lines of all cases
are appended to FILE, and the same command skips cases that FILE lists as finished.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback

from benchmarks import measure

_MAX_SECONDS = 540  # default time limit of a case
_GRACE_SECONDS = 20  # time in which a run can save a checkpoint after SIGTERM
_PRECISIONS = ("mixed_bfloat16", "tf32", "float32", "mixed_float16")
# The recipe with a tenth of its epochs.
_CIFAR10 = (
    "--flagfile=paper/recipes/cifar10.cfg",
    "--train_epochs=100",
    "--precision=mixed_bfloat16",
    "--linear_head_learning_rate=0.1",
    "--checkpoint_epochs=5",
    "--eval_protocol=linear_head,lbfgs,knn",
    "--seed=1",
)
_DIGITS = (
    "--mode=train_then_eval",
    "--dataset=digits",
    "--train_batch_size=16",
    "--warmup_epochs=0",
    "--train_steps=4",
    "--linear_head_learning_rate=0.1",
    "--eval_protocol=linear_head,lbfgs,knn",
    "--seed=1",
)
_TINY = ("--resnet_depth=10", "--image_size=8", "--num_proj_layers=2", "--proj_out_dim=16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of a part.

    Attributes:
      part: name of the part.
      name: name of the case within its part.
      function: module and function, which yields JSON lines as dicts.
      arguments: keyword arguments of the function.
      max_seconds: time limit.
    """

    part: str
    name: str
    function: str
    arguments: dict
    max_seconds: int = _MAX_SECONDS


def _case(part, name, function, max_seconds=_MAX_SECONDS, **arguments):
    return Case(part, name, f"benchmarks.accelerator_{function}", arguments, max_seconds)


def all_cases(runs_dir, tfds_dir=None, flags=()):
    """Yields all cases.

    Args:
      runs_dir: directory for the run directory of the part `cifar10`.
      tfds_dir: TFDS directory with the prepared cifar10 data set, or None for the default
        directory.
      flags: additional run.py flags for the part `cifar10`.
    """
    yield _case("device", "device", "checks.device")
    for tf32 in (False, True):
        yield _case("golden", "tf32" if tf32 else "float32", "checks.golden", tf32=tf32)
    for depth, size, batch in ((18, 32, 32), (50, 224, 16)):
        yield _case(
            "reference", f"resnet{depth}", "checks.reference", depth=depth, size=size, batch=batch
        )
    for precision in _PRECISIONS:
        for depth, size, batch, steps in ((50, 224, 256, 5), (18, 32, 512, 20)):
            name = f"resnet{depth}, {precision}"
            settings = dict(
                depth=depth, size=size, batch=batch, steps=steps, rounds=5, precision=precision
            )
            yield _case("step", name, "speed.step", jit_compile=False, **settings)
            yield _case("step", f"{name}, XLA", "speed.step", jit_compile=True, **settings)
            yield _case(
                "torch", name, "torch.step", cifar_stem=depth == 18, backend="inductor", **settings
            )
    for depth, size, batch, steps, images in ((50, 224, 256, 5, 512), (18, 32, 512, 20, 4096)):
        yield _case(
            "input",
            f"resnet{depth}",
            "speed.input_share",
            depth=depth,
            size=size,
            batch=batch,
            steps=steps,
            seconds=15.0,
            images=images,
            precision="mixed_bfloat16",
        )
    for power in range(12, 18):
        yield _case(
            "loss", str(2**power), "memory.loss", size=2**power, rounds=5, block_rows=(1024, 4096)
        )
    for batch, micro in ((256, 0), (512, 0), (4096, 64), (4096, 128), (4096, 256)):
        yield _case(
            "micro_batches",
            f"{batch}, {micro}",
            "memory.micro_batches",
            depth=50,
            size=224,
            batch=batch,
            micro=micro,
            precision="mixed_bfloat16",
        )
    for precision in ("float32", "mixed_bfloat16"):
        yield _case(
            "deterministic",
            precision,
            "checks.deterministic",
            precision=precision,
            steps=60,
            checkpoint_steps=10,
            flags=["--resnet_depth=18", "--image_size=32", "--train_batch_size=128"],
        )
    data_dir = [f"--data_dir={tfds_dir}"] if tfds_dir else []
    # The smallest accuracies are targets.
    yield _case(
        "cifar10",
        "run",
        "checks.cifar10",
        max_seconds=3600,
        model_dir=os.path.join(runs_dir, "cifar10"),
        flags=[*_CIFAR10, *data_dir, *flags],
        min_linear=0.845,
        min_knn=0.82,
    )


def small_cases(runs_dir, flags=()):
    """Yields one or two cases of each part, which are small enough for two CPU cores."""
    network = dict(depth=10, size=16, batch=8)
    step = dict(**network, steps=2, rounds=1, precision="float32")
    yield _case("device", "device", "checks.device")
    yield _case("golden", "float32", "checks.golden", tf32=False, cases=1)
    yield _case("reference", "resnet10", "checks.reference", **network)
    yield _case("step", "resnet10, float32, XLA", "speed.step", jit_compile=True, **step)
    yield _case(
        "torch", "resnet10, float32", "torch.step", cifar_stem=True, backend="eager", **step
    )
    yield _case(
        "input",
        "resnet10",
        "speed.input_share",
        depth=10,
        size=40,
        batch=4,
        steps=1,
        seconds=0.2,
        images=8,
        precision="float32",
    )
    yield _case("loss", "64", "memory.loss", size=64, rounds=1, block_rows=(8,))
    yield _case(
        "micro_batches", "8, 4", "memory.micro_batches", micro=4, precision="float32", **network
    )
    yield _case(
        "deterministic",
        "float32",
        "checks.deterministic",
        precision="float32",
        steps=24,
        checkpoint_steps=3,
        flags=[*_TINY, "--train_batch_size=16"],
    )
    yield _case(
        "cifar10",
        "run",
        "checks.cifar10",
        model_dir=os.path.join(runs_dir, "digits"),
        flags=[*_DIGITS, *_TINY, *flags],
    )


# ---------------------------------------------------------------------------------------------------------- processes


def run_child(case):
    """Runs a case in this process, and prints its lines. Returns 1 if a check or a measurement failed, otherwise 0."""
    module, function = case.function.rsplit(".", 1)
    failed = False
    try:
        for line in getattr(importlib.import_module(module), function)(**case.arguments):
            print(json.dumps(line), flush=True)
            failed |= "error" in line or line.get("holds") is False
    except Exception as error:
        traceback.print_exc()
        print(
            json.dumps(
                dict(
                    benchmark="accelerator",
                    case=f"{case.part}, {case.name}",
                    error=measure.describe(error),
                )
            ),
            flush=True,
        )
        failed = True
    return int(failed)


def torch_python():
    """Returns the Python interpreter for the part `torch`, or None if there is none with PyTorch."""
    found = sys.executable if importlib.util.find_spec("torch") else None
    return os.environ.get("SIMCLR_TORCH_PYTHON", found)


def child_command(case, arguments):
    """Returns the command that runs a case."""
    python = torch_python() if case.part == "torch" else sys.executable
    return [python, "-m", "benchmarks.accelerator", *arguments, "--child", case.part, case.name]


def run_case(case, arguments, max_seconds, write):
    """Runs a case in a child process, and passes its lines to `write`. Returns an error message or None."""
    # The child has its own process group, so that the runs which it starts are stopped together
    # with it.
    process = subprocess.Popen(
        child_command(case, arguments), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    expired = threading.Event()

    def stop():
        expired.set()
        _stop_group(process)

    timer = threading.Timer(max_seconds, stop)
    timer.start()
    try:
        for text in process.stdout:
            if line := _parse(text):
                write(line)
        status = process.wait()
    finally:
        timer.cancel()
        _stop_group(process)  # If a case has failed, the runs that it started may not have ended.
        timer.join()  # After the time limit, runs may still be saving a checkpoint.
    if expired.is_set():
        return f"stopped after {max_seconds:.0f} seconds"
    if status < 0:
        return f"killed by signal {-status}"
    return "a check or a measurement failed" if status else None


def _stop_group(process):
    """Sends SIGTERM and later SIGKILL to a process group, so that training runs can save a checkpoint."""
    with contextlib.suppress(ProcessLookupError):  # All processes of the group have ended.
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(10 * _GRACE_SECONDS):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
            process.poll()
        os.killpg(process.pid, signal.SIGKILL)


def finished_cases(path):
    """Returns the set of (part, case) that a file of JSON lines lists as finished without errors."""
    if path is None or not os.path.exists(path):
        return set()
    with open(path, encoding="utf-8") as file:
        lines = [_parse(text) for text in file]
    return {
        (line["part"], line["case"])
        for line in lines
        if "part" in line and line["error"] is None and "skipped" not in line
    }


def _parse(text):
    """Parses a line of output. Returns an empty dict if it is not a complete JSON object."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def run_cases(selected, arguments, out, max_seconds):
    """Runs the cases that are not finished, and prints a line with the time of each case. Returns whether all succeed.

    Args:
      selected: the cases.
      arguments: command-line arguments that the child processes need.
      out: path of the file to which all lines are appended, or None.
      max_seconds: time limit of all cases together, or None.
    """

    def write(line):
        print(json.dumps(line), flush=True)
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)

    begin, finished, succeeded = time.perf_counter(), finished_cases(out), True
    for case in selected:
        if (case.part, case.name) in finished:
            continue
        case_begin, error = time.perf_counter(), None
        limit = case.max_seconds
        if max_seconds is not None:
            limit = min(limit, max_seconds - (case_begin - begin))
        status = dict(benchmark="accelerator", part=case.part, case=case.name)
        if case.part == "torch" and torch_python() is None:
            status["skipped"] = "PyTorch is not installed"
        elif limit <= 0:
            error = f"not started, because the time of --max_seconds={max_seconds:g} is over"
        else:
            error = run_case(case, arguments, limit, write)
        write({**status, "seconds": round(time.perf_counter() - case_begin, 1), "error": error})
        succeeded &= error is None
    return succeeded


def main():
    """Runs the selected cases, and prints JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="", help="comma-separated parts; default: all parts")
    parser.add_argument(
        "--only", default="", help="run only the cases whose names contain this text"
    )
    parser.add_argument(
        "--out", help="file to which all lines are appended; finished cases in it are skipped"
    )
    parser.add_argument(
        "--max_seconds",
        type=float,
        help=(
            "time limit of all cases together, in seconds. "
            f"A stopped run has up to {_GRACE_SECONDS} more seconds to save a checkpoint."
        ),
    )
    parser.add_argument(
        "--small", action="store_true", help="use tiny networks and data, for tests on CPUs"
    )
    parser.add_argument(
        "--runs_dir", default="runs/accelerator", help="directory of the run of the part cifar10"
    )
    parser.add_argument("--tfds_dir", help="TFDS directory with the prepared cifar10 data set")
    parser.add_argument("--flags", default="", help="additional run.py flags for the part cifar10")
    parser.add_argument("--child", nargs=2, metavar=("PART", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    flags = shlex.split(arguments.flags)
    known = list(
        small_cases(arguments.runs_dir, flags)
        if arguments.small
        else all_cases(arguments.runs_dir, arguments.tfds_dir, flags)
    )
    if arguments.child:
        sys.exit(
            run_child(next(case for case in known if [case.part, case.name] == arguments.child))
        )
    parts = (
        arguments.parts.split(",")
        if arguments.parts
        else dict.fromkeys(case.part for case in known)
    )
    if unknown := set(parts) - {case.part for case in known}:
        parser.error(
            f"--parts={arguments.parts}: {', '.join(sorted(unknown))} unknown. Use one or more of "
            f"{', '.join(dict.fromkeys(case.part for case in known))}."
        )
    # Stops the child process as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    measure.report_machine()
    selected = [
        case
        for part in parts
        for case in known
        if case.part == part and arguments.only in case.name
    ]
    forwarded = [
        f"--{name}={getattr(arguments, name)}"
        for name in ("runs_dir", "tfds_dir", "flags")
        if getattr(arguments, name)
    ] + ["--small"] * arguments.small
    sys.exit(not run_cases(selected, forwarded, arguments.out, arguments.max_seconds))


if __name__ == "__main__":
    main()
