"""Effect of half precision on accuracy, measured by complete runs in float32 and mixed_bfloat16 with multiple seeds.

    python -m benchmarks.precision --runs_dir=DIR [--tfds_dir=DIR] [--seeds=3]
    [--flags='--train_steps=2']

Runs the quickstart on digits and, if `--tfds_dir` is set, 200 steps of ResNet-18 on CIFAR-10
(ImageNet stem, 20 % of the training images). Runs with the same seed differ only in precision.
Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

from benchmarks import measure

_RECIPE = "--flagfile=paper/recipes/digits.cfg"
_CIFAR = (
    "--mode=train_then_eval",
    "--dataset=cifar10",
    "--train_split=train[:20%]",
    "--eval_split=test",
    "--image_size=32",
    "--stem=imagenet",
    "--resnet_depth=18",
    "--train_batch_size=256",
    "--train_steps=200",
    "--warmup_epochs=1",
    "--learning_rate=0.1",
    "--learning_rate_scaling=sqrt",
    "--linear_head_learning_rate=0.1",
    "--temperature=0.5",
    "--color_jitter_strength=0.5",
    "--nouse_blur",
    "--eval_protocol=linear_head,lbfgs,knn",
)
_METRICS = ("eval/lbfgs_top_1_accuracy", "eval/knn_top_1_accuracy", "eval/label_top_1_accuracy")


def run(flags, model_dir, precision, seed):
    """Returns the results of a run. Executes the run first if it has no results yet."""
    path = os.path.join(model_dir, "result.json")
    if not os.path.exists(path):
        subprocess.run(
            [
                sys.executable,
                "run.py",
                *flags,
                f"--model_dir={model_dir}",
                f"--precision={precision}",
                f"--seed={seed}",
            ],
            check=True,
            stdout=sys.stderr,
        )
    with open(path) as file:
        return json.load(file)


def main():
    """Prints one JSON line per data set and metric.

    `ours` is the result with mixed_bfloat16, and `baseline` is the result with float32.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs_dir", required=True)
    parser.add_argument("--tfds_dir")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flags", default="", help="additional run.py flags for every run")
    arguments = parser.parse_args()
    measure.report_machine()
    data_sets = {"digits": [_RECIPE, "--label_fraction=1"]}
    if arguments.tfds_dir:
        data_sets["cifar10"] = [*_CIFAR, f"--data_dir={arguments.tfds_dir}"]
    for name, flags in data_sets.items():
        flags = [*flags, *shlex.split(arguments.flags)]
        directory = os.path.join(arguments.runs_dir, name)
        results = {
            precision: [
                run(flags, f"{directory}_{precision}_{seed}", precision, seed)
                for seed in range(1, arguments.seeds + 1)
            ]
            for precision in ("float32", "mixed_bfloat16")
        }
        for metric in _METRICS:
            values = {
                precision: [result[metric] for result in by_seed]
                for precision, by_seed in results.items()
            }
            measure.report(
                "precision",
                f"{name}, {metric}",
                "accuracy",
                statistics.mean(values["mixed_bfloat16"]),
                statistics.mean(values["float32"]),
                seeds=values,
            )


if __name__ == "__main__":
    main()
