"""End-to-end runs: training, resuming, evaluation, export, and errors for invalid input."""

import contextlib
import dataclasses
import inspect
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from pytest import approx
from sklearn.neighbors import KNeighborsClassifier
from tensorflow.python.framework import config as tf_config

import checks
import data
import data_util
import evaluate
import metrics
import model as model_lib
import objective
import run as run_lib
import simclr
import train
from checkpoints import checkpoint_files, inspection, loading, training_log, weight_files
from checkpoints.lock import Lock
from config import Config, parse_settings, settings_with
from probing import features
from runtime import devices, rng, storage
from runtime.errors import UserError
from sources import datasets, digits
from support import read_json, runs, write_json
from support.errors import rejects
from support.images import write_folder
from support.processes import tensors as weights
from support.runs import TINY, make_context, run, tiny_config

pytestmark = pytest.mark.usefixtures("tiny_resnet")
IMAGES = np.random.default_rng(0).uniform(size=[2, 8, 8, 3]).astype(np.float32)


@pytest.fixture(scope="module")
def complete_run_and_log(tmp_path_factory):
    """Returns the directory and the log of a four-step run with all evaluations and an export."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_log, "_SECONDS_BETWEEN_ROWS", np.inf)
        flags = """
        --mode=train_then_eval --train_steps=4 --checkpoint_steps=3 --keep_checkpoint_max=9
        --linear_head_learning_rate=0.1 --eval_protocol=linear_head,lbfgs,knn --eval_baselines
        --eval_projections
        """
        log = run(directory, with_export=True, **parse_settings(flags))
    return directory, log


@pytest.fixture(scope="module")
def complete_run(complete_run_and_log):
    return complete_run_and_log[0]


@pytest.fixture
def copied_run(complete_run, tmp_path):
    return shutil.copytree(complete_run, tmp_path / "run")


def model_weights(path):
    """Returns a dict that maps the keys of a model's variables to their values."""
    file = weight_files.open_weights(str(path))
    return {key: file.reader()(key) for key in file.tensors}


# ------------------------------------------------------------------------------------------------------- one run


def test_a_run_writes_all_documented_files(complete_run):
    names = {*os.listdir(complete_run)}
    assert {
        "ckpt-3.index",
        "ckpt-4.index",
        "checkpoint",
        "flags.json",
        "result.json",
        "result_4.json",
        "views.png",
        "train",
        "eval",
        "saved_model",
    } <= names
    assert (complete_run / "saved_model" / "4" / "saved_model.pb").exists()
    flags = read_json(complete_run / "flags.json")
    assert flags["seed"] == 7 and flags["eval_split"] == "test" and flags["last_step"] == 4
    names = Config.__dataclass_fields__
    assert set(flags) == {*names, "last_step", "initial_weights", "checksum"}
    result = read_json(complete_run / "result.json")
    assert {name: float(value) for name, value in result.items()}["global_step"] == 4
    kernel = model_weights(complete_run)["model/supervised_head/linear_layer/dense/kernel"]
    assert result["eval/regularization_loss"] == approx(
        Config().weight_decay * np.sum(kernel**2) / 2, rel=1e-5
    )


def test_a_run_writes_the_same_tensorboard_scalars_as_the_original(complete_run):
    steps, values = zip(*runs.read_events(complete_run / "train"))
    losses = ("contrast_loss", "supervised_loss", "weight_decay", "total_loss")
    scalars = (*losses, "contrast_acc", "contrast_entropy", "supervised_acc")
    expected = {"learning_rate", "views", *(f"train/{name}" for name in scalars)}
    assert expected <= {value.tag for value in values} and max(steps) == 4


def test_history_contains_the_epoch_and_the_mean_learning_rate(complete_run):
    history = training_log.read_history(str(complete_run))
    rows = [row for row in history if "learning_rate" in row]
    schedule = model_lib.build_schedule(tiny_config(train_steps=4), 64)
    # Rows are written at the checkpoints. A batch is half of the training images.
    assert [(row["step"], row["epoch"]) for row in rows] == [(3, 1.5), (4, 2)]
    for row, steps in zip(rows, ([0, 1, 2], [3])):
        expected = np.mean([schedule(step) for step in steps])
        assert row["learning_rate"] == approx(expected, rel=1e-4)


def test_the_preview_shows_each_image_above_its_two_views(complete_run):
    preview = tf.io.decode_png((complete_run / "views.png").read_bytes()).numpy()
    assert preview.shape == (300, 800, 3)
    # Each cell is an image of 8 x 8 pixels, enlarged by a factor of 12, with a border of 2 pixels.
    cells = preview.reshape(3, 100, 8, 100, 3)[:, 2:98:12, :, 2:98:12]
    seed = rng.scalar_seed(tf.constant([TINY["seed"], data._EVAL_VIEWS], tf.int64))
    policy = data_util.Policy(
        operators=(data_util.Operator("flip", data_util.flip_horizontally, 0.5),)
    )
    for column, (key, image, _) in enumerate(digits.digits_source().records("train[:8]")):
        assert_allclose(cells[0, :, column], image, atol=1)
        for view in range(2):
            view_seed = rng.nth_seed(tf.stack([seed, key]), view, rng.VIEW)
            expected = 255 * data_util.apply_policy(image, policy, view_seed, 8)
            assert_allclose(cells[1 + view, :, column], expected, atol=1)


