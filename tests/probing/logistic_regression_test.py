"""Logistic regression and nearest neighbors, compared with independent implementations."""

import tracemalloc
import types

import numpy as np
import pytest
import tensorflow as tf
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy import special
from sklearn import linear_model, pipeline, preprocessing
from sklearn import neighbors as sklearn_neighbors

from probing import features, logistic_regression, mlp, nearest_neighbors
from support import no_space
from support.errors import rejects


@pytest.fixture(scope="module")
def sets():
    """Returns training and test sets with three overlapping Gaussian classes in five dimensions."""
    random = default_rng(0)
    centers = random.normal(size=(3, 5)) * 1.2

    def draw(count):
        labels = random.integers(0, 3, count)
        inputs = (centers[labels] + random.normal(size=(count, 5))).astype(np.float32)
        return inputs * [1, 2, 3, 40, 0.1], labels

    return draw(240), draw(150)


@pytest.mark.parametrize("neighbors, temperature", [(1, None), (200, 0.1), (999, 0.5)])
def test_knn_accuracy_matches_scikit_learn(neighbors, temperature, sets):
    def weigh(distances):
        return np.exp((1 - distances) / temperature)

    model = sklearn_neighbors.KNeighborsClassifier(
        min(neighbors, 240), weights=weigh if temperature else "uniform", metric="cosine"
    )
    expected = model.fit(*sets[0]).score(*sets[1])
    accuracy = nearest_neighbors.knn_accuracy(*sets, neighbors=neighbors, temperature=temperature)
    assert accuracy == pytest.approx(expected, abs=1e-9)


def sklearn_accuracy(train, test, l2_per_example):
    """Returns the accuracy of scikit-learn's logistic regression on standardized inputs."""
    inputs, labels = train
    # With two classes, scikit-learn fits one vector of weights instead of two opposite ones.
    factor = 2 if len(np.unique(labels)) == 2 else 1
    model = pipeline.make_pipeline(
        preprocessing.StandardScaler(),
        linear_model.LogisticRegression(C=factor / (l2_per_example * len(labels)), max_iter=2000),
    )
    return model.fit(inputs, labels).score(*test)


def best_l2_per_example(inputs, labels):
    return logistic_regression.lbfgs_accuracy((inputs, labels), (inputs, labels))["l2_per_example"]


def test_regularization_strength_is_selected_on_held_out_examples():
    """Checks that the strongest regularization is selected for noise, and the weakest for separable classes."""
    random = default_rng(0)
    inputs, labels = random.normal(size=(100, 40)), np.arange(100) % 2
    assert best_l2_per_example(inputs, labels) == max(logistic_regression.L2_PER_EXAMPLE_CHOICES)
    inputs = inputs * 0.01 + labels[:, np.newaxis]
    assert best_l2_per_example(inputs, labels) == min(logistic_regression.L2_PER_EXAMPLE_CHOICES)


@pytest.mark.parametrize("count", [2, 10])
def test_classes_with_a_single_example_are_supported(count):
    inputs = default_rng(0).normal(size=(count, 5))
    for row in range(count):  # The single example can be in any row.
        examples = inputs, (np.arange(count) == row).astype(int)
        results = logistic_regression.lbfgs_accuracy(examples, examples)
        assert results["accuracy"] == sklearn_accuracy(
            examples, examples, results["l2_per_example"]
        )


def test_lbfgs_accuracy_matches_scikit_learn(sets):
    results = logistic_regression.lbfgs_accuracy(*sets)
    assert abs(results["accuracy"] - sklearn_accuracy(*sets, results["l2_per_example"])) <= 1 / 150
    assert results["accuracy"] > 0.7


@pytest.mark.parametrize("multi_label", [False, True])
def test_blockwise_fits_match_in_memory_fits(multi_label, sets, monkeypatch):
    (inputs, labels), (test_inputs, _) = sets
    labels = np.eye(3, dtype=np.int64)[labels] if multi_label else labels

    def scores():
        path = logistic_regression.LogisticPath(inputs, labels).fit(10.0).fit(1.0)
        return path.scores(test_inputs)

    expected = scores()
    monkeypatch.setattr(logistic_regression, "_CACHED_BYTES", 0)
    monkeypatch.setattr(logistic_regression, "_BLOCK_ROWS", 7)
    assert_allclose(scores(), expected, atol=1e-6)


