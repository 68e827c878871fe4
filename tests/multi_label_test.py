"""Multi-label data sets such as PASCAL VOC: labels, loss, metrics, training and evaluation."""

import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from pytest import approx

import data
import metrics
import model as model_lib
import objective
from config import Config, parse_settings
from probing import logistic_regression
from sources import datasets
from support import SMALL, read_json, runs, write_json
from support.errors import rejects
from transfer import cli

pytestmark = pytest.mark.usefixtures("stem_only_resnet")
CLASSES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def tiny_voc(tmp_path_factory):
    """Writes a TFDS data set with labels as in voc/2007. A color channel is bright if its class is present.

    In every fourth image, the last class is marked as difficult.
    """
    import tensorflow_datasets as tfds

    def make_examples(first, last):
        examples = []
        for index in range(first, last):
            classes = [channel for channel in range(3) if index >> channel & 1]
            image = np.full([40, 40, 3], 20, np.uint8)
            image[..., classes] = 220
            not_difficult = [label for label in classes if label < 2 or index % 4]
            examples.append(
                (index, {"image": image, "labels": classes, "labels_no_difficult": not_difficult})
            )
        return examples

    directory = tmp_path_factory.mktemp("tfds")
    names = tfds.features.ClassLabel(names=CLASSES)
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "labels": tfds.features.Sequence(names),
            "labels_no_difficult": tfds.features.Sequence(names),
        }
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        "tiny_voc",
        "1.0.0",
        features,
        {"train": make_examples(0, 64), "test": make_examples(64, 96)},
        data_dir=directory,
    )
    return str(directory)


def test_difficult_objects_are_labeled_unknown(tiny_voc):
    source = datasets.open_source("tiny_voc", tiny_voc)
    assert source.multi_label and source.class_names == list(CLASSES)
    labels = {
        tuple(int(level > 100) for level in source.decode(item)[0, 0]): label.numpy().tolist()
        for _, item, label in source.records("train")
    }
    expected = {bright: [*bright] for bright in itertools.product((0, 1), repeat=3)}
    expected[0, 0, 1] = [0, 0, -1]  # Every fourth image has neither red nor green.
    assert labels == expected


def test_padding_in_evaluation_batches_is_unlabeled(tiny_voc):
    source = datasets.open_source("tiny_voc", tiny_voc)
    config = Config(dataset="tiny_voc", image_size=8)
    *_, (_, labels, weights) = data.build_eval_dataset(config, source, "test", 20)
    assert labels.shape == [20, 3]
    assert (labels.numpy()[weights == 0] == -1).all() and (weights.numpy() == 0).sum() == 8


def test_multi_label_loss_and_accuracy_match_a_loop_implementation():
    random = np.random.default_rng(0)
    labels, logits = random.integers(-1, 2, (5, 4)), random.standard_normal((5, 4)) * 3
    total = 0
    for label, logit in zip(labels.ravel(), logits.ravel()):
        probability = 1 / (1 + np.exp(-logit))
        total -= {1: np.log(probability), 0: np.log(1 - probability), -1: 0}[label]
    loss = objective.add_multi_label_loss(tf.constant(labels), tf.constant(logits))
    assert float(loss) == approx(total / 5, rel=1e-9)
    is_known = labels >= 0
    accuracy = metrics.multi_label_accuracy(tf.constant(labels), tf.constant(logits))
    assert float(accuracy) == approx(((logits > 0) == labels)[is_known].mean())


def test_average_precision_11_matches_scikit_learn():
    from sklearn.metrics import precision_recall_curve

    random = np.random.default_rng(2)
    # With 10 or 20 relevant examples, some recall levels, such as 0.3, are reached exactly.
    for num_relevant in range(1, 21):
        relevant, scores = random.permutation(50) < num_relevant, random.standard_normal(50)
        precision, recall, _ = precision_recall_curve(relevant, scores)
        # The last point of the curve has no threshold.
        precision, recall = precision[:-1], recall[:-1]
        expected = np.mean([precision[recall >= tenth / 10 - 1e-9].max() for tenth in range(11)])
        assert metrics.average_precision_11(relevant, scores) == approx(expected)


