"""Evaluations during training (`--eval_epochs`), compared with runs without them and with separate evaluations."""

import numpy as np
import pytest

import evaluate
import metrics
import run as run_lib
from checkpoints import checkpoint_files, training_log, weight_files
from config import parse_settings
from runtime.errors import Stopped
from sources import digits
from support import read_json, runs
from support.errors import rejects
from support.images import write_folder
from support.processes import tensors
from support.runs import make_context, run, tiny_config

pytestmark = pytest.mark.usefixtures("stem_only_resnet")
# An epoch has two steps.
SETTINGS = dict(
    train_steps=5, checkpoint_steps=3, keep_checkpoint_max=9, linear_head_learning_rate=0.1
)


def read_results(directory):
    return {path.name: runs.read_results(path) for path in directory.glob("result*.json")}


@pytest.fixture(scope="module")
def runs_with_and_without(tmp_path_factory):
    """Returns the directories of two runs. They differ only in that the second evaluates during training."""
    directories = [tmp_path_factory.mktemp(name) for name in ("without", "with")]
    for directory, epochs in zip(directories, (0, 1)):
        run(directory, mode="train_then_eval", eval_epochs=epochs, **SETTINGS)
    return directories


def test_every_nth_epoch_is_evaluated_without_changing_the_weights_or_the_last_results(
    runs_with_and_without,
):
    without, directory = runs_with_and_without
    for step in (3, 5):
        np.testing.assert_equal(tensors(directory, step), tensors(without, step))
    results = read_results(directory)
    assert results["result.json"] == read_results(without)["result.json"]
    assert results.keys() == {"result.json", *(f"result_{step}.json" for step in (2, 4, 5))}
    assert checkpoint_files.list_steps(str(directory)) == [2, 3, 4, 5]
    rows = training_log.read_history(str(directory))
    history = {row["step"]: row for row in rows if {metrics.KNN, metrics.LINEAR_TOP_1} & {*row}}
    assert {step: row[metrics.LINEAR_TOP_1] for step, row in history.items()} == {
        step: results[f"result_{step}.json"][metrics.LINEAR_TOP_1] for step in (2, 4, 5)
    }
    events = runs.read_events(directory / "eval")
    assert {step for step, value in events if value.tag == metrics.KNN} == {2, 4}
    # The results are those of a separate evaluation.
    settings = dict(SETTINGS, eval_protocol="linear_head,knn", eval_epochs=1)
    run(directory, mode="eval", eval_name="separate", **settings)
    separate = read_results(directory / "separate")
    for name in ("result_2.json", "result_4.json"):
        assert {metrics.LINEAR_TOP_1, metrics.KNN} <= results[name].keys()
        assert results[name] == pytest.approx(separate[name], rel=1e-6)


def test_a_stopped_evaluation_is_repeated_when_the_run_resumes(
    runs_with_and_without, tmp_path, monkeypatch
):
    def stop(self, step, *_):
        raise Stopped("stopped by SIGTERM")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(evaluate.Evaluator, "evaluate_and_write", stop)
        run(tmp_path, mode="train_then_eval", eval_epochs=1, **SETTINGS)
    assert not read_results(tmp_path)
    run(tmp_path, mode="train_then_eval", eval_epochs=1, **SETTINGS)
    assert read_results(tmp_path) == read_results(runs_with_and_without[1])
    np.testing.assert_equal(tensors(tmp_path, 5), tensors(runs_with_and_without[0], 5))


def test_keep_best_keeps_the_checkpoint_with_the_best_evaluation(tmp_path, monkeypatch):
    accuracies = {2: 0.8, 4: 0.9, 5: 0.7}
    monkeypatch.setattr(
        evaluate.Evaluator, "frozen_encoder", lambda _, step: {metrics.KNN: accuracies[step]}
    )
    settings = dict(mode="train", eval_epochs=1, keep_best=True, lineareval_while_pretraining=False)
    run(tmp_path, **{**SETTINGS, **settings, "linear_head_learning_rate": None})
    assert checkpoint_files.list_steps(str(tmp_path / "best")) == [4]


