"""Results are tied to the weights, the data and the settings from which they were computed."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

import checks
import evaluate
import train
from checkpoints import checkpoint_files, computed_from, run_directory, weight_files
from config import parse_settings
from runtime.errors import UserError
from sources import datasets
from sources.tfds_source import TfdsSource
from support import processes, read_json, runs
from support.errors import rejects
from support.images import write_folder
from support.tfds_data import write_tfds

pytestmark = pytest.mark.usefixtures("stem_only_resnet")


def run(directory, **settings):
    settings = {"train_steps": 2, "eval_split": "test[:90]", **settings}
    runs.run(directory, ["eval_split", "train_split"], **settings)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Returns a directory with two runs, `a` and `b`, with different seeds. Both keep their best weights."""
    directory = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 1), ("b", 2)):
        run(directory / name, mode="train_then_eval", keep_best=True, seed=seed)
    return directory


def test_evaluating_other_weights_changes_no_file_of_a_run(originals, tmp_path, logged):
    a, b = (shutil.copytree(originals / name, tmp_path / name) for name in "ab")
    before = runs.lasting_files(a)
    run(a, mode="eval", checkpoint=str(b), keep_best=True, save_predictions=True)
    (other,) = a.glob("other_*")
    weights = weight_files.open_weights(str(b)).digest()
    assert other.name == f"other_{weights[:8]}"
    assert any(line.startswith(f"results: {other} (") for line in logged)
    after = {
        name: text for name, text in runs.lasting_files(a).items() if name.parts[0] != other.name
    }
    assert after == before
    assert read_json(other / "result_2.json")["computed_from"]["weights"] == weights
    # The weights of the run itself are evaluated in its directory.
    run(a, mode="eval", checkpoint=str(a / "ckpt-2"), keep_best=True, eval_steps=1)
    assert read_json(a / "result_2.json")["computed_from"]["examples"] == 90
    best = {
        path: content for path, content in runs.lasting_files(a).items() if path.parts[0] == "best"
    }
    assert best.items() <= before.items()


@pytest.fixture(scope="module")
def longer_run(originals, tmp_path_factory):
    """Returns a copy of `originals / "a"`, which was trained for one more step."""
    directory = shutil.copytree(originals / "a", tmp_path_factory.mktemp("longer") / "run")
    run(directory, mode="train", train_steps=3, seed=1)
    return directory


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--eval_protocol=knn", "eval_protocol"),
        ("--eval_split=test", "eval_split, examples"),
        ("--noeval_center_crop", "eval_center_crop"),
    ],
)
def test_best_weights_are_compared_only_by_the_same_metric_and_settings(
    flags, name, longer_run, tmp_path, logged
):
    settings = dict(mode="eval", keep_best=True, train_steps=3, **parse_settings(flags))
    a = shutil.copytree(longer_run, tmp_path / "run")
    before = processes.tensors(a / "best", 2)
    run(a, **settings)
    line = next(line for line in logged if line.startswith("--keep_best: the weights are not kept"))
    assert "Use another --eval_name" in line and f"({name})" in line
    np.testing.assert_equal(processes.tensors(a / "best", 2), before)
    run(a, eval_name="new", **settings)
    assert checkpoint_files.list_steps(str(a / "new" / "best"))


def test_the_label_subset_matters_only_for_metrics_that_use_it():
    record = dict(weights="a", step=1, eval_split="test", label_fraction=1.0, eval_protocol="knn")
    other = dict(record, weights="b", step=2, label_fraction=0.1, eval_protocol="linear_head")
    results = [{computed_from.KEY: content} for content in (record, other)]
    assert computed_from.differences(*results, with_labels=False) == []
    assert computed_from.differences(*results, with_labels=True) == ["label_fraction"]
    assert computed_from.differences({}, results[0], with_labels=False) == ["eval_split"]


@pytest.mark.parametrize(
    "flags, count",
    [
        ("--eval_split=train[:100]", 64),
        ("--eval_split=train[60:100]", 4),
        ("--eval_split=test[:50]", 0),
        # The training split of an evaluation matters only if it is used.
        ("--eval_split=test[:50] --train_split=test", 0),
        ("--eval_split=test[:50] --train_split=test --eval_protocol=knn", 50),
    ],
)
def test_images_that_were_used_for_training_are_reported_and_recorded(
    flags, count, originals, tmp_path, logged
):
    settings = parse_settings(flags)
    run(tmp_path / "evaluation", mode="eval", checkpoint=str(originals / "a"), **settings)
    lines = [line for line in logged if "are also in the training split" in line]
    assert len(lines) == (count > 0) and all(f"warning: {count} of the " in line for line in lines)
    result = read_json(tmp_path / "evaluation" / "result_2.json")
    assert result["computed_from"]["trained_examples"] == count


