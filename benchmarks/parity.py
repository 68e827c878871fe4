"""Accuracy of frozen encoders after short training, compared with results recorded from the original's code.

    python -m benchmarks.parity --runs_dir=DIR [--tfds_dir=DIR] [--seeds=3]

Runs `paper/recipes/parity_digits.cfg` and, if `--tfds_dir` is set,
`paper/recipes/parity_cifar10.cfg`, once per seed. The training of finished runs is not repeated.
All encoders are evaluated with the protocol of the recorded results: logistic regression
(scikit-learn) on standardized features, where C is 1e-3, 1e-2 or 1e-1, whichever is best on the
test images, and nearest neighbors with cosine similarity. The untrained encoder has the initial
weights of the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

import tensorflow as tf
import tf_keras as keras
from sklearn import linear_model, neighbors, preprocessing

import config as config_lib
import evaluate
import model as model_lib
from benchmarks import measure
from checkpoints import restoring
from probing import features
from sources import datasets

_NEIGHBORS = {"parity_digits": 10, "parity_cifar10": 20}
# The original's code with TensorFlow 2.15.1, one value per seed.
_ORIGINAL = {
    ("parity_digits", "pretrained"): {"logistic regression": [0.986], "nearest neighbors": [0.972]},
    ("parity_cifar10", "pretrained"): {
        "logistic regression": [0.543, 0.540],
        "nearest neighbors": [0.480, 0.481],
    },
    ("parity_cifar10", "untrained"): {"logistic regression": [0.339], "nearest neighbors": [0.268]},
}


def run(recipe, model_dir, extra):
    """Executes or resumes a run. If it has finished, only its evaluation is repeated."""
    subprocess.run(
        [
            sys.executable,
            "run.py",
            f"--flagfile=paper/recipes/{recipe}.cfg",
            f"--model_dir={model_dir}",
            *extra,
        ],
        check=True,
        stdout=sys.stderr,
    )


def accuracies(model, config, source, num_neighbors):
    """Returns a dict with the accuracies of both classifiers on the representations h of a model."""
    strategy = tf.distribute.get_strategy()
    train, test = (
        features.extract(
            strategy,
            features.encoder_function(model),
            evaluate.eval_batches(config, source, split, strategy),
            split,
        )
        for split in (config.train_split, config.eval_split)
    )
    scaler = preprocessing.StandardScaler().fit(train[0])
    scaled = [(scaler.transform(vectors), labels) for vectors, labels in (train, test)]
    regression = max(
        linear_model.LogisticRegression(C=c, max_iter=2000).fit(*scaled[0]).score(*scaled[1])
        for c in (1e-3, 1e-2, 1e-1)
    )
    classifier = neighbors.KNeighborsClassifier(
        num_neighbors, metric="cosine", algorithm="brute"
    ).fit(*train)
    return {"logistic regression": regression, "nearest neighbors": classifier.score(*test)}


def evaluate_run(model_dir, recipe, extra):
    """Returns the accuracies of a run's encoder, before and after training."""
    config = config_lib.from_arguments([f"--flagfile=paper/recipes/{recipe}.cfg", *extra])
    source = datasets.open_source(config.dataset, config.data_dir)
    keras.utils.set_random_seed(config.seed + 1)  # Training initializes weights with this seed.
    models = {
        name: model_lib.build_model(config, source.num_classes)
        for name in ("untrained", "pretrained")
    }
    restoring.load_model(models["pretrained"], model_dir, "--runs_dir")
    return {
        name: accuracies(model, config, source, _NEIGHBORS[recipe])
        for name, model in models.items()
    }


def main():
    """Prints one JSON line per recipe, encoder and classifier.

    `ours` and `baseline` (the original) are means over the seeds. Accuracies of the original that
    were not recorded are omitted.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs_dir", required=True)
    parser.add_argument("--tfds_dir")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flags", default="", help="additional run.py flags for all runs")
    arguments = parser.parse_args()
    measure.report_machine()
    extra = arguments.flags.split()
    recipes = {"parity_digits": extra}
    if arguments.tfds_dir:
        recipes["parity_cifar10"] = [*extra, f"--data_dir={arguments.tfds_dir}"]
    for recipe, flags in recipes.items():
        by_seed = []
        for seed in range(1, arguments.seeds + 1):
            directory = os.path.join(arguments.runs_dir, f"{recipe}_{seed}")
            run(recipe, directory, [*flags, f"--seed={seed}"])
            by_seed.append(evaluate_run(directory, recipe, [*flags, f"--seed={seed}"]))
        for encoder in by_seed[0]:
            for classifier in by_seed[0][encoder]:
                ours = [results[encoder][classifier] for results in by_seed]
                original = _ORIGINAL.get((recipe, encoder), {}).get(classifier)
                measure.report(
                    "parity",
                    f"{recipe}, {encoder}, {classifier}",
                    "accuracy",
                    statistics.mean(ours),
                    statistics.mean(original) if original else None,
                    seeds=ours,
                    original=original,
                )


if __name__ == "__main__":
    main()
