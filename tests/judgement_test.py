"""What results are compared with: chance level, the untrained network, intervals, majority baselines, diagnostics."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from pytest import approx
from scipy import stats
from scipy.spatial import distance

import checks
import evaluate
import metrics
import model as model_lib
import simclr
from checkpoints.run_directory import Recorded
from config import Config, parse_settings
from probing import diagnostics
from sources import datasets, digits
from support.images import write_images
from support.runs import make_context, tiny_config

pytestmark = pytest.mark.usefixtures("tiny_resnet")
RESULTS = {
    metrics.LINEAR_TOP_1: 0.5,
    metrics.CONTRAST_LOSS: 8.0,
    metrics.CONTRAST_LOSS + metrics.CHANCE: 8.69,
    metrics.CONTRAST_ACCURACY: 0.3,
    metrics.CONTRAST_ACCURACY + metrics.CHANCE: 0.02,
    metrics.CONTRAST_ACCURACY + metrics.UNTRAINED: 0.1,
    metrics.CONTRAST_IMAGES: 39,
    metrics.CONTRAST_BATCH: 39,
    "eval/label_examples": 100,
    "eval/label_majority": 0.3,
}


def test_intervals_match_scipy():
    for hits, count in ((0, 5), (3, 3), (1, 7), (390, 1025), (4999, 10**4)):
        expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
        assert metrics.wilson_interval(hits / count, count) == approx([*expected], abs=1e-6)


@pytest.mark.parametrize("negatives", ["both", "cross_view"])
@pytest.mark.parametrize("loss", ["nt_xent", "nt_logistic", "margin_triplet"])
def test_chance_levels_are_the_values_of_a_collapsed_encoder(loss, negatives):
    config = Config(contrastive_loss=loss, negatives=negatives)
    z = tf.ones([10, 4])
    terms, scalars = simclr.over_batch(z, z, tf.zeros(5), config)
    levels = metrics.chance_levels(config, 5)
    assert float(scalars["contrast_acc"]) == approx(levels.pop("contrast_acc"))
    assert ("contrast_loss" in levels) == (loss == "nt_xent")
    for name, value in levels.items():
        assert float(terms[name]) == approx(value)
    assert metrics.chance_levels(Config(train_mode="supervised"), 5) == {}


def test_tables_show_what_each_result_must_be_compared_with():
    rows = dict(metrics.result_rows(RESULTS, "classifier", False))
    assert rows["classifier, top-1"] == "0.5000 [0.4038, 0.5962]"
    assert rows["contrastive loss"] == "8.0000 (chance level 8.6900)"
    assert rows["contrastive accuracy"] == "0.3000 (chance level 0.0200, untrained 0.1000)"
    assert rows["majority baseline"] == "0.3000 of 100 images"
    assert rows["contrastive values"] == "39 images, in batches of 39"
    marked = dict(metrics.result_rows(RESULTS, "classifier", True))
    assert "trained on" in marked["contrastive values"]
    several = {metrics.MEAN_PRECISION: 0.5}
    several |= metrics.describe_labels(np.ones([4, 2]), "eval/label")
    rows = metrics.result_rows(several, "linear head", False)
    assert rows == [("linear head, 11-point mAP", "0.5000"), ("evaluated", "4 images")]


def test_a_warning_says_that_nothing_was_learned(logged):
    for changes, reasons in (
        ({metrics.CONTRAST_LOSS: 8.69}, ["the contrastive loss 8.69 is not below chance level"]),
        ({metrics.CONTRAST_ACCURACY: 0.1}, ["the contrastive accuracy 0.100 is not above"]),
        ({metrics.LINEAR_TOP_1: 0.38}, ["the 95 % interval of the accuracy (linear head, top-1)"]),
        ({metrics.LINEAR_TOP_1: 0.4}, []),
    ):
        results = {**RESULTS, **changes}
        logged.clear()
        context = make_context(tiny_config())
        evaluate.log_results(context, "title", results, {})
        assert len(logged) == 1 + len(reasons) and all(reason in logged[1] for reason in reasons)
        # Results on training images do not show what was learned.
        evaluate.log_results(context.replace(trained_examples=1), "title", results, {})
        assert len(logged) == 2 + len(reasons)


@pytest.fixture(scope="module")
def initial_results():
    """Returns the contrastive results of a network with its initial weights, and its h and z of 40 images."""
    config = tiny_config(eval_split="test[:41]").replace(eval_batch_size=20)
    keras.utils.set_random_seed(config.seed + 1)
    evaluator = evaluate.Evaluator(make_context(config), model_lib.build_model(config, 10))
    return evaluator.contrastive(0), *evaluator._compare_views(evaluator._embed_views)[1:]


def test_the_untrained_network_has_the_initial_weights_of_the_run(initial_results):
    results, *_ = initial_results
    for name in (metrics.CONTRAST_LOSS, metrics.CONTRAST_ACCURACY):
        assert results[name + metrics.UNTRAINED] == results[name]
    assert results[metrics.CONTRAST_LOSS + metrics.CHANCE] == approx(2 * math.log(39))
    assert results[metrics.CONTRAST_IMAGES] == 40 and results[metrics.CONTRAST_BATCH] == 20


def test_one_image_has_no_chance_level_and_no_verdict():
    context = make_context(tiny_config(eval_split="test[:1]"))
    model = model_lib.build_model(context.config, 10)
    results = evaluate.Evaluator(context, model).contrastive(0)
    assert results[metrics.CONTRAST_LOSS] == approx(0, abs=1e-6)
    assert not any("chance" in name or "uniformity" in name for name in results)
    assert metrics.reasons_for_no_progress(results, "linear head") == []


def test_diagnostics_match_numpy_and_scipy(initial_results):
    results, h, z = initial_results
    assert h.shape == (2, 40, 128) and z.shape == (2, 40, 16)
    first, second = (view / np.linalg.norm(view, axis=1)[:, None] for view in np.float64(z))
    distances = [np.sum((u - v) ** 2) for u, v in zip(first, second)]
    assert results["eval/alignment"] == approx(np.mean(distances))
    potentials = np.exp(-2 * distance.pdist(first, "sqeuclidean"))
    assert results["eval/uniformity"] == approx(math.log(np.mean(potentials)))
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(np.float64(z[0]).T @ z[0]), 0))
    rank = math.exp(stats.entropy(values / values.sum()))
    assert results["eval/rank_z"] == approx(rank, rel=1e-3)
    assert "eval/rank_h" not in results  # It requires at least 256 images.
    assert diagnostics.effective_rank(np.eye(5)) == approx(5, rel=1e-4)
    assert diagnostics.effective_rank(np.ones([9, 5])) == approx(1, rel=1e-4)


# --------------------------------------------------------------------------------------------------- before training


class _Images(digits.IndexedSource):
    """A source with any number of images, without labels."""

    def __init__(self, count):
        super().__init__("images", {"train": (np.arange(count), np.full(count, -1))}, None, None)


def test_batch_size_and_length_are_derived_from_the_number_of_images():
    config = Config(mode="train_then_eval", train_batch_size=0, train_epochs=0)
    for count, replicas, splits, batch in (
        (100, 1, 0, 32),
        (20, 1, 0, 16),
        (999, 1, 0, 128),
        (1000, 1, 1, 128),
        (10_000, 1, 1, 512),
        (10_000, 3, 1, 513),
    ):
        source = _Images(count)
        completed, _ = checks.complete(config, checks.Inputs(source, [], Recorded(), 1, replicas))
        assert (completed.train_split, completed.eval_split) == datasets.HELD_OUT_SPLITS[splits]
        images = source.num_examples(completed.train_split)
        assert completed.train_batch_size == batch, count
        assert completed.train_epochs == max(100, math.ceil(64_000 / images))
        # A resumed run keeps the choice, also if there are more images.
        recorded = Recorded(settings=completed.settings(), has_checkpoints=True)
        resumed, _ = checks.complete(
            config, checks.Inputs(_Images(5 * count), [], recorded, 2, replicas)
        )
        assert resumed == completed


def test_only_labeled_images_count_if_training_needs_labels():
    examples = np.arange(90), np.repeat([0, 1, -1], 30)
    source = digits.IndexedSource("images", {"train": examples}, ["a", "b"], None)
    config = Config(train_mode="supervised", train_batch_size=0, train_epochs=0, label_fraction=0.5)
    config, _ = checks.complete(config, checks.Inputs(source, [], Recorded(), 1))
    assert config.train_epochs == math.ceil(64_000 / 30)


@pytest.mark.parametrize(
    "names, classes, lines",
    [
        (["cat/1.png", "dog/2.png"], ["cat", "dog"], []),
        (["cat/1.png", "cat/2.png"], None, ["no labels"]),
        (
            ["2023/05/1.png", "2024/1.png"],
            ["2023", "2024"],
            ["classes: 2023, 2024 (run.py --nolabels"],
        ),
        (["May/1.png", "june 3/2.png"], ["May", "june 3"], []),
        (["jan/1.png", "February/2.png"], ["February", "jan"], ["classes: February, jan ("]),
    ],
)
def test_folders_that_are_probably_not_classes_are_reported(
    names, classes, lines, tmp_path, logged
):
    write_images(tmp_path, *names)
    assert datasets.open_source(f"folder:{tmp_path}").class_names == classes
    assert all(map(str.startswith, logged, lines)) and len(logged) == len(lines)


def test_evaluations_with_derived_sizes_use_the_length_of_the_run():
    settings = parse_settings(
        "--train_steps=500 --train_batch_size=32 --train_epochs=100 --train_split=train[:80%]"
        " --eval_split=train[80%:]"
    )
    recorded = Recorded(settings=settings, last_step=500)
    config = Config(mode="eval", train_batch_size=0, train_epochs=0)
    config, _ = checks.adopt(config, ["train_batch_size", "train_epochs"], recorded)
    assert config.train_steps == 500
    # There are more images than at the start of the run.
    config, lines = checks.complete(config, checks.Inputs(_Images(2000), [], recorded, 1))
    assert (config.train_split, config.eval_split) == datasets.HELD_OUT_SPLITS[0]
    assert not any("train_batch_size" in line for line in lines)