def test_a_run_announces_its_inputs_and_phases(complete_run_and_log):
    printed = complete_run_and_log[1]
    for line in (
        (
            r"device: CPU, \d+ cores; no GPU found \(for NVIDIA GPUs: pip install"
            r" 'tensorflow\[.*==2\S+'\)"
        ),
        (
            r"data: digits, 64 images for training \(train.*\), 360 images for evaluation \(test\),"
            r" 10 classes: 0 4, 1 6, .*"
        ),
        r"network: resnet10, 0\.3 million trainable parameters, 8 x 8 pixels, batch size 32",
        (
            r"training: 4 steps \(2 epochs\), learning rate 0\.0025 after 20 warm-up steps;"
            r" examples: .*views.png"
        ),
        # a SavedModel and two checkpoints, with a momentum for each trainable parameter
        r"disk space: 0\.0 GB for the SavedModel and checkpoints \(2\)",
        "compiling the training step",
        "evaluating step 4: linear head",
        "evaluating step 4: frozen encoder",
        "exporting the SavedModel",
        ".*eval_split: test.*",
        ".*saved_model/4.*",
        "logistic regression, projections.*",
        "logistic regression, untrained encoder.*",
        "linear head, top-1.*",
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE), line


def test_the_linear_head_is_evaluated_on_every_example(complete_run):
    config = tiny_config(model_dir=str(complete_run), eval_split="test", eval_batch_size=77)
    context = make_context(config)
    model, _ = loading.open_network(str(complete_run))
    result = evaluate.Evaluator(context, model).linear_head(4)
    batches = data.build_eval_dataset(config, context.source, "test", 360)
    images, labels, _ = next(iter(batches))
    logits = model(images, training=False)["logits_sup"].numpy()
    assert result == approx(metrics.linear_results(labels.numpy(), logits))


def test_frozen_evaluation_uses_h_and_projections_and_raw_pixels(complete_run):
    def pixels_and_labels(split):
        _, images, labels = next(iter(digits.digits_source().records(split).batch(999)))
        return np.float64(images).reshape(len(images), -1), labels.numpy()

    result = runs.read_results(complete_run / "result.json")
    pixels, labels = pixels_and_labels("train[:64]")
    # With 200 neighbors, all 64 training images vote.
    for key, count, temperature in ((metrics.KNN, 10, np.inf), (metrics.WEIGHTED_KNN, 64, 0.1)):
        classifier = KNeighborsClassifier(
            count,
            metric="cosine",
            weights=lambda distances, scale=temperature: np.exp((1 - distances) / scale),
        )
        expected = classifier.fit(pixels, labels).score(*pixels_and_labels("test"))
        # Nearly equal similarities may be ordered differently.
        assert result[key + "/raw_pixels"] == approx(expected, abs=2 / 360)
    assert any(result[key + "/projections"] != result[key] for key in (metrics.LBFGS, metrics.KNN))
    model, _ = loading.open_network(str(complete_run))
    endpoints = model(IMAGES, training=False)
    for function, name in (
        (features.encoder_function, "final_avg_pool"),
        (features.projection_function, "proj_head_output"),
    ):
        assert_allclose(function(model)(IMAGES), endpoints[name], rtol=1e-5)


def test_a_resumed_run_matches_an_uninterrupted_run(complete_run, tmp_path):
    settings = dict(checkpoint_steps=3, linear_head_learning_rate=0.1, train_epochs=2)
    # Both runs have a four-step schedule, so the interruption is the only difference.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_lib, "get_train_steps", lambda *_: 4)
        counted = model_lib.count_steps
        patch.setattr(
            model_lib, "count_steps", lambda *a: dataclasses.replace(counted(*a), train=3)
        )
        run(tmp_path, **settings)
    assert "resumed at step 3" in run(tmp_path, **settings, train_steps=4)
    assert_equal(weights(tmp_path, 4), weights(complete_run, 4))


def test_a_finished_run_only_computes_what_is_missing(complete_run):
    files = [complete_run / name for name in ("ckpt-4.index", "saved_model/4/saved_model.pb")]
    times = [file.stat().st_mtime_ns for file in files]
    before = storage.read_json(f"{complete_run}/result_4.json")

    def repeat(expected, mode="train_then_eval", **settings):
        settings.update(train_steps=4, linear_head_learning_rate=0.1, eval_projections=True)
        log = run(complete_run, with_export=True, mode=mode, **settings)
        assert re.findall("evaluating step 4: (.*)", log) == expected
        return log, storage.read_json(f"{complete_run}/result_4.json")

    log, results = repeat([], eval_baselines=True, eval_protocol="knn")
    assert "ckpt-4; the run is finished (to train longer, " in log and "exporting" not in log
    assert results == before and [file.stat().st_mtime_ns for file in files] == times
    log, results = repeat(["contrastive loss"], eval_protocol="contrastive,lbfgs")
    assert "exporting" in log and results.keys() == before.keys()
    record, earlier = results["computed_from"], before["computed_from"]
    assert record == {**earlier, "eval_protocol": "linear_head,lbfgs,knn,contrastive"}
    # An evaluation repeats the protocols that the user named.
    expected = ["contrastive loss", "frozen encoder"]
    log, results = repeat(expected, "eval", eval_protocol="knn", eval_timeout=0.5)
    assert results["computed_from"] == earlier and metrics.LBFGS in results


def test_predictions_and_baselines_are_added_to_a_finished_run(copied_run):
    settings = dict(mode="train_then_eval", train_steps=4, linear_head_learning_rate=0.1)
    log = run(copied_run, save_predictions=True, **settings)
    assert "evaluating step 4: linear head" in log and (copied_run / "predictions_4.npz").exists()
    file = copied_run / "result_4.json"
    results = read_json(file)
    del results["checksum"], results[f"{metrics.KNN}/raw_pixels"]
    write_json(file, results)
    settings["eval_protocol"] = "knn"
    assert "evaluating" not in run(copied_run, **settings)
    assert "evaluating step 4: frozen encoder" in run(copied_run, eval_baselines=True, **settings)
    assert f"{metrics.KNN}/raw_pixels" in runs.read_results(file)


@pytest.fixture
def restored_determinism():
    """Disables op determinism after the test. TensorFlow has no public function for this."""
    yield
    tf_config.disable_op_determinism()


