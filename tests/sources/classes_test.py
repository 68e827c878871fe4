"""Tests for matching the classes of a data set to the columns of a linear head by name."""

import shutil

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

import checks
import metrics
import model as model_lib
from checkpoints import inspection, loading
from probing.confusion import draw  # conftest.py replaces the attribute.
from sources import classes, datasets
from support import read_json, runs
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("stem_only_resnet")

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0), "yellow": (255, 255, 0)}


@pytest.mark.parametrize(
    "names, head_names, columns",
    [
        (["b", "a"], ["a", "b"], [1, 0]),
        (["c"], ["a", "b", "c"], [2]),
        (["a", "b", "c"], ["c", "a"], [1, -1, 0]),
        (["a", "b"], ["b", "c"], None),
        (["a"], ["b"], None),
    ],
)
def test_match_columns_maps_class_names_to_head_columns(names, head_names, columns):
    assert classes.match_columns(names, head_names) == columns


def test_description_of_differences_lists_the_unmatched_names_on_both_sides():
    text = classes.differences(["a", "b"], ["b", "c", "d", "e", "f"], "the data set", "the run")
    assert text == "only in the data set: a; only in the run: c, d, e and 1 more"


def test_labels_are_mapped_to_columns_and_unmatched_examples_are_removed():
    logits = np.arange(8.0).reshape(4, 2)
    labels, kept = metrics.map_labels(np.array([0, 1, 2, 1]), logits, [1, -1, 0])
    assert_array_equal(labels, [1, 0])
    assert_array_equal(kept, logits[[0, 2]])
    labels, _ = metrics.map_labels(np.array([[1, 0, -1]]), np.zeros([1, 4]), [3, -1, 0])
    assert_array_equal(labels, [[-1, -1, -1, 1]])


def write_folder(root, names):
    """Writes eight images per class, in random shades of the color of the class. Returns the value for `--dataset`."""
    for name in names:
        random = np.random.default_rng(len(name))
        for index in range(8):
            image = np.array(COLORS[name]) * random.uniform(0.5, 1, [8, 8, 1])
            tf.io.write_file(f"{root}/{name}/{index}.png", tf.io.encode_png(np.uint8(image)))
    return f"folder:{root}"


def run(model_dir, dataset, **settings):
    return runs.run(
        model_dir,
        dataset=dataset,
        train_split="train",
        eval_split="train",
        given=["dataset", "eval_split"],
        train_batch_size=8,
        train_steps=1,
        **settings,
    )


@pytest.fixture(scope="module")
def trained(stem_only_resnet, tmp_path_factory):
    """Trains on the classes blue, green and red. Returns the parent directory, the labels, and the logits."""
    root = tmp_path_factory.mktemp("colors")
    run(
        root / "run",
        write_folder(root / "data", ["blue", "green", "red"]),
        mode="train_then_eval",
        save_predictions=True,
    )
    with np.load(root / "run" / "predictions_1.npz") as arrays:
        return root, arrays["labels"], arrays["logits"]


@pytest.mark.parametrize(
    "names, columns, directory", [(["green", "red"], [1, 2], "run"), (COLORS, [0, 1, 2], "eval")]
)
def test_evaluation_on_fewer_or_more_classes_matches_them_by_name(
    names, columns, directory, trained, tmp_path
):
    root, labels, logits = trained
    settings = dict(checkpoint=f"{root}/run")
    if directory == "run":  # continuous evaluation
        shutil.copytree(root / "run", tmp_path / "run")
        settings = dict(eval_timeout=0.1)
    dataset = write_folder(tmp_path / "data", names)
    printed = run(tmp_path / directory, dataset, mode="eval", **settings)
    assert "are matched by name with the 3 classes of the linear head" in printed
    assert ("examples of other classes (yellow) are ignored" in printed) == ("yellow" in names)
    result = read_json(tmp_path / directory / "result.json")
    evaluated = np.isin(labels, columns)
    accuracy = (logits[evaluated].argmax(1) == labels[evaluated]).mean()
    assert result[metrics.LINEAR_TOP_1] == accuracy


def test_a_split_without_the_classes_of_the_linear_head_is_rejected(trained, tmp_path):
    for split, names in (("train", ["yellow"]), ("test", ["blue", "green", "red"])):
        write_folder(tmp_path / split, names)
    with rejects("--eval_split=train: .* has no labels of the network's classes"):
        settings = dict(mode="eval", checkpoint=f"{trained[0]}/run")
        run(tmp_path / "run", f"folder:{tmp_path}", **settings)