def test_accuracies_match_scikit_learn():
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, top_k_accuracy_score

    random = np.random.default_rng(1)
    labels = random.choice([0, 1, 3, 4, 5, 6, 7], 90)
    logits = random.standard_normal((90, 8)).astype(np.float32)
    logits[np.arange(90), labels] += 1
    results, predictions = metrics.linear_results(labels, logits), logits.argmax(1)
    assert results[metrics.LINEAR_TOP_1] == approx(accuracy_score(labels, predictions))
    assert results[metrics.LINEAR_TOP_5] == approx(
        top_k_accuracy_score(labels, logits, k=5, labels=range(8))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Class 2 is predicted but has no examples.
        assert results[metrics.MEAN_PER_CLASS] == approx(
            balanced_accuracy_score(labels, predictions)
        )
    assert results[metrics.MEAN_PER_CLASS] != approx(results[metrics.LINEAR_TOP_1], abs=1e-3)


def test_mean_average_precision_ignores_unknown_labels_and_absent_classes():
    labels = np.array([[1, 0, 0], [0, -1, 0], [1, 1, 0], [0, 0, 0]])
    scores = np.array([[4, 1, 0], [3, 9, 0], [2, 8, 0], [1, 0, 0.0]])
    # The first class has precision 1 up to recall 0.5, then 2/3. The second class has precision 1,
    # because its unknown label is ignored.
    expected = ((6 * 1 + 5 * 2 / 3) / 11 + 1) / 2
    assert metrics.mean_average_precision_11(labels, scores) == approx(expected)


def test_linear_evaluation_fits_one_classifier_per_class(tiny_voc, tmp_path, monkeypatch, fails):
    model = model_lib.build_model(Config(**SMALL), 3)
    path = tf.train.Checkpoint(model=model).write(f"{tmp_path}/ckpt-1")
    write_json(tmp_path / "flags.json", SMALL)
    monkeypatch.setattr(logistic_regression, "PATH_ITERATIONS", 30)
    command = [
        "linear",
        f"--checkpoint={path}",
        "--task=voc2007",
        "--dataset=tiny_voc",
        f"--data_dir={tiny_voc}",
        "--validation=train[50%:]",
    ]
    # With one example, no class has both positives and negatives.
    arguments = [*command, "--train=train[:1]", f"--out={tmp_path / 'one'}"]
    fails("there are too few labeled examples", cli.main, arguments)
    cli.main([*command, "--train=train[:50%]", f"--out={tmp_path / 'out'}"])
    results = read_json(tmp_path / "out" / "result.json")
    saved = np.load(tmp_path / "out" / "predictions.npz")
    assert results["metric"] == "mean_average_precision" and (saved["labels"] == -1).any()
    expected = metrics.mean_average_precision_11(saved["labels"], saved["logits"])
    assert results["test"] == expected > 0.7


@pytest.mark.parametrize(
    "flags",
    [
        "--train_mode=pretrain --train_steps=1",
        "--train_mode=supervised --train_steps=30 --micro_batch_size=8",
    ],
)
def test_multi_label_run_reports_the_mean_average_precision_of_its_predictions(
    tiny_voc, flags, tmp_path
):
    flags = f"""
    {flags} --mode=train_then_eval --dataset=tiny_voc --data_dir={tiny_voc} --eval_split=test
    --train_batch_size=16 --eval_batch_size=20 --nouse_blur --optimizer=momentum --learning_rate=0.5
    --warmup_epochs=0 --weight_decay=0 --batch_norm_decay=0.5 --save_predictions
    """
    runs.run(tmp_path / "run", ["eval_split"], **parse_settings(flags))
    results = read_json(tmp_path / "run" / "result.json")
    saved = np.load(tmp_path / "run" / f"predictions_{results['global_step']}.npz")
    assert saved["labels"].shape == saved["logits"].shape == (32, 3)
    mean_precision = results["eval/label_mean_average_precision"]
    assert mean_precision == approx(
        metrics.mean_average_precision_11(saved["labels"], saved["logits"])
    )
    if "supervised" in flags:
        assert mean_precision > 0.9  # The task is easy, so the precision must be high.


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--mode=train_then_eval --eval_protocol=knn --eval_split=test",
            "--eval_protocol=knn: .* one label per example, but tiny_voc has multiple",
        ),
        (
            "--train_mode=supervised --label_fraction=0.5",
            "--label_fraction=0.5: tiny_voc has multiple labels per example",
        ),
    ],
)
def test_single_label_settings_are_rejected_for_multi_label_data(
    flags, message, tiny_voc, tmp_path
):
    settings = parse_settings(f"{flags} --dataset=tiny_voc --data_dir={tiny_voc} --train_steps=1")
    with rejects(message):
        runs.run(tmp_path, ["eval_split"], **settings)