def test_deterministic_runs_have_identical_checkpoints_and_use_only_deterministic_operations(
    restored_determinism, tmp_path
):
    """With op determinism, TensorFlow refuses to draw random numbers without a seed."""
    tf.random.set_seed(None)
    tf.random.uniform([])
    for name in ("one", "two"):
        run(tmp_path / name, train_steps=2, deterministic=True)
        tf.random.set_seed(None)
        with pytest.raises(RuntimeError, match="when determinism is enabled"):
            tf.random.uniform([])
    one, two = (weights(tmp_path / name, 2) for name in ("one", "two"))
    assert any("Momentum" in key for key in one)
    assert_equal(one, two)


def test_the_seed_determines_the_initial_weights_and_the_order_of_the_examples(tmp_path):
    results = []
    for seed in (7, 8, 7):
        context = make_context(tiny_config(seed=seed, model_dir=str(tmp_path)))
        state = train.build_training_state(context, str(tmp_path))
        _, labels = next(iter(train.train_dataset(context, 0)))
        results.append((state.model.trainable_variables[0].numpy(), labels.numpy()))
    for first, second, repeated in zip(*results):
        assert_array_equal(first, repeated)
        assert (first != second).any()


def test_training_ends_after_train_steps_even_between_checkpoints(tmp_path):
    # Eight images need not include all ten classes.
    settings = dict(train_split="train[:8]", train_batch_size=4)
    run(tmp_path, with_export=True, train_steps=2, checkpoint_steps=5, **settings)
    assert checkpoint_files.list_steps(str(tmp_path)) == [2]
    # exported without evaluation
    assert (tmp_path / "saved_model" / "2" / "saved_model.pb").exists()


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    "flags, last_step",
    [
        # The run recorded its last step. The evaluation's own settings result in other numbers of
        # steps.
        ("", 4),
        ("--train_batch_size=2", 4),
        ("--train_split=missing", 4),
        ("--keep_best", 4),
        ("--train_steps=3 --eval_epochs=1", 3),
        ("--train_steps=4", 4),
        # With a different training length, the last step is computed with the training split of the
        # run.
        ("--train_epochs=3 --train_split=test", 7),
    ],
)
def test_continuous_evaluation_evaluates_each_checkpoint_once_and_ends_at_the_last_step(
    complete_run, flags, last_step, monkeypatch
):
    settings = parse_settings(flags)
    steps = [3, 4] if {"keep_best", "eval_epochs"} & {*settings} else [4]
    seen = []
    monkeypatch.setattr(
        evaluate.Evaluator, "evaluate_and_write", lambda _, step, *args: seen.append(step) or {}
    )
    given = ({"train_steps", "train_epochs"} & {*settings}) | {"train_split"}
    log = run(complete_run, given, mode="eval", eval_timeout=0.2, **settings)
    message = f"waiting for checkpoints in {complete_run}, up to step {last_step}"
    assert seen == steps and message in log.splitlines()


@pytest.mark.parametrize(
    "checkpoint, is_locked, waits", [(False, False, True), (True, True, True), (True, False, False)]
)
def test_an_evaluation_waits_for_a_run_that_has_not_written_its_settings(
    complete_run, tmp_path, checkpoint, is_locked, waits, monkeypatch
):
    settings = dict(checkpoint=str(complete_run)) if checkpoint else {}
    (tmp_path / "train.lock").touch()  # An earlier run may have left the file.
    monkeypatch.setattr(evaluate.Evaluator, "evaluate_and_write", lambda *_: {})
    with Lock(str(tmp_path)) if is_locked else contextlib.nullcontext():
        log = run(tmp_path, mode="eval", eval_timeout=0.2, **settings)
    assert (f"waiting for a training run to start in {tmp_path}" in log) == waits


@pytest.mark.parametrize("given", [(), ("dataset",)])
def test_an_evaluation_uses_the_data_of_the_run(given, tmp_path):
    splits = dict(train_split="train[30:94]", eval_split="test+train[:30]")
    run(tmp_path / "run", splits, mode="train", train_steps=1, **splits)
    defaults = {name: getattr(Config, name) for name in (*splits, "dataset")}
    settings = {**defaults, **({"dataset": "digits"} if given else {})}
    log = run(tmp_path / "run", given, mode="eval", **settings)
    expected = "390 images for evaluation (test+train[:30])"
    assert (expected in log) == (not given)
    run(tmp_path / "other", given, mode="eval", checkpoint=str(tmp_path / "run"), **settings)
    results = read_json(tmp_path / "other" / "result_1.json")
    assert (results["computed_from"]["examples"] == 390) == (not given)


def test_continuous_evaluation_exports_each_checkpoint_with_its_results(copied_run, monkeypatch):
    exported = copied_run / "saved_model" / "4" / "saved_model.pb"
    before = exported.stat().st_mtime_ns
    monkeypatch.setattr(train, "train", None)
    # An evaluation of given weights exports nothing.
    checkpoint = str(copied_run / "ckpt-3")
    run(copied_run, with_export=True, mode="eval", checkpoint=checkpoint, eval_steps=1)
    assert (copied_run / "result_3.json").exists()
    assert os.listdir(copied_run / "saved_model") == ["4"]
    # The evaluation is started with a different temperature than the run.
    run(
        copied_run,
        with_export=True,
        mode="eval",
        train_steps=4,
        keep_hub_module_max=0,
        temperature=0.7,
        eval_name="second",
        eval_epochs=1,
    )
    assert exported.stat().st_mtime_ns == before
    assert {*os.listdir(copied_run / "second" / "saved_model")} == {"3", "4"}
    for step in (3, 4):
        path = copied_run / "second" / "saved_model" / str(step)
        description = weight_files.read_description(str(path))
        assert description["step"] == step and description["flags"].get("temperature", 0.1) == 0.1
        results = read_json(copied_run / "second" / f"result_{step}.json")
        assert dict(description["results"], checksum=results["checksum"]) == results
        logits = tf.saved_model.load(str(path))(IMAGES, trainable=False)["logits_sup"]
        model, _ = loading.open_network(str(copied_run / f"ckpt-{step}"))
        assert_allclose(logits, model(IMAGES, training=False)["logits_sup"], rtol=1e-4, atol=1e-6)