@pytest.mark.parametrize("protocol, holds_out", [("linear_head", False), ("knn,linear_head", True)])
def test_all_images_of_another_data_set_are_evaluated_unless_some_are_used_for_training(
    protocol, holds_out, trained, tmp_path
):
    dataset = write_folder(tmp_path / "data", COLORS)
    settings = dict(checkpoint=f"{trained[0]}/run", eval_protocol=protocol)
    printed = runs.run(
        tmp_path / "eval", mode="eval", dataset=dataset, save_predictions=True, **settings
    )
    assert ("train_split: train[:80%], eval_split: train[80%:]" in printed) == holds_out
    assert ("eval_split: train (all images of" not in printed) == holds_out
    with np.load(tmp_path / "eval" / "predictions_1.npz") as arrays:
        labels, predicted = arrays["labels"], arrays["logits"].argmax(1)
        names, paths = arrays["class_names"], arrays["paths"]
    # The network does not know the class yellow, so the predictions do not contain its images.
    assert len(labels) == len(set(paths)) and 0 < len(labels) <= 24
    assert (len(labels) < 24) == holds_out
    assert [path.split("/")[0] for path in paths] == [names[label] for label in labels]
    table = pd.read_csv(tmp_path / "eval" / "confusion_1.csv", index_col=0)
    expected = np.zeros([3, 3])
    np.add.at(expected, (labels, predicted), 1)
    assert_array_equal(table[list(names)], expected)
    for label in set(labels):
        accuracy, name = (predicted == label)[labels == label].mean(), names[label]
        assert table.accuracy[name] == accuracy and f"{name} {accuracy:.3f}" in printed


def evaluation_context(**settings):
    """Returns the context of an evaluation, with completed settings, as in `run.main`."""
    config = runs.tiny_config(mode="eval", **settings)
    recorded = inspection.read_recorded(config)
    config, _ = checks.adopt(config, ["dataset"], recorded)
    source = datasets.open_configured(config)
    config, _ = checks.complete(config, checks.Inputs(source, ["dataset"], recorded, 1))
    return runs.make_context(config, source).replace(recorded=recorded)


def test_the_data_set_of_the_run_is_not_another_data_set(trained):
    root, *_ = trained
    context = evaluation_context(model_dir=f"{root}/run", dataset=f"folder:{root}/data")
    assert context.config.eval_split == "train[80%:]"


def test_unlabeled_images_of_another_data_set_are_not_those_of_the_training(trained, tmp_path):
    write_folder(tmp_path, ["green"])
    settings = dict(checkpoint=f"{trained[0]}/run", eval_protocol="contrastive")
    context = evaluation_context(
        dataset=f"folder:{tmp_path}/green", train_split="train", **settings
    )
    assert context.config.eval_split == "train" and context.source.num_examples("train") == 8
    assert not checks.count_trained_examples(context)


def test_the_picture_of_a_confusion_matrix_shows_the_counts():
    pictures = [
        tf.io.decode_png(draw(pd.DataFrame(counts, ["cat", "dog"], ["cat", "dog"]))).numpy()
        for counts in ([[9, 1], [0, 7]], [[9, 2], [0, 7]], [[1, 9], [7, 0]])
    ]
    assert all(picture.shape == (500, 500, 4) for picture in pictures)
    few, many = ((picture != pictures[0]).any(-1).mean() for picture in pictures[1:])
    assert 0 < few < many


def test_evaluation_is_rejected_if_data_and_head_both_have_unmatched_classes(trained, tmp_path):
    dataset = write_folder(tmp_path / "data", ["green", "red", "yellow"])
    settings = dict(mode="eval", checkpoint=f"{trained[0]}/run")
    with rejects(
        "trained on different classes .only in the data set: yellow; only in the checkpoint: blue"
        ".*--eval_protocol=lbfgs or knn"
    ):
        run(tmp_path / "eval", dataset, **settings)
    assert not (tmp_path / "eval").exists()
    run(tmp_path / "eval", dataset, **settings, eval_protocol="knn,lbfgs")
    results = read_json(tmp_path / "eval" / "result.json")
    assert metrics.KNN in results and metrics.LBFGS in results
    assert metrics.LINEAR_TOP_1 not in results


@pytest.mark.parametrize(
    "names, head_columns",
    [(["green", "red"], {0: 1, 1: 2}), (["red", "yellow"], {}), ([*COLORS], {0: 0, 1: 1, 2: 2})],
)
def test_warm_start_matches_linear_head_columns_by_name_or_skips_the_head(
    names, head_columns, trained
):
    """`head_columns` maps columns of the new head to columns of the trained one."""
    config = runs.tiny_config(lineareval_while_pretraining=True)
    old_model, model = (model_lib.build_model(config, size) for size in (3, len(names)))
    loading.load_model(old_model, f"{trained[0]}/run")
    expected, old = (each.supervised_head.get_weights() for each in (model, old_model))
    loaded = loading.warm_start(model, f"{trained[0]}/run", class_names=names)
    if head_columns:
        line = f"linear head: {len(head_columns)} of {len(names)} classes were loaded"
        assert line in "".join(loaded.lines)
    else:
        assert "different classes: only in the data set: yellow" in loaded.not_loaded["linear head"]
    for values, old_values, actual in zip(expected, old, model.supervised_head.get_weights()):
        values[..., [*head_columns]] = old_values[..., [*head_columns.values()]]
        assert_array_equal(actual, values)