def test_images_without_labels_are_evaluated_with_the_contrastive_loss(tmp_path):
    photos = dict(dataset=write_folder(tmp_path / "photos", 40), train_split="train")
    settings = dict(SETTINGS, train_steps=2, linear_head_learning_rate=None, **photos)
    run(tmp_path / "run", mode="train_then_eval", eval_epochs=1, **settings)
    results = read_results(tmp_path / "run")["result_1.json"]
    assert {"eval/contrast_loss", "eval/contrast_acc", "eval/contrast_entropy"} <= results.keys()
    assert not any("top_1" in name for name in results)


@pytest.fixture
def partly_labeled(monkeypatch):
    """Returns the digits without labels in the training split."""
    source = digits.digits_source()
    images, labels = source._splits["train"]
    source._splits["train"] = images, np.full_like(labels, -1)
    monkeypatch.setattr(run_lib.datasets, "open_source", lambda *_, **__: source)
    return source


def test_runs_on_unlabeled_training_examples_are_evaluated_with_the_contrastive_loss(
    partly_labeled, tmp_path, capsys
):
    config = tiny_config(eval_split="test", mode="train", eval_epochs=1)
    for source, protocols in ((None, ("linear_head", "knn")), (partly_labeled, ("contrastive",))):
        context = make_context(config, source or digits.digits_source())
        assert evaluate.during_training(context).config.eval_protocols == protocols
    config = config.replace(train_mode="supervised", label_fraction=0.5)
    context = make_context(config, digits.digits_source())
    assert evaluate.during_training(context).config.label_fraction == 0.5
    # An evaluation uses the loss and the augmentation of the run.
    run(
        tmp_path,
        mode="train_then_eval",
        temperature=0.5,
        color_jitter_strength=0.2,
        **{**SETTINGS, "train_steps": 1, "linear_head_learning_rate": None},
    )
    assert (
        "linear head: off (no labels were found in train[:64] of digits)\n"
        in capsys.readouterr().out
    )
    results = read_results(tmp_path)["result.json"]
    assert (
        "eval/contrast_loss" in results and not {metrics.LINEAR_TOP_1, metrics.KNN} & results.keys()
    )
    run(tmp_path, mode="eval", eval_name="again")
    assert read_results(tmp_path / "again")["result.json"] == pytest.approx(results)


@pytest.mark.parametrize(
    "flags, flag, remedy",
    [
        ("--mode=train_then_eval --eval_protocol=knn --eval_split=test", "train", ""),
        ("--train_mode=supervised --eval_split=test", "train", ""),
        (
            "--mode=train_then_eval --train_split=test --eval_split=train[:64]",
            "eval",
            ", or --eval_protocol=contrastive",
        ),
        (
            "--train_mode=supervised --train_split=test --eval_split=train[:64] --eval_epochs=1",
            "eval",
            ", or --mode=train without --eval_epochs",
        ),
    ],
)
def test_splits_without_the_required_labels_are_rejected_before_training(
    partly_labeled, tmp_path, flags, flag, remedy
):
    problem = r"train\[:64\]: no labels were found in this split of digits"
    with rejects(f"^--{flag}_split={problem}. Use a split with labels{remedy}.$"):
        run(tmp_path / "run", ("eval_split",), **parse_settings(flags))
    assert not (tmp_path / "run").exists()


def test_labels_of_one_class_are_rejected_before_training(partly_labeled, tmp_path):
    partly_labeled._splits["train"][1][:] = 3
    with rejects("--train_split=.*: all images with a label are of the class 3, so"):
        run(tmp_path / "run", ("eval_split",), mode="train", eval_split="test", eval_epochs=1)


def test_evaluation_during_training_works_on_two_replicas(two_replicas, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lib, "connect", lambda config: two_replicas)
    run(tmp_path, mode="train", eval_epochs=2, **SETTINGS)
    # The last step is evaluated, too.
    assert read_results(tmp_path).keys() == {"result.json", "result_4.json", "result_5.json"}
    result = read_json(tmp_path / "result_5.json")
    weights = weight_files.open_weights(str(tmp_path / "ckpt-5")).digest()
    assert result["computed_from"]["weights"] == weights