def test_checkpoints_removed_during_their_evaluation_are_not_exported(copied_run, monkeypatch):
    def evaluate_and_remove(_, step, *__):
        for path in copied_run.glob(f"ckpt-{step}.*"):
            path.unlink()
        return {"global_step": step}

    monkeypatch.setattr(evaluate.Evaluator, "evaluate_and_write", evaluate_and_remove)
    log = run(copied_run, with_export=True, mode="eval", train_steps=4, eval_epochs=1)
    # Step 3 is not exported, because step 4 has been.
    assert log.count("removed before it could be read") == 1
    assert os.listdir(copied_run / "saved_model") == ["4"]


@pytest.mark.parametrize(
    "flags, warnings",
    [
        ("--linear_head_learning_rate=0.1", []),
        ("", ["--linear_head_learning_rate is not set: with 1437 images"]),
        # Supervised training does not need large batches.
        ("--train_mode=supervised --train_batch_size=16", []),
        (
            "--warmup_epochs=51 --linear_head_learning_rate=0.1",
            ["--warmup_epochs=51: the learning rate increases during 2290 of 4491 steps"],
        ),
        ("--train_batch_size=16 --linear_head_learning_rate=0.1", ["--train_batch_size=16: "]),
        (
            "--train_split=train[:639] --linear_head_learning_rate=0.1",
            ["--train_epochs=100: with 1997 steps, "],
        ),
        (
            "--train_split=train[:100] --train_epochs=700 --linear_head_learning_rate=0.1",
            ["train[:100] has fewer than 10 images"],
        ),
        (
            "--eval_split=test[:8] --mode=train_then_eval --linear_head_learning_rate=0.1",
            ["test[:8] has no images of 3 of 10"],
        ),
        (
            "--image_size=64 --linear_head_learning_rate=0.1",
            ["--image_size=64: the images are much smaller (median of the shorter side: 8 pixels)"],
        ),
    ],
)
def test_unsuitable_settings_are_reported(flags, warnings):
    settings = {"train_split": "train", **parse_settings(flags)}
    lines = checks.advice(make_context(tiny_config(**settings)))
    assert all(warning in line for warning, line in zip(warnings, lines, strict=True))


@pytest.mark.parametrize("red, is_gray", [(9, True), (99, False)])
def test_gray_images_are_reported(red, is_gray, tmp_path):
    for number in range(32):
        image = tf.fill([9, 9, 3], np.uint8(7 * number)) + tf.constant([red, 5, 5], tf.uint8)
        tf.io.write_file(str(tmp_path / f"{number}.png"), tf.io.encode_png(image))
    settings = dict(dataset=f"folder:{tmp_path}", train_split="train", color_jitter_strength=1.0)
    lines = checks.advice(make_context(tiny_config(**settings)))
    assert any("the sampled images are gray" in line for line in lines) == is_gray


def test_top_5_accuracy_is_reported_for_more_than_five_classes():
    has_top_5 = [
        metrics.LINEAR_TOP_5 in metrics.linear_results(np.zeros(9, int), np.eye(9, classes))
        for classes in (2, 5, 6)
    ]
    assert has_top_5 == [False, False, True]


def test_continuous_evaluation_prints_tables_and_ends_after_the_timeout(complete_run):
    settings = dict(train_steps=400, eval_timeout=0.5, eval_name="again", eval_steps=1)
    settings["linear_head_learning_rate"] = 0.1
    printed = run(complete_run, ["train_steps"], mode="eval", **settings)
    assert "--eval_timeout" in printed
    assert re.search(r"ckpt-4\n-+\nlinear head, top-1 +0\.\d{4} \[", printed)
    results = runs.read_results(complete_run / "again" / "result_4.json")
    assert {metrics.LINEAR_TOP_1, metrics.CONTRAST_LOSS} <= results.keys()
    assert not {metrics.LBFGS, metrics.KNN} & results.keys()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_eval_steps_limits_only_the_evaluation_split(num_replicas, two_replicas):
    strategy = two_replicas if num_replicas == 2 else tf.distribute.get_strategy()
    config = tiny_config(eval_split="test", eval_steps=2)  # with batches of 90 examples
    for split, count in (("test", 180), ("train[:64]", 64), ("train", 1437)):
        batches = evaluate.eval_batches(config, digits.digits_source(), split, strategy)
        weights = [float(strategy.reduce("SUM", batch[2], axis=0)) for batch in batches]
        assert sum(weights) == count


def complete(config, given=()):
    """Returns the completed settings, and the logged lines as text."""
    source = datasets.open_source(config.dataset)
    config, lines = checks.complete(
        config, checks.Inputs(source, given, inspection.read_recorded(config), 5)
    )
    return config, "\n".join(lines)


def test_the_learning_rate_of_a_missing_linear_head_is_removed(tmp_path):
    config = Config(
        dataset=write_folder(tmp_path / "images", 4),
        model_dir=str(tmp_path),
        linear_head_learning_rate=0.1,
        zero_init_logits_layer=True,
    )
    completed, lines = complete(config)
    assert completed.linear_head_learning_rate is None and not completed.has_linear_head
    assert f"linear head: off ({config.dataset} has no labels)" in lines
    config = tiny_config(model_dir=str(tmp_path), lineareval_while_pretraining=False)
    assert "linear head: off (--nolineareval_while_pretraining)" in complete(config)[1]


@pytest.mark.parametrize("recorded", ["train[:80%]", "train"])
@pytest.mark.parametrize("mode", ["train", "train_then_eval"])
def test_resumed_run_keeps_its_training_images_if_only_the_mode_changes(recorded, mode, tmp_path):
    dataset = write_folder(tmp_path / "images", 50)
    write_json(tmp_path / "flags.json", dict(dataset=dataset, train_split=recorded, seed=3))
    config = Config(dataset=dataset, mode=mode, model_dir=str(tmp_path))
    config, lines = complete(config, ["dataset", "mode", "model_dir"])
    assert (config.train_split, config.seed) == (recorded, 3)
    assert config.eval_split == ("validation" if mode == "train" else "train[80%:]")