@pytest.mark.parametrize("cached_bytes", [0, 2**30])
# fewer examples than features, or more examples than features
@pytest.mark.parametrize("count", [4, 200])
def test_fits_with_standardization_match_fits_on_standardized_features(
    count, cached_bytes, sets, monkeypatch
):
    monkeypatch.setattr(logistic_regression, "_CACHED_BYTES", cached_bytes)
    (inputs, labels), (test_inputs, _) = sets
    inputs = np.insert(inputs, 2, 0.1, axis=1)  # Insert a constant feature.
    test_inputs = np.insert(test_inputs, 2, 0.1, axis=1)
    rows = default_rng(0).permutation(240)[:count]
    scaler = preprocessing.StandardScaler().fit(inputs[rows])
    path = logistic_regression.LogisticPath(scaler.transform(inputs[rows]), labels[rows]).fit(1.0)
    expected = path.scores(scaler.transform(test_inputs))
    path = logistic_regression.LogisticPath(inputs, labels, rows, standardize=True).fit(1.0)
    assert_allclose(path.scores(test_inputs), expected, atol=1e-5)
    held_out = np.setdiff1d(np.arange(240), rows)
    # Classes without examples in `rows` have probability 1e-12.
    log_probabilities = np.maximum(
        special.log_softmax(path.scores(inputs[held_out]), 1), np.log(1e-12)
    )
    assert path.cross_entropy(inputs, labels, held_out) == pytest.approx(
        -log_probabilities[np.arange(len(held_out)), labels[held_out]].mean()
    )


def fit_path(inputs, labels):
    path = logistic_regression.LogisticPath(inputs, labels, standardize=True)
    path.fit(1.0).accuracy(inputs, labels)


def fit_mlp(inputs, labels):
    mlp.mlp_accuracy((inputs, labels), (inputs, labels))


# A float64 copy would be twice as large as the vectors.
@pytest.mark.parametrize("fit, width, limit", [(fit_path, 64, 1.0), (fit_mlp, 128, 0.5)])
def test_memory_of_fits_does_not_grow_with_the_number_of_examples(fit, width, limit, monkeypatch):
    monkeypatch.setattr(logistic_regression, "_CACHED_BYTES", 0)
    monkeypatch.setattr(mlp, "_MAX_EPOCHS", 1)
    monkeypatch.setattr(mlp, "_BATCH_SIZE", 1000)
    random, file = default_rng(0), features.VectorFile()
    for _ in range(40):
        file.append(random.normal(size=(1000, width)))
    inputs, labels = file.read(), random.integers(0, 3, 40_000)
    assert isinstance(inputs, np.memmap) and inputs.nbytes == 40_000 * width * 4
    fit(inputs[:1000], labels[:1000])  # imports modules
    tracemalloc.start()
    fit(inputs, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit * inputs.nbytes


def test_extract_rejects_non_finite_vectors_and_omits_unlabeled_examples():
    images = np.ones([4, 2, 2, 3], np.float32)
    images[1] = np.nan

    def extract():
        labels, weights, positions = np.int64([0, 1, 0, -1]), np.ones(4, np.float32), np.arange(4)
        batches = tf.data.Dataset.from_tensors((images, labels, weights, positions))
        return features.extract(
            tf.distribute.get_strategy(), features.pixels_function(2), batches, "test pixels"
        )

    with rejects("test pixels contain NaN or Inf.* in 1 of 3 examples.*before training"):
        extract()
    images[1] = 2.0
    vectors, labels = extract()
    assert_array_equal(vectors, np.repeat([[1.0], [2.0], [1.0]], 12, axis=1))
    assert_array_equal(labels, [0, 1, 0])


def test_full_disk_for_temporary_files_is_reported(monkeypatch):
    full_file = types.SimpleNamespace(write=no_space)
    monkeypatch.setattr(features.tempfile, "TemporaryFile", lambda: full_file)
    with rejects(r"^TMPDIR=.*No space left on device\). Free up some space, or set TMPDIR"):
        features.VectorFile().append(np.zeros([1, 2]))