def test_overlaps_match_the_keys_of_the_examples(tmp_path):
    write_tfds("cifar10", tmp_path / "tfds", train=50, test=10)
    for source in (
        TfdsSource("cifar10", str(tmp_path / "tfds"), True, None, None),
        datasets.open_source(write_folder(tmp_path / "images", 40)),
        datasets.open_source("digits"),
    ):
        for split, other in (
            ("train", "train"),
            ("train[:20]", "train[10:]"),
            ("train[:50%]", "train[50%:]"),
            ("train[:10]+train[20:30]", "train[5:25]"),
        ):
            keys = [
                {int(key) for key, *_ in source.references(name).map(source.reader(name))}
                for name in (split, other)
            ]
            assert source.overlap(split, other) == len(keys[0] & keys[1])


def test_weights_of_other_data_do_not_overlap(tmp_path):
    source = datasets.open_source("digits")
    digest = run_directory.description_digest(source.describe_data())
    assert checks.weights_split(source, digest, "train") == ["train"]
    assert checks.weights_split(source, "0" * 16, "train") == []
    assert checks.weights_split(source, digest, None) == []


# ------------------------------------------------------------------------------------------------------ initial weights


def test_fine_tuning_that_was_stopped_before_its_first_checkpoint_starts_from_the_same_weights(
    tmp_path, logged
):
    settings = dict(train_mode="finetune", checkpoint=str(tmp_path / "a"), optimizer="momentum")
    run(tmp_path / "a", mode="train", keep_checkpoint_max=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "make_run_steps", lambda step: 1 / 0)
        run(tmp_path / "b", **settings)
    run(tmp_path / "c", **settings)
    copies = {path: path.read_bytes() for path in (tmp_path / "a").glob("ckpt-2.*")}
    run(tmp_path / "a", mode="train", train_steps=4, keep_checkpoint_max=1)
    assert checkpoint_files.list_steps(str(tmp_path / "a")) == [4]
    with rejects("--checkpoint=.* have changed or were deleted"):
        run(tmp_path / "b", **settings)
    for path, content in copies.items():
        path.write_bytes(content)
    run(tmp_path / "b", **settings)
    np.testing.assert_equal(*(processes.tensors(tmp_path / name, 2) for name in "bc"))
    assert any(line.startswith("loaded ") and "a/ckpt-2 " in line for line in logged)
    # The record survives, and a run with a checkpoint does not need the weights.
    for path in copies:
        path.unlink()
    run(tmp_path / "b", **settings, train_steps=3)
    flags = read_json(tmp_path / "b" / "flags.json")
    assert flags["initial_weights"]["path"] == str(tmp_path / "a" / "ckpt-2")


# ------------------------------------------------------------------------------------------------------ flipped bits


def test_flipped_bits_in_recorded_files_are_detected_or_have_no_effect(tmp_path):
    source = datasets.open_source("digits")
    context = runs.make_context(runs.tiny_config(), source)
    run_directory.write_start(context.config, context.source, str(tmp_path), 3)
    expected = run_directory.read_run(str(tmp_path))
    for name in ("classes.json", "data.json", "flags.json"):
        content, detected = (tmp_path / name).read_bytes(), 0
        positions = range(0, 8 * len(content), 29 if name == "flags.json" else 5)
        for position in positions:
            flipped = bytearray(content)
            flipped[position // 8] ^= 1 << position % 8
            (tmp_path / name).write_bytes(flipped)
            try:
                assert run_directory.read_run(str(tmp_path)) == expected
            except UserError:
                detected += 1
        assert detected > 0.5 * len(positions)
        (tmp_path / name).write_bytes(content)


def test_class_names_that_occur_twice_are_rejected(tmp_path):
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b", "a"]))
    with rejects("classes.json: a class name occurs twice"):
        weight_files.read_classes(str(tmp_path))


# ------------------------------------------------------------------------------------------------------ order


def test_the_newest_checkpoint_is_evaluated_first_and_then_each_new_one(tmp_path, monkeypatch):
    trackable = tf.train.Checkpoint(value=tf.Variable(1.0))
    for step in (2, 10, 4):
        checkpoint_files.save(trackable, str(tmp_path), step)

    def steps(last_step, all_steps):
        paths = evaluate.new_checkpoints(str(tmp_path), last_step, 0.2, all_steps)
        for path in paths:
            yield checkpoint_files.step_from_prefix(path)
            if not checkpoint_files.list_steps(str(tmp_path))[-1] > 10:
                for step in (11, 12):
                    checkpoint_files.save(trackable, str(tmp_path), step)

    assert list(steps(12, all_steps=False)) == [10, 4, 2, 11, 12]
    assert list(steps(12, all_steps=True)) == [2, 4, 10, 11, 12]