def test_knn_replaces_a_missing_linear_head_if_there_are_labels():
    for names in ("linear_head", "linear_head,linear_head"):
        config = tiny_config(
            lineareval_while_pretraining=False, eval_split="test", eval_protocol=names
        )
        assert evaluate.protocols(config, digits.digits_source()) == ["contrastive", "knn"]


@pytest.fixture(scope="module")
def small_model():
    """Returns evaluation settings (40 examples, all protocols except the slow `lbfgs`) and a model."""
    flags = """
    --train_split=train[:30] --eval_batch_size=20 --eval_split=test[:40] --eval_baselines
    --eval_protocol=linear_head,contrastive,knn --eval_projections
    """
    config = tiny_config(**parse_settings(flags))
    keras.utils.set_random_seed(1)
    return config, model_lib.build_model(config, 10)


def set_moving_means(model, value):
    """Sets the moving means in the encoder's batch norm to `value`. They do not affect the weight decay."""
    for variable in model.resnet_model.non_trainable_variables:
        if "moving_mean" in variable.name:
            variable.assign(tf.fill(variable.shape, value))


def test_repeated_evaluations_trace_once_and_write_one_event_file(
    small_model, tmp_path, monkeypatch
):
    context, model = make_context(small_model[0].replace(model_dir=str(tmp_path))), small_model[1]
    built, build = [], data.build_eval_dataset
    monkeypatch.setattr(
        data, "build_eval_dataset", lambda *args: built.append(args[2]) or build(*args)
    )
    with evaluate.Evaluator(context, model) as evaluator:
        results = []
        for step in (1, 2, 3):
            set_moving_means(model, -0.1 * step)
            results.append(evaluator.evaluate_and_write(step))
        encoders = [evaluator._logits, *evaluator._encoders.values()]
        functions = [
            *(inspect.getclosurevars(encoder).nonlocals["run"] for encoder in encoders),
            evaluator._embed_views,
            evaluator._losses,
        ]
    assert [function.experimental_get_tracing_count() for function in functions] == [1] * 5
    assert built == ["test[:40]", "train[:30]"]
    assert len(list((tmp_path / "eval").iterdir())) == 1
    assert {step for step, _ in runs.read_events(tmp_path / "eval")} == {1, 2, 3}
    assert results[0]["eval/contrast_loss"] != results[2]["eval/contrast_loss"]
    other = context.replace(config=context.config.replace(eval_name="new"))
    fresh = evaluate.evaluate_and_write(other, model, 3)
    assert results[2].pop("computed_from") == fresh.pop("computed_from")
    assert results[2] == approx(fresh, rel=1e-6)


@pytest.mark.parametrize("part_rows, eval_steps", [(6, 0), (10, 0), (64, 0), (10, 1)])
def test_contrastive_evaluation_in_parts_equals_evaluation_of_whole_batches(
    part_rows, eval_steps, small_model, monkeypatch
):
    # With fewer than 20 pixels, blur has no effect.
    config = small_model[0].replace(use_blur=True, image_size=20, eval_steps=eval_steps)
    context, model = make_context(config), small_model[1]
    set_moving_means(model, 0.0)  # Other tests change the model.
    monkeypatch.setattr(evaluate, "_EMBEDDED_ROWS", part_rows)
    results = evaluate.Evaluator(context, model).contrastive(1)
    losses = []
    for index, (images, _) in enumerate(
        data.build_view_pairs(config, context.source, "test[:40]", config.seed, 20)
    ):
        views = simclr.views(images, config, tf.constant(index, tf.int64))
        z = model(tf.concat(views, 0), training=False)["proj_head_output"]
        losses.append(objective.add_contrastive_loss(z, config.hidden_norm, config.temperature)[0])
    assert len(losses) == 2
    assert results["eval/contrast_loss"] == approx(np.mean(losses[: eval_steps or 2]), rel=1e-5)


@pytest.mark.parametrize("protocol", ["linear_head", "contrastive", "knn", "lbfgs"])
def test_nan_weights_are_rejected_and_no_results_are_written(protocol, small_model, tmp_path):
    config = small_model[0].replace(
        model_dir=str(tmp_path),
        eval_protocol=protocol,
        eval_baselines=False,
        eval_projections=False,
    )
    set_moving_means(small_model[1], np.nan)
    with rejects(f"--model_dir={tmp_path}: .*( NaN |is nan).*before training") as error:
        evaluate.Evaluator(make_context(config), small_model[1]).evaluate_and_write(5, False)
    assert "step 5" in str(error.value)
    assert not list(tmp_path.glob("result*"))
    set_moving_means(small_model[1], 0.0)


def test_results_of_other_protocols_are_kept_if_one_fails(small_model, tmp_path, monkeypatch):
    def fail(*_):
        raise UserError("--eval_protocol: fails.")

    def evaluate_and_fail(linear_head):
        monkeypatch.setattr(evaluate.Evaluator, "linear_head", linear_head)
        with rejects("fails"):
            evaluator.evaluate_and_write(7)

    config, file = small_model[0].replace(model_dir=str(tmp_path)), tmp_path / "result_7.json"
    evaluator = evaluate.Evaluator(make_context(config), small_model[1])
    monkeypatch.setattr(evaluate.Evaluator, "contrastive", fail)
    evaluate_and_fail(fail)
    assert not file.exists()
    evaluate_and_fail(lambda *_: {metrics.LINEAR_TOP_1: 0.5})
    expected = {"global_step", "eval/regularization_loss", metrics.LINEAR_TOP_1}
    assert set(runs.read_results(file)) == expected
    for linear_head in (fail, lambda *_: {metrics.LINEAR_TOP_1: 0.25}):
        evaluate_and_fail(linear_head)
        assert read_json(file)[metrics.LINEAR_TOP_1] == 0.5
    assert not (tmp_path / "result.json").exists()


