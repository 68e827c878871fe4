"""Tests for matching the classes of a data set to the columns of a linear head by name."""

import shutil

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

import metrics
import model as model_lib
from checkpoints import restoring
from probing.confusion import draw  # conftest.py replaces the attribute.
from sources import classes
from support import read_json, runs
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("tiny_resnet")

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0), "yellow": (255, 255, 0)}


@pytest.mark.parametrize(
    "names, head_names, columns",
    [
        (["a", "b"], ["a", "b"], [0, 1]),
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


def test_multi_label_vectors_are_mapped_to_columns():
    labels, _ = metrics.map_labels(np.array([[1, 0, -1]]), np.zeros([1, 4]), [3, -1, 0])
    assert_array_equal(labels, [[-1, -1, -1, 1]])


def write_folder(root, names):
    """Writes eight images per class, in random shades of the color of the class. Returns the value for `--dataset`."""
    for name in names:
        random = np.random.default_rng(len(name))
        (root / name).mkdir(parents=True)
        for index in range(8):
            image = np.array(COLORS[name.strip("z")]) * random.uniform(0.5, 1, [8, 8, 1])
            (root / name / f"{index}.png").write_bytes(
                tf.io.encode_png(image.astype(np.uint8)).numpy()
            )
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
def trained(tiny_resnet, tmp_path_factory):
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
    "names, columns", [(["green", "red"], [1, 2]), (["blue", "green", "red", "yellow"], [0, 1, 2])]
)
@pytest.mark.parametrize("continuous", [False, True])
def test_evaluation_on_fewer_or_more_classes_matches_them_by_name(
    names, columns, continuous, trained, tmp_path
):
    root, labels, logits = trained
    shutil.copytree(root / "run", tmp_path / "run")
    settings = dict(eval_timeout=0.1) if continuous else dict(checkpoint=str(root / "run"))
    printed = run(
        tmp_path / "run" if continuous else tmp_path / "eval",
        write_folder(tmp_path / "data", names),
        mode="eval",
        **settings,
    )
    assert "are matched by name with the 3 classes of the linear head" in printed
    assert ("examples of other classes (yellow) are ignored" in printed) == ("yellow" in names)
    result = read_json(tmp_path / ("run" if continuous else "eval") / "result.json")
    evaluated = np.isin(labels, columns)
    assert (
        result["eval/label_top_1_accuracy"]
        == (logits[evaluated].argmax(1) == labels[evaluated]).mean()
    )


def test_a_split_without_the_classes_of_the_linear_head_is_rejected(trained, tmp_path):
    for split, names in (("train", ["yellow"]), ("test", ["blue", "green", "red"])):
        write_folder(tmp_path / split, names)
    with rejects("--eval_split=train: .* has no labels of the network's classes"):
        settings = dict(mode="eval", checkpoint=str(trained[0] / "run"))
        run(tmp_path / "run", f"folder:{tmp_path}", **settings)


@pytest.mark.parametrize("protocol, num_images", [("linear_head", 23), ("knn,linear_head", None)])
def test_all_images_of_another_data_set_are_evaluated_unless_some_are_used_for_training(
    protocol, num_images, trained, tmp_path
):
    dataset = write_folder(tmp_path / "data", ["red", "green", "blue"])
    (
        tmp_path / "data" / "red" / "0.png"
    ).unlink()  # Otherwise, this would be the data set of the run.
    settings = dict(
        mode="eval",
        checkpoint=str(trained[0] / "run"),
        eval_protocol=protocol,
        dataset=dataset,
        save_predictions=True,
    )
    printed = runs.run(tmp_path / "eval", **settings)
    held_out = "train_split: train[:80%], eval_split: train[80%:]" in printed
    assert held_out == ("eval_split: train (all images of" not in printed) == (num_images is None)
    step = read_json(tmp_path / "eval" / "result.json")["global_step"]
    with np.load(tmp_path / "eval" / f"predictions_{step}.npz") as arrays:
        labels, predicted = arrays["labels"], arrays["logits"].argmax(1)
        names, paths = arrays["class_names"], arrays["paths"]
    assert len(labels) == len(set(paths)) and len(labels) == (num_images or len(labels)) < 24
    assert [path.split("/")[0] for path in paths] == [names[label] for label in labels]
    table = pd.read_csv(tmp_path / "eval" / f"confusion_{step}.csv", index_col=0)
    expected = np.zeros([3, 3])
    np.add.at(expected, (labels, predicted), 1)
    assert_array_equal(table[list(names)], expected)
    for name, label in zip(names, range(3)):
        if label in labels:
            accuracy = (predicted == label)[labels == label].mean()
            assert table.accuracy[name] == accuracy and f"{name} {accuracy:.3f}" in printed


def test_the_data_set_of_the_run_is_not_another_data_set(trained, tmp_path):
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    settings = dict(mode="eval", dataset=f"folder:{trained[0] / 'data'}", eval_timeout=0.1)
    assert "eval_split: train[80%:]" in runs.run(tmp_path / "run", **settings)


def test_unlabeled_images_of_another_data_set_are_not_those_of_the_training(trained, tmp_path):
    write_folder(tmp_path, ["green"])
    settings = dict(mode="eval", checkpoint=str(trained[0] / "run"), eval_protocol="contrastive")
    settings["train_split"] = "train"
    printed = runs.run(tmp_path / "eval", dataset=f"folder:{tmp_path / 'green'}", **settings)
    assert "8 images for evaluation (train)" in printed and "also in the training" not in printed


def test_examples_without_a_column_are_removed_from_the_predictions(trained, tmp_path):
    write_folder(tmp_path / "data" / "test", ["green", "red", "blue", "yellow"])
    settings = dict(mode="eval", checkpoint=str(trained[0] / "run"), save_predictions=True)
    settings.update(train_mode="supervised", eval_split="test")
    runs.run(tmp_path / "eval", dataset=f"folder:{tmp_path / 'data'}", **settings)
    with np.load(tmp_path / "eval" / "predictions_1.npz") as arrays:
        folders = [path.split("/")[1] for path in arrays["paths"]]
        assert folders == [arrays["class_names"][label] for label in arrays["labels"]]
        assert len(folders) == 24 and "yellow" not in folders


def test_the_picture_of_a_confusion_matrix_shows_the_counts():
    pictures = [
        tf.io.decode_png(draw(pd.DataFrame(counts, ["cat", "dog"], ["cat", "dog"]))).numpy()
        for counts in ([[9, 1], [0, 7]], [[9, 2], [0, 7]], [[1, 9], [7, 0]])
    ]
    assert all(picture.shape == (500, 500, 4) for picture in pictures)
    changed = [(picture != pictures[0]).any(-1).mean() for picture in pictures]
    assert changed[0] == 0 < changed[1] < changed[2]


def test_evaluation_is_rejected_if_data_and_head_both_have_unmatched_classes(trained, tmp_path):
    dataset = write_folder(tmp_path / "data", ["green", "red", "yellow"])
    settings = dict(mode="eval", checkpoint=str(trained[0] / "run"))
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
    [
        (["green", "red"], [1, 2]),
        (["green", "red", "yellow"], None),
        (["blue", "green", "red", "yellow"], [0, 1, 2, None]),
    ],
)
def test_warm_start_matches_linear_head_columns_by_name_or_skips_the_head(
    names, head_columns, trained
):
    config = runs.tiny_config(lineareval_while_pretraining=True)
    old_model, model = (model_lib.build_model(config, size) for size in (3, len(names)))
    restoring.load_model(old_model, str(trained[0] / "run"))
    initial_values = [variable.numpy() for variable in model.supervised_head.variables]
    loaded = restoring.warm_start(model, str(trained[0] / "run"), class_names=names)
    if head_columns is None:
        assert "different classes: only in the data set: yellow" in loaded.not_loaded["linear head"]
        head_columns = [None] * len(names)
    else:
        num_mapped = len(head_columns) - head_columns.count(None)
        assert f"linear head: {num_mapped} of {len(names)} classes were loaded" in "".join(
            loaded.lines
        )
    for variable, old, initial in zip(
        model.supervised_head.variables, old_model.supervised_head.variables, initial_values
    ):
        for column, head_column in enumerate(head_columns):
            expected = (
                initial[..., column] if head_column is None else old.numpy()[..., head_column]
            )
            assert_array_equal(variable.numpy()[..., column], expected)
