"""Resident memory of a `--mode=eval` process after every tenth checkpoint that it evaluates, and after the last one.

    python -m benchmarks.evaluation_memory [--evaluations=200]

Evaluates ResNet-10 on digits, resized to 8 x 8 pixels, with all protocols, baselines and
projections. All checkpoints are links to the same file, so only the number of evaluations changes.
Requires Linux, because memory usage is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import measure

_REPORT_EVERY = 10  # Number of evaluations between two reports.
_WARM_UP = 50  # Number of evaluations after which memory use should no longer grow.
_SETTINGS = (
    "--dataset=digits",
    "--resnet_depth=10",
    "--image_size=8",
    "--train_batch_size=32",
    "--num_proj_layers=2",
    "--proj_out_dim=16",
    "--seed=1",
    "--train_split=train[:64]",
    "--eval_batch_size=90",
)
_PROTOCOLS = (
    "--mode=eval",
    "--eval_split=test[:180]",
    "--eval_protocol=linear_head,lbfgs,knn,contrastive",
    "--eval_baselines",
    "--eval_projections",
)


def make_checkpoints(directory: pathlib.Path, count: int):
    """Trains for one step, and creates links to the checkpoint, named ckpt-2 to ckpt-<count>."""
    subprocess.run(
        [sys.executable, "run.py", f"--model_dir={directory}", "--train_steps=1", *_SETTINGS],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for step in range(2, count + 1):
        for suffix in ("index", "data-00000-of-00001"):
            os.link(directory / f"ckpt-1.{suffix}", directory / f"ckpt-{step}.{suffix}")
    paths = "".join(f'all_model_checkpoint_paths: "ckpt-{step}"\n' for step in range(1, count + 1))
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "ckpt-{count}"\n{paths}')


def resident_megabytes(pid: int) -> float:
    """Returns the resident set size of a process, in MB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def evaluate_all(directory: pathlib.Path, count: int) -> dict[int, float]:
    """Evaluates `count` checkpoints in one process. Returns a dict mapping numbers of evaluations to resident MB."""
    command = [
        sys.executable,
        "run.py",
        f"--model_dir={directory}",
        f"--train_steps={count}",
        *_SETTINGS,
        *_PROTOCOLS,
    ]
    # For such small fits, multiple BLAS threads would mostly wait for each other.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    megabytes, num_evaluations = {}, 0
    for line in process.stdout:
        if not line.startswith("results "):
            continue
        num_evaluations += 1
        if num_evaluations % _REPORT_EVERY == 0 or num_evaluations == count:
            resident = megabytes[num_evaluations] = resident_megabytes(process.pid)
            print(
                json.dumps(
                    dict(evaluations=num_evaluations, resident_megabytes=round(resident, 1))
                ),
                flush=True,
            )
    if process.wait() or num_evaluations < count:
        raise SystemExit(
            f"run.py exited with status {process.returncode} after {num_evaluations} evaluations"
        )
    return megabytes


def main():
    """Prints JSON lines. `ours` is the memory at the end, and `baseline` is the memory after the warm-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=200)
    count = parser.parse_args().evaluations
    measure.report_machine()
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / "run"
        make_checkpoints(directory, count)
        megabytes = evaluate_all(directory, count)
        event_files = len(list((directory / "eval").glob("events.*")))
    warm = [value for evaluations, value in megabytes.items() if evaluations >= _WARM_UP] or list(
        megabytes.values()
    )
    measure.report(
        "evaluation_memory",
        f"{count} evaluations",
        "MB",
        warm[-1],
        warm[0],
        lowest=round(min(warm), 1),
        highest=round(max(warm), 1),
        event_files=event_files,
    )


if __name__ == "__main__":
    main()
