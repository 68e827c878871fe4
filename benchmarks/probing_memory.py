"""Peak memory and time of evaluations of a frozen encoder, for several numbers of examples.

    python -m benchmarks.probing_memory [logistic_regression | mlp | contrastive]
    [--sizes=100000,200000]

- `logistic_regression`: `--eval_protocol=lbfgs` on 100,000 and 200,000 examples with 512 features
  and 20 classes. The baseline is scikit-learn's LogisticRegression with StandardScaler, on features
  in memory.
- `mlp`: a probe of Table 3 on the same numbers of examples with 512 features and two classes,
  trained for one epoch. The baseline is scikit-learn's MLPClassifier with StandardScaler, on
  features in memory.
- `contrastive`: `--eval_protocol=contrastive` for ResNet-50 at 224 pixels, with batches of 128, 256
  and 512 images. The baseline embeds all images of a batch at once.

Prints two JSON lines per case: one with the memory in MB, and one with the time in seconds. Both
lines also contain the results of both implementations: accuracies, or the contrastive loss. Each
measurement runs in a separate process. The memory is the peak increase in anonymous memory. It
excludes memory-mapped files, because the system can write them back to disk. Requires Linux,
because memory usage is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import threading
import time
import warnings

import numpy as np

from benchmarks import measure

_WIDTH, _CLASSES = 512, 20
_SIZES = {
    "logistic_regression": (100_000, 200_000),
    "mlp": (100_000, 200_000),
    "contrastive": (128, 256, 512),
}
_SAMPLING_SECONDS = 0.02


def anonymous_megabytes():
    """Returns the anonymous resident memory of this process, in MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def measure_call(function):
    """Calls `function`, and returns its result, the time in seconds and the peak increase in anonymous memory in MB."""
    samples, done = [anonymous_megabytes()], threading.Event()

    def sample():
        while not done.wait(_SAMPLING_SECONDS):
            samples.append(anonymous_megabytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    begin = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    done.set()
    thread.join()
    return dict(result=result, seconds=seconds, megabytes=max(samples) - samples[0])


def clusters(count, num_classes):
    """Yields blocks of examples from overlapping clusters, as (float32 vectors [1000, width], labels [1000])."""
    random = np.random.default_rng(0)
    centers = random.normal(size=[num_classes, _WIDTH]).astype(np.float32)
    for _ in range(count // 1000):
        labels = random.integers(0, num_classes, 1000)
        yield centers[labels] + 4 * random.standard_normal([1000, _WIDTH], np.float32), labels


def in_file(count, num_classes):
    """Returns the vectors of all examples as a memory map, and their labels as an array."""
    from probing import features

    file, labels = features.VectorFile(), []
    for vectors, block_labels in clusters(count, num_classes):
        file.append(vectors)
        labels.append(block_labels)
    return file.read("features"), np.concatenate(labels)


def in_memory(count, num_classes):
    """Returns the vectors and labels of all examples as arrays."""
    return tuple(map(np.concatenate, zip(*clusters(count, num_classes))))


def logistic_regression_ours(count):
    """Selects the l2 strength of a logistic regression, fits the model, and returns its accuracy."""
    from probing import logistic_regression

    return logistic_regression.lbfgs_accuracy(in_file(count, _CLASSES), in_file(1000, _CLASSES))[
        "accuracy"
    ]


def logistic_regression_baseline(count):
    """Fits the same models as `logistic_regression_ours`, using scikit-learn. Returns the accuracy."""
    from sklearn import linear_model, model_selection, pipeline, preprocessing

    from probing import logistic_regression

    inputs, labels = in_memory(count, _CLASSES)
    fit, held_out = model_selection.train_test_split(
        np.arange(count), test_size=0.2, random_state=0
    )

    def fitted(rows, l2_per_example):
        model = linear_model.LogisticRegression(C=1 / (l2_per_example * len(rows)), max_iter=300)
        return pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(
            inputs[rows], labels[rows]
        )

    def loss(l2_per_example):
        log_probabilities = fitted(fit, l2_per_example).predict_log_proba(inputs[held_out])
        return -log_probabilities[np.arange(len(held_out)), labels[held_out]].mean()

    best = min(logistic_regression.L2_PER_EXAMPLE_CHOICES, key=loss)
    return fitted(np.arange(count), best).score(*in_memory(1000, _CLASSES))


def mlp_ours(count):
    """Trains an MLP probe, as in Table 3, and returns its accuracy."""
    from probing import mlp

    mlp._MAX_EPOCHS = 1
    return mlp.mlp_accuracy(in_file(count, 2), in_file(1000, 2))


def mlp_baseline(count):
    """Trains the same probe as `mlp_ours`, using scikit-learn. Returns its accuracy."""
    from sklearn import neural_network, pipeline, preprocessing

    network = neural_network.MLPClassifier(256, early_stopping=True, max_iter=1)
    model = pipeline.make_pipeline(preprocessing.StandardScaler(), network)
    return model.fit(*in_memory(count, 2)).score(*in_memory(1000, 2))


def contrastive_ours(count, part_rows=None):
    """Evaluates one batch with an untrained network, and returns the contrastive loss."""
    import tensorflow as tf
    import tf_keras as keras

    import evaluate
    import model as model_lib
    from config import Config
    from sources import digits

    if part_rows:
        evaluate._EMBEDDED_ROWS = part_rows
    config = Config(
        dataset="digits",
        seed=1,
        image_size=224,
        eval_split=f"train[:{count}]",
        eval_batch_size=count,
    )
    keras.utils.set_random_seed(1)
    model = model_lib.build_model(config, 10)
    evaluator = evaluate.Evaluator(
        config, digits.digits_source(), model, tf.distribute.get_strategy()
    )
    return evaluator.contrastive(0)["eval/contrast_loss"]


def contrastive_baseline(count):
    """Evaluates one batch like `contrastive_ours`, but embeds all of its images at once."""
    return contrastive_ours(count, count)


def main():
    """Prints two JSON lines per case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "evaluation", nargs="?", choices=_SIZES, help="evaluation to measure (default: all)"
    )
    parser.add_argument(
        "--sizes",
        type=measure.parse_sizes,
        help=(
            "comma-separated numbers of examples; multiples of "
            "1,000, except for `contrastive` (default: see above)"
        ),
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, count = arguments.child
        with warnings.catch_warnings():
            # The fits may stop at the maximum number of iterations.
            warnings.simplefilter("ignore")
            if not name.startswith("contrastive"):
                # Libraries are loaded and allocate their buffers here, outside the measurement.
                globals()[name](1000)
            print(json.dumps(measure_call(lambda: globals()[name](int(count)))))
        return
    measure.report_machine()
    for evaluation in [arguments.evaluation] if arguments.evaluation else _SIZES:
        for count in arguments.sizes or _SIZES[evaluation]:
            ours, baseline = (
                measure.in_child(
                    "benchmarks.probing_memory", "--child", f"{evaluation}_{form}", count
                )
                for form in ("ours", "baseline")
            )
            for key, unit in (("megabytes", "MB"), ("seconds", "s")):
                measure.report(
                    "probing_memory",
                    f"{evaluation}, {count:,} examples",
                    unit,
                    ours[key],
                    baseline[key],
                    results=[ours["result"], baseline["result"]],
                )


if __name__ == "__main__":
    main()