# ------------------------------------------------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize("weights", ["ckpt-4", "saved_model/4", "run"])
@pytest.mark.parametrize("settings", [dict(mode="eval"), dict(train_mode="finetune")])
def test_evaluation_and_fine_tuning_use_the_network_of_the_checkpoint(
    complete_run, weights, settings
):
    def adopt(config, given=("dataset",)):
        return checks.adopt(config, given, recorded)

    directory = str(complete_run)
    path = (
        dict(model_dir=directory) if weights == "run" else dict(checkpoint=f"{directory}/{weights}")
    )
    config = Config(dataset="digits", **settings, **path)
    recorded = inspection.read_recorded(config)
    # An evaluation of a run also adopts its batch size, its augmentation and its last step.
    is_run = weights == "run" and "mode" in settings
    network = {
        name: TINY.get(name, getattr(Config, name))
        for name in settings_with("network", *["of_run"] * is_run)
    }
    adopted, (line,) = adopt(config)
    assert adopted == config.replace(**network, train_steps=4 * is_run)
    names = {"resnet_depth", "num_proj_layers", "image_size", "proj_out_dim"}
    names.update(["train_batch_size", "color_jitter_strength"] * is_run)
    assert line.startswith("settings of ")
    assert {f"--{name}={network[name]}" for name in names} == set(line.split()[3:])
    given, _ = adopt(config, ["dataset", "image_size"])
    assert given == adopted.replace(image_size=224, stem=given.stem)
    with rejects("^--resnet_depth=18: .* Remove --resnet_depth=18, or"):
        adopt(config.replace(resnet_depth=18), ["resnet_depth"])
    assert adopt(adopted) == (adopted, [])


def test_pretraining_does_not_use_the_network_of_the_checkpoint(complete_run):
    config = Config(dataset="digits", checkpoint=str(complete_run / "ckpt-4"))
    assert checks.adopt(config, (), inspection.read_recorded(config)) == (config, [])


FINE_TUNING = parse_settings(
    "--train_mode=finetune --fine_tune_after_block=1 --ft_proj_selector=1 --optimizer=momentum"
    " --learning_rate=1 --warmup_epochs=0 --weight_decay=0.01 --save_predictions"
)


@pytest.fixture(scope="module")
def fine_tuned(complete_run, tmp_path_factory):
    """Returns the directory of a run of two steps, and the weights it started from, which were deleted."""
    directory = tmp_path_factory.mktemp("fine_tuned")
    start = str(shutil.copytree(complete_run, directory / "start"))
    run(directory / "run", mode="train_then_eval", checkpoint=start, train_steps=2, **FINE_TUNING)
    shutil.rmtree(start)
    return directory / "run", start


# The classifier does not use layer 1 of the projection head.
FROZEN = ("resnet_model/initial", "resnet_model/block_groups/0", "_projection_head/linear_layers/1")
FROZEN = tuple(f"model/{name}" for name in FROZEN)


def test_fine_tuning_changes_all_layers_except_frozen_ones(complete_run, fine_tuned):
    before, after = model_weights(complete_run), model_weights(fine_tuned[0])
    changed = {key for key in after if (before[key] != after[key]).any()}
    assert changed == {key for key in after if not key.startswith(FROZEN)}
    assert any("moving_mean" in key for key in changed)


@pytest.mark.parametrize("block", [-1, 0, 2])
def test_the_stem_and_the_given_number_of_block_groups_are_frozen(block, small_model):
    model = model_lib.build_model(small_model[0], 10)
    model.freeze(block)
    trained = {
        "/".join(key.split("/")[2:4])
        for key, variable in loading.variables_by_key(model=model).items()
        if any(variable is each for each in model.resnet_model.trainable_variables)
    }
    stem = {name for name in trained if name.startswith("initial")}
    assert trained - stem == {f"block_groups/{group}" for group in range(max(block, 0), 2)}
    assert bool(stem) == (block == -1)


def test_fine_tuning_resumes_without_its_initial_checkpoint(fine_tuned, tmp_path):
    directory, start = fine_tuned
    shutil.copytree(directory, tmp_path / "run")
    settings = dict(FINE_TUNING, save_predictions=False, checkpoint=start)
    assert "resumed at step 2" in run(tmp_path / "run", train_steps=3, **settings)


def test_evaluations_of_fine_tuning_use_the_settings_of_the_run(fine_tuned, tmp_path):
    """These are the input of the classifier, and the variables to which weight decay applies."""
    directory = fine_tuned[0]
    run(directory, mode="eval", eval_name="again", save_predictions=True)
    run(tmp_path / "other", mode="eval", checkpoint=str(directory), save_predictions=True)
    expected = np.load(directory / "predictions_2.npz")["logits"]
    for path in (directory / "again", tmp_path / "other"):
        logits = np.load(path / "predictions_2.npz")["logits"]
        assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    decayed = [
        value
        for key, value in model_weights(directory).items()
        if key.endswith(("/kernel", "dense/bias")) and not key.startswith(FROZEN)
    ]
    expected = 0.01 * sum(np.sum(value.astype(np.float64) ** 2) / 2 for value in decayed)
    for path in (directory, directory / "again"):
        results = runs.read_results(path / "result_2.json")
        assert results["eval/regularization_loss"] == approx(expected, rel=1e-5)


def test_fine_tuning_on_different_classes_starts_from_a_zero_initialized_classifier(
    complete_run, tmp_path, capsys
):
    flags = f"""
    --dataset={write_folder(tmp_path / "images", 8, *"abc")} --train_split=train --train_batch_size=12
    --train_mode=finetune --checkpoint={complete_run}/ckpt-4 --zero_init_logits_layer
    --model_dir={tmp_path}/run
    """
    config = tiny_config(**parse_settings(flags))
    state = train.build_training_state(make_context(config), config.model_dir)
    assert "not loaded: linear head" in capsys.readouterr().out
    kernel, bias = state.model.supervised_head.variables
    assert kernel.shape == [128, 3] and not kernel.numpy().any() and not bias.numpy().any()


def test_supervised_training_from_scratch_uses_the_label_fraction(tmp_path):
    flags = """
    --train_mode=supervised --label_fraction=0.5 --train_split=train[:80] --train_batch_size=16
    --train_epochs=1 --mode=train_then_eval --eval_steps=1 --color_jitter_strength=0.5
    --optimizer=momentum
    """
    log = run(tmp_path, **parse_settings(flags))
    saved = model_weights(tmp_path / "ckpt-3")  # Three steps cover 40 examples in batches of 16.
    assert not any("_projection_head" in key for key in saved)
    assert saved["model/supervised_head/linear_layer/dense/kernel"].shape == (128, 10)
    image = tf.io.decode_png((tmp_path / "views.png").read_bytes())
    assert image.shape == [200, 800, 3]  # The preview has one view per image.
    assert "classifier, top-1" in log


def test_label_fraction_after_pretraining_applies_only_to_the_evaluation(tmp_path):
    settings = dict(mode="train_then_eval", train_steps=2, eval_protocol="lbfgs,knn")
    subset = dict(label_fraction=0.5, label_seed=3)
    assert "evaluating step 2: frozen encoder\n" in run(tmp_path / "all", **settings)
    log = run(tmp_path / "few", **settings, **subset)
    assert "evaluating step 2: frozen encoder, 32 labels" in log
    assert_equal(weights(tmp_path / "few", 2), weights(tmp_path / "all", 2))
    # A separate evaluation with the same fraction of the labels gives the same results.
    settings.update(mode="eval", checkpoint=str(tmp_path / "all"))
    run(tmp_path / "separate", **settings, **subset)
    results = {
        name: runs.read_results(tmp_path / name / "result.json")
        for name in ("all", "few", "separate")
    }
    assert results["few"] != results["all"]
    # Only evaluations of a run include `contrastive`.
    few = {name: results["few"][name] for name in results["separate"]}
    assert few == approx(results["separate"]) and metrics.CONTRAST_LOSS in results["few"]


@pytest.mark.parametrize(
    "flags, images",
    [
        ("--train_mode=pretrain", 64),
        ("--train_mode=supervised", 32),
        ("--train_mode=distill --teacher=unused --distill_alpha=0.5", 64),
    ],
)
def test_label_seed_selects_the_labels(flags, images):
    flags += " --mode=train_then_eval --eval_split=test --eval_protocol=knn --label_fraction=0.5"
    selected = []
    for seed in (0, 3, 0):
        config = tiny_config(label_seed=seed, **parse_settings(flags))
        context = make_context(config)
        run_lib._prepare_source(context)
        assert context.source.num_examples("train[:64]") == images
        records = evaluate.select_labels(config, context.source).records("train[:64]")
        selected.append({int(key) for key, *_ in records.as_numpy_iterator()})
    first, second, repeated = selected
    assert first == repeated != second and len(first) == len(second) == 32


def test_continuous_evaluation_of_pretraining_applies_the_label_fraction_once(tmp_path):
    """13 of 64 labels are enough for ten classes, but a fifth of 13 labels or of the steps would not be."""
    settings = dict(train_epochs=2, eval_protocol="knn")
    run(tmp_path, mode="train", **settings)
    output = run(tmp_path, mode="eval", **settings, label_fraction=0.2)
    assert "up to step 5" in output and "evaluating step 5: frozen encoder, 13 labels" in output


@pytest.mark.parametrize("mode, file", [("train_then_eval", "train.lock"), ("eval", "flags.json")])
def test_too_few_labels_are_reported_before_training_and_waiting(mode, file, tmp_path):
    if mode == "eval":
        (tmp_path / file).write_text('{"seed": 1}')  # The run has started.
    settings = dict(eval_protocol="knn", label_fraction=0.1, eval_timeout=60)
    message = "--label_fraction=0.1: .* 6 examples are too few for 10 classes"
    with rejects(message):
        run(tmp_path, mode=mode, **settings)
    assert os.listdir(tmp_path) == [file]


# ------------------------------------------------------------------------------------------------------- invalid input


def test_model_dir_with_another_architecture_is_rejected_and_left_unchanged(complete_run):
    before = runs.contents(complete_run)
    with rejects("--model_dir=.*different network"):
        run(complete_run, se_ratio=0.25, allow_flag_changes=True)
    assert runs.contents(complete_run) == before


def test_micro_batches_half_precision_and_new_scalars_work_together(
    optimized_graphs, tmp_path, monkeypatch
):
    """Items that are added to the dicts in `simclr` are logged, without changes elsewhere."""

    def add_scalars(name):
        function = getattr(simclr, name)

        def patched(*args, **settings):
            *outputs, terms, scalars = function(*args, **settings)
            scalars = {**scalars, f"new_{name}": 2 * tf.add_n([*terms.values()])}
            return *outputs, {**terms, f"term_{name}": tf.constant(0.5)}, scalars

        monkeypatch.setattr(simclr, name, patched)

    monkeypatch.setattr(training_log, "_SECONDS_BETWEEN_ROWS", np.inf)
    add_scalars("per_image")
    add_scalars("over_batch")
    settings = dict(micro_batch_size=16, precision="mixed_bfloat16", checkpoint_steps=4)
    run(tmp_path, train_steps=4, **settings)
    (row,) = training_log.read_history(str(tmp_path))
    row = {name.removeprefix("train/"): value for name, value in row.items()}
    assert row["new_over_batch"] == approx(2 * row["contrast_loss"], rel=1e-2)
    assert row["new_per_image"] == approx(2 * row["supervised_loss"], rel=1e-2)
    terms = ("contrast_loss", "supervised_loss", "weight_decay")
    assert row["total_loss"] == approx(sum(row[name] for name in terms) + 1, rel=1e-3)


def test_large_micro_batches_run_with_optimized_graphs(optimized_graphs, tmp_path):
    """Grappler rewrites sums of a step that needs more than 200 MB. Here, kernels cover whole images."""
    settings = dict(train_batch_size=64, micro_batch_size=32, image_size=8, width_multiplier=4)
    run(tmp_path, train_steps=3, mode="train", stem="imagenet", **settings)
    assert weights(tmp_path, 3)


@pytest.mark.parametrize(
    "details, override, line, is_refused",
    [
        (dict(compute_capability=(9, 0)), "1", "2 x Card; TF32 on", False),
        (dict(compute_capability=(8, 0)), "0", "2 x Card; TF32 off", False),
        (dict(compute_capability=(7, 5)), "1", "2 x Card", True),
        ({}, "1", "2 x Card", False),
    ],
)
def test_gpus_with_tf32_are_reported_and_bfloat16_is_suggested_or_refused(
    details, override, line, is_refused, monkeypatch
):
    details = {**details, "device_name": "Card"}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [0, 1])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    try:
        assert devices.describe(devices.make_strategy()) == line
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
    for precision, suits in (("float32", "TF32" in line), ("mixed_bfloat16", False)):
        lines = checks.advice(make_context(tiny_config(precision=precision)))
        assert any("Consider --precision=mixed_bfloat16" in line for line in lines) == suits
        is_rejected = is_refused and precision == "mixed_bfloat16"
        error = rejects("--precision=mixed_bfloat16: Card .* Use mixed_float16")
        with error if is_rejected else contextlib.nullcontext():
            devices.check_precision(precision, use_tpu=False)


@pytest.mark.parametrize(
    "device, visible, is_shown",
    [("tensorflow.py", "0", True), ("tensorflow.py", "-1", False), ("none", "0", False)],
)
def test_reason_is_shown_if_an_existing_gpu_is_not_found(
    device, visible, is_shown, stub_tensorflow, tmp_path, monkeypatch
):
    stub_tensorflow("os.abort()")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "_GPU_DEVICES", (str(tmp_path / device),))
    first, *lines = devices.describe(tf.distribute.get_strategy()).splitlines()
    assert "no GPU found" in first and first.endswith("with SIGABRT:") == is_shown
    assert lines == ["  reason 1", "  reason 2"] * is_shown


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--micro_batch_size=1", "--micro_batch_size=1: .*number of replicas .2."),
        ("--train_batch_size=33", "--train_batch_size=33: .*number of replicas .2.. Use 32"),
        ("--train_batch_size=33 --mode=eval --eval_split=test", None),
    ],
)
def test_batch_sizes_must_be_divisible_by_the_number_of_replicas(flags, message, two_replicas):
    context = make_context(tiny_config(**parse_settings(flags)), strategy=two_replicas)
    with rejects(message) if message else contextlib.nullcontext():
        checks.check_data(context)


def test_knn_evaluation_with_a_single_class_is_rejected(tmp_path):
    flags = f"""
    --dataset={write_folder(tmp_path, 8, "only")} --train_split=train[:6] --eval_split=train[6:]
    --eval_protocol=knn --eval_batch_size=4
    """
    config = tiny_config(**parse_settings(flags))
    model = model_lib.build_model(config, 1)
    with rejects("two classes"):
        evaluate.Evaluator(make_context(config), model).frozen_encoder(1)


# ------------------------------------------------------------------------------------------------------- replicas


def test_evaluation_on_two_replicas_matches_evaluation_on_one_replica(two_replicas, tmp_path):
    config = tiny_config(
        train_split="train[:30]",
        model_dir=str(tmp_path),
        eval_split="test[:101]",
        eval_batch_size=14,
    )
    source, results = digits.digits_source(), []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = model_lib.build_model(config, 10)
        batches = evaluate.eval_batches(config, source, config.eval_split, strategy)
        vectors, labels = features.extract(strategy, features.encoder_function(model), batches)
        evaluator = evaluate.Evaluator(make_context(config, source, strategy), model)
        results.append((evaluator.linear_head(1), vectors, labels))
    assert results[0][0] == approx(results[1][0])
    assert results[0][1].shape == (101, 128)
    assert_allclose(results[1][1], results[0][1], atol=1e-6)
    assert_array_equal(results[1][2], results[0][2])


# --------------------------------------------------------------------------------------------------------- gallery


def test_gallery_of_an_image_folder_is_written_without_corrupt_images(tmp_path, monkeypatch):
    flags = f"""
    --dataset={write_folder(tmp_path / "photos", 12, *"ab")} --corrupt_images=skip --train_batch_size=8
    --mode=train_then_eval --train_steps=1 --eval_protocol=contrastive --eval_batch_size=8
    --nolineareval_while_pretraining --train_split=train --eval_split=train
    """
    settings = parse_settings(flags)
    (tmp_path / "photos" / "a" / "corrupt.png").write_bytes(b"no image")
    printed = run(tmp_path / "run", with_export=True, **settings)
    page = (tmp_path / "run" / "gallery.html").read_text()
    assert "24 images" in page and "corrupt.png" not in page and "Unreadable images: none" in page
    assert (tmp_path / "run" / "gallery.pairs.csv").exists()
    assert re.search(rf"^gallery +{tmp_path / 'run' / 'gallery.html'}$", printed, re.MULTILINE)
    # If the same command is repeated after the run has finished, the page is kept if the new page
    # cannot be written.
    monkeypatch.setattr(run_lib.gallery, "write_page", None)
    printed = run(tmp_path / "run", **settings)
    assert "warning: the gallery was not written: " in printed and "run directory" in printed
    assert (tmp_path / "run" / "gallery.html").read_text() == page
