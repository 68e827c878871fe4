"""Transfer learning: l2 path, linear evaluation, grid search and permutation test."""

import json
import os
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from pytest import approx
from scipy import special, stats
from sklearn import linear_model, metrics

import config as config_lib
import data
import model as model_lib
import resnet
from checkpoints import loading
from checkpoints.lock import Lock
from checkpoints.records import Record
from config import Config
from probing import features, logistic_regression
from runtime import child_processes
from sources import digits
from support import SMALL, read_json, write_json
from support.errors import rejects
from support.images import write_images
from transfer import cli, grid_search, linear_evaluation, measures, output, significance, tasks

pytestmark = pytest.mark.usefixtures("tiny_resnet")
FEW = ("--dataset=digits", "--train=train[:60]", "--validation=train[60:80]", "--test=test[:20]")
SPLITS = ("train", "validation", "test")
SINGLE = ("--learning_rates=0.1", "--weight_decays=0")


@pytest.fixture(scope="module")
def feature_sets():
    """Returns training, validation and test sets with four overlapping classes.

    The features are non-negative and have different scales.
    """
    random = default_rng(0)
    centers, scales = random.normal(size=(4, 12)), 10.0 ** random.uniform(-0.5, 0.5, 12)

    def draw(count):
        labels = random.integers(0, 4, count)
        features = np.maximum(centers[labels] + 1 + 2 * random.normal(size=(count, 12)), 0) * scales
        return features.astype(np.float32), labels

    return draw(300), draw(150), draw(200)


# -------------------------------------------------------------------------------------------------------------- l2 path


def objective(scores, weights, labels, l2_of_sum):
    """Returns the mean cross-entropy plus the l2 penalty l2_of_sum / (2 n) |W|^2."""
    penalty = l2_of_sum / 2 * (weights**2).sum() / len(labels)
    return metrics.log_loss(labels, special.softmax(scores, 1)) + penalty


def fit_separately(inputs, labels, l2_of_sum):
    model = linear_model.LogisticRegression(C=1 / l2_of_sum, max_iter=10_000, tol=1e-9)
    return model.fit(np.float64(inputs), labels)


@pytest.mark.parametrize("separable", [False, True])
def test_l2_path_reaches_the_loss_of_separate_fits(separable, feature_sets):
    """Includes separable classes, for which weak regularization leads to large weights and near-zero losses."""
    inputs, labels = feature_sets[0]
    if separable:  # There are more features than examples.
        random = default_rng(4)
        inputs = np.maximum(random.normal(size=(60, 200)) + 0.5, 0).astype(np.float32)
        labels = np.arange(60) % 3
    path = logistic_regression.LogisticPath(inputs, labels)
    for number, l2_of_sum in enumerate(linear_evaluation.L2_OF_SUM_CHOICES):
        loss = objective(path.fit(l2_of_sum).scores(inputs), path.kernel, labels, l2_of_sum)
        if number % 4 == 0:
            cold = fit_separately(inputs, labels, l2_of_sum)
            expected = objective(cold.decision_function(inputs), cold.coef_, labels, l2_of_sum)
            assert loss <= expected + 1e-4


def validation_metrics(results):
    """Returns a dict that maps l2 strengths to metrics."""
    return {result["l2"]: result["metric"] for result in results["validation"]}


def test_interrupted_sweep_resumes_without_repeating_fits(feature_sets):
    strengths, snapshots = (100.0, 1.0, 0.01), []

    def sweep(**arguments):
        results, _ = linear_evaluation.linear(
            *feature_sets,
            "top_1",
            strengths,
            on_result=lambda values: snapshots.append(dict(values)),
            **arguments,
        )
        return results["l2"], validation_metrics(results)

    _, values = sweep()
    assert [len(snapshot) for snapshot in snapshots] == [1, 2, 3] and snapshots[-1] == values
    snapshots.clear()
    best, resumed = sweep(previous={100.0: values[100.0], 1.0: 0.0})
    # The previous value is reused without refitting.
    assert len(snapshots) == 1 and resumed[1.0] == 0.0
    assert resumed[0.01] == approx(values[0.01], abs=0.02) and best in (100.0, 0.01)


def test_classes_without_training_examples_are_never_predicted(feature_sets):
    inputs, labels = feature_sets[0]
    for classes in ((0, 2), (0, 1, 3), (2, 3)):
        rows = np.isin(labels, classes)
        scores = (
            logistic_regression.LogisticPath(inputs[rows], labels[rows]).fit(1.0).scores(inputs)
        )
        assert scores.shape == (300, max(classes) + 1) and set(scores.argmax(1)) <= set(classes)
        assert (scores.argmax(1) == labels)[rows].mean() > 0.5


def test_multi_label_path_matches_separate_binary_fits(feature_sets):
    inputs, labels = feature_sets[0]
    multi_labels = np.eye(4, dtype=np.int64)[labels]
    # Some labels are unknown. Class 3 has no positives.
    multi_labels[:40, 1], multi_labels[:, 3] = -1, 0
    scores = (
        logistic_regression.LogisticPath(inputs, multi_labels).fit(10.0).fit(1.0).scores(inputs)
    )
    for column in range(3):
        rows = multi_labels[:, column] >= 0
        cold = fit_separately(inputs[rows], multi_labels[rows, column], 1.0)
        assert_allclose(scores[:, column], cold.decision_function(inputs), atol=0.05)
    assert (scores[:, 3] == -np.inf).all()


def test_l2_is_selected_on_validation_and_the_model_is_fitted_on_trainval(feature_sets):
    train, validation, test = feature_sets
    results, scores = linear_evaluation.linear(train, validation, test, "top_1")
    values = validation_metrics(results)
    assert_allclose(np.log10(list(values)), np.linspace(5, -6, 45), atol=1e-9)
    inputs, labels = (np.concatenate(pair) for pair in zip(train, validation))
    expected = fit_separately(inputs, labels, results["l2"]).decision_function(test[0])
    expected -= expected.mean(1, keepdims=True)
    assert_allclose(scores - scores.mean(1, keepdims=True), expected, atol=0.05)


def test_ties_select_the_strongest_regularization(feature_sets):
    train, (inputs, labels), _ = feature_sets
    # With one validation example, many strengths have the same accuracy.
    for row in range(20):
        labeled = inputs[row : row + 1], labels[row : row + 1]
        results, _ = linear_evaluation.linear(train, labeled, labeled, "top_1", (1e4, 30.0, 1e-3))
        values = validation_metrics(results)
        assert results["l2"] == max(l2 for l2 in values if values[l2] == max(values.values()))


# ---------------------------------------------------------------------------------------------------- linear evaluation


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def few_iterations(monkeypatch):
    """Reduces the number of iterations of each fit. The tests above check the quality of the fits."""
    monkeypatch.setattr(logistic_regression, "PATH_ITERATIONS", 30)


def write_network(directory, seed=0):
    """Writes a network with random weights. Returns the prefix of the checkpoint."""
    keras.utils.set_random_seed(seed)
    # Evaluation settings from pretraining must be ignored, but not the decoding of images.
    settings = {"image_size": 8, "eval_steps": 1, "eval_split": "test[:150]", "bands": "3,2,1"}
    write_json(directory / "flags.json", settings)
    model = model_lib.build_model(Config(**SMALL), 10)
    return tf.train.Checkpoint(model=model).write(f"{directory}/ckpt-1")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return write_network(tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def other_network(tmp_path_factory):
    return write_network(tmp_path_factory.mktemp("other_network"), seed=1)


@pytest.fixture
def run(network, out):
    """Returns a function that runs a linear evaluation of `network`."""
    flags = ("linear", f"--checkpoint={network}", f"--out={out}")
    return lambda *arguments: cli.main([*flags, *arguments])


def write_folder(root, **sizes):
    """Writes a data set with the given numbers of images per split and class. Returns its name."""
    for split, count in sizes.items():
        for name in ("cat", "dog"):
            write_images(root / "photos" / split / name, *(f"{i}.png" for i in range(count)))
    return f"--dataset=folder:{root / 'photos'}"


def result_of(out):
    return read_json(out / "result.json")


def features_of(out):
    """Returns the features and labels of each split that a linear evaluation wrote below `out`."""
    [directory] = out.glob("linear_*")
    saved = {name: np.load(directory / f"features_{name}.npz") for name in SPLITS}
    return {name: (arrays["vectors"], arrays["labels"]) for name, arrays in saved.items()}


def test_linear_evaluation_saves_features_and_predictions(
    run, network, few_iterations, capsys, monkeypatch, out
):
    run(*FEW)
    results = result_of(out)
    source, feature_sets = digits.digits_source(), features_of(out)
    for name, split in zip(SPLITS, ("train[:60]", "train[60:80]", "test[:20]")):
        labels = [int(label) for *_, label in source.records(split)]
        assert feature_sets[name][1].tolist() == labels
    model = model_lib.build_model(Config(**SMALL), 10)
    loading.load_model(model, network)
    config = Config(**SMALL, dataset="digits")
    [(images, *_)] = data.build_eval_dataset(config, source, "test[:20]", 20)
    expected = model(images, training=False)["final_avg_pool"]
    assert_allclose(feature_sets["test"][0], expected, rtol=1e-4, atol=1e-6)
    expected, scores = linear_evaluation.linear(*feature_sets.values(), "top_1")
    assert expected.items() <= results.items() and results["metric"] == "top_1"
    assert (scores.argmax(1) == feature_sets["test"][1]).mean() == results["test"]
    assert_array_equal(np.load(out / "predictions.npz")["logits"], scores)
    assert f"top 1          {results['test']:.4f}" in capsys.readouterr().out
    monkeypatch.setattr(features, "extract", None)  # Fails if saved features are extracted again.
    run(*FEW)
    assert result_of(out) == results
    record = Record.read(*map(str, out.glob("linear_*")))
    assert record.results == expected and not record.diverged
    assert record.seconds > 0 and record.machine and record.settings["image_size"] == 8


def test_linear_evaluation_on_a_folder_uses_its_validation_split_or_the_given_splits(
    run, few_iterations, tmp_path, capsys
):
    dataset = write_folder(tmp_path, train=12, val=4, test=3)
    splits = ("--task=aircraft", "--validation=train[:7]", "--train=train[7:]")
    for arguments, message, counts in (
        ((), "using the validation split of folder:", [24, 8, 6]),
        (splits, "FGVC Aircraft", [17, 7, 6]),
    ):
        out = tmp_path / f"train_{counts[0]}"
        run(dataset, f"--out={out}", *arguments)
        assert message in capsys.readouterr().out
        assert [len(labels) for _, labels in features_of(out).values()] == counts


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((), "--task, --dataset: neither is set. Pass --task (one of food101, "),
        (
            ("--task=birdsnap",),
            "--task=birdsnap: Birdsnap is not in TFDS. Pass --dataset=folder:DIR.",
        ),
        (
            ("--dataset=digits", "--train=train[:50%]"),
            "no default validation split can be derived from this split. Pass --validation.",
        ),
        (("--dataset=digits", "--test=validation"), "--test=validation: digits has no such split"),
        (
            ("--dataset=digits", "--metric=mean_average_precision"),
            "the metric does not fit the labels of digits. Use top_1 or mean_per_class.",
        ),
    ],
)
def test_user_errors_give_one_line_messages_and_create_no_directory(
    arguments, expected, run, out, fails
):
    fails(expected, run, *arguments)
    # After the error is fixed, the same path must be usable.
    assert not out.exists()


def test_non_finite_features_are_rejected(run, monkeypatch, fails):
    monkeypatch.setattr(
        features, "encoder_function", lambda model: lambda images: images[:, 0, 0] / 0
    )
    fails("features of train[:60] contain NaN or Inf", run, *FEW)


def test_features_use_the_central_square_of_the_image(
    run, few_iterations, tmp_path, monkeypatch, out
):
    """Checks that the crop spans the whole shorter side (paper, B.8.1), which is not the case in other evaluations."""
    dataset = write_folder(tmp_path, train=1, validation=1, test=1)
    pixels = default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    for path in (tmp_path / "photos").glob("*/*/*.png"):
        path.write_bytes(tf.io.encode_png(pixels).numpy())
    monkeypatch.setattr(
        features, "encoder_function", lambda model: lambda images: tf.reshape(images, [-1, 4800])
    )
    run(dataset, "--image_size=40")
    vectors, _ = features_of(out)["test"]
    for row in vectors:
        assert_allclose(row.reshape(40, 40, 3), pixels[:, 10:50, ::-1] / 255, atol=1e-6)


def test_directory_depends_on_everything_that_affects_the_features(
    run, network, other_network, tmp_path, monkeypatch, out
):
    """Evaluates in one output directory, whose result.json belongs to the last command."""
    labels = np.arange(20) % 3
    extract = mock.Mock(return_value=(np.ones((20, 3)), labels))
    monkeypatch.setattr(features, "extract", extract)
    monkeypatch.setattr(linear_evaluation, "linear", lambda *_, **__: ({}, np.eye(3)[labels]))
    shutil.copytree(os.path.dirname(network), tmp_path / "copy")
    for arguments, is_new in (
        ((), True),
        ((f"--checkpoint={tmp_path / 'copy' / 'ckpt-1'}",), False),
        ((f"--checkpoint={other_network}",), True),
        (("--test=test[:30]",), True),
        (("--metric=mean_per_class",), True),
        (("--image_size=16",), True),
        ((), False),
    ):
        extract.reset_mock()
        run(*FEW, *arguments)
        assert extract.call_count == 3 * is_new, arguments
    assert len(list(out.glob("linear_*"))) == 5
    assert result_of(out)["checkpoint"] == network


def test_undefined_metrics_are_rejected():
    with rejects("--metric=mean_average_precision: the value is NaN"):
        measures.measure("mean_average_precision", np.zeros([2, 4], np.int64), np.zeros([2, 4]))


def test_output_directory_in_use_is_rejected(run, out, fails):
    out.mkdir()
    with Lock(str(out)):
        fails(f"--out={out}: the directory is in use by process ", run, *FEW)


# ---------------------------------------------------------------------------------------------------------- grid search


_PROGRAM = """
import json, os, sys
import numpy as np
flags = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls"), "a") as file:
    file.write(json.dumps(flags) + "\\n")
rate = float(flags["learning_rate"])
if rate > 0.5:
    print("no steps were skipped")
    sys.exit(3)
if rate == 0.003:
    print("training diverged at step 3", flush=True)
    os.kill(os.getpid(), 9)
if rate < 0.002:
    sys.exit("run.py: error: no disk")
num_correct = round(20 * (1 - abs(rate - 0.1)) - 1000 * float(flags["weight_decay"]) * rate)
labels = np.zeros(20, int)
os.makedirs(flags["model_dir"], exist_ok=True)
np.savez(os.path.join(flags["model_dir"], f"predictions_{flags['train_steps']}.npz"), labels=labels,
         logits=np.eye(2)[(np.arange(20) >= num_correct).astype(int)])
with open(os.path.join(flags["model_dir"], f"result_{flags['train_steps']}.json"), "w") as file:
    json.dump({"eval/label_top_1_accuracy": num_correct / 20,
               "eval/label_mean_per_class_accuracy": num_correct / 40,
               "computed_from": {"eval_split": flags["eval_split"]}}, file)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Replaces run.py with a fake program. Returns a function that lists the flags passed to each call.

    The reported accuracy is highest for learning rate 0.1 without weight decay.
    """
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "run.py").write_text(_PROGRAM)
    monkeypatch.setattr(grid_search, "ROOT", f"{tmp_path}/program")

    def calls():
        return list(map(json.loads, (tmp_path / "program" / "calls").open()))

    return calls


@pytest.fixture
def grid(network, out):
    """Returns a function that runs a grid search for `network`."""
    flags = (
        f"--checkpoint={network}",
        f"--out={out}",
        "--dataset=digits",
        "--steps=30",
        "--jobs=2",
    )
    return lambda *arguments, protocol="finetune": cli.main([protocol, *flags, *arguments])


def test_grid_search_selects_on_validation_data_and_reports_test_accuracy(
    grid, program, capsys, out
):
    values = ("--learning_rates=0.01,0.1,1", "--weight_decays=0,0.001")
    grid(*values)
    names = "train_split", "eval_split", "learning_rate", "weight_decay"
    *calls, final = (" ".join(call[name] for name in names) for call in program())
    assert sorted(calls) == [
        f"train[:80%] train[80%:] {pair}"
        for pair in ("0.01 0.0", "0.01 0.1", "0.1 0.0", "0.1 0.01", "1.0 0.0", "1.0 0.001")
    ]
    assert final == "train test 0.1 0.0"
    results = result_of(out)
    assert results.items() >= dict(test=1.0, learning_rate=0.1, weight_decay=0.0).items()
    assert results["computed_from"] == dict(eval_split="test", eval_protocol="finetune")
    found = [result["metric"] for result in results["validation"]]
    assert found == [0.9, 0.85, 1.0, 0.95, None, None]
    lines = capsys.readouterr().out.splitlines()
    for start, end in (("rate_1_decay_0_", "  diverged"), ("rate_0.1_decay_0.001_", "  0.9500")):
        assert any(line.startswith(start) and line.endswith(end) for line in lines)
    assert {path.name for path in out.glob("rate_*/*")} == {"record.json"}
    [interrupted] = out.glob("rate_0.01_decay_0_*")
    shutil.rmtree(interrupted)
    next(out.glob("best_*/record.json")).unlink()
    grid(*values)
    assert len(program()) == 9 and program()[7]["learning_rate"] == "0.01"
    # The grid may change. The trial with learning rate 0.1 is finished and is not repeated.
    grid(*values, "--learning_rates=0.05,0.1")
    assert len(program()) == 11 and {call["learning_rate"] for call in program()[9:]} == {"0.05"}


def test_directories_depend_on_everything_that_affects_the_trials(
    grid, other_network, program, out
):
    other = (f"--checkpoint={other_network}",)
    count = 0
    for arguments, num_new in (
        ((), 2),
        (("--jobs=1", "--flags=--checkpoint_epochs=3"), 0),
        (("--test=test[:50%]",), 1),
        (("--batch_size=64",), 2),
        (("--flags=--precision=mixed_bfloat16",), 2),
        (other, 2),
        (("--metric=mean_per_class",), 0),
    ):
        grid(*SINGLE, *arguments)
        count += num_new
        assert len(program()) == count, arguments
    [result] = result_of(out)["validation"]
    assert result["metric"] == 0.5  # The accuracy is 1.
    # Training from scratch does not depend on the weights.
    for arguments in ((), other):
        grid(*SINGLE, *arguments, protocol="scratch")
        assert len(program()) == count + 2


def test_final_run_uses_as_many_devices_as_one_trial(grid, program, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    devices = []

    def launch(self, job, visible=None):
        devices.append(visible)
        subprocess.run(job.command, check=True)

    monkeypatch.setattr(child_processes.Launcher, "run", launch)
    grid("--learning_rates=0.1", "--weight_decays=0,0.001", "--jobs=3")
    assert len(devices) == 3 and all(len(visible) == 1 for visible in devices)


def test_trials_follow_the_papers_protocol(grid, network, program):
    grid(*SINGLE, "--flags=--precision=mixed_bfloat16", "--seed=5")
    splits = ("--train=train[:50%]", "--validation=train[50%:]")
    grid(*SINGLE, *splits, protocol="scratch")
    finetune, _, scratch, final = program()
    assert "checkpoint" not in scratch and scratch["train_mode"] == "supervised"
    assert final["train_split"] == "train[:50%]+train[50%:]"
    expected = dict(
        checkpoint=network,
        train_mode="finetune",
        zero_init_logits_layer="",
        nouse_blur="",
        color_jitter_strength="0",
        warmup_epochs="0",
        optimizer="momentum",
        momentum="0.9",
        train_batch_size="256",
        train_steps="30",
        # The formula 1 - 10 / (1150 / 256) gives a negative value, so the minimum is used.
        batch_norm_decay="0.9",
        resnet_depth="10",
        image_size="8",
        precision="mixed_bfloat16",
        seed="5",
    )
    assert expected.items() <= finetune.items()
    settings = grid_search.trial_settings(
        "finetune", tasks.TASKS["food101"], 75750, 0.1, 0.0, 20000
    )
    assert float(settings["batch_norm_decay"]) == approx(1 - 10 / (75750 / 256), abs=1e-5)
    for call in (finetune, scratch, final):  # Check that run.py accepts these flags.
        config_lib.from_arguments([f"--{name}={value}".rstrip("=") for name, value in call.items()])


@pytest.mark.parametrize(
    "rates, expected, status, num_records",
    [
        ("2,3", "--learning_rates: all 2 trials diverged. Use lower learning rates.", 3, 2),
        ("0.001", "the run exited with status 1 (run.py: error: no disk)", 2, 0),
        # Only the exit status determines whether a trial diverged, even if the log reports divergence.
        ("0.003", "was killed by signal 9", 2, 0),
    ],
)
def test_failed_trials_give_one_line_errors_and_are_repeated_unless_they_diverged(
    rates, expected, status, num_records, grid, program, out, fails
):
    arguments = (f"--learning_rates={rates}", "--weight_decays=0")
    fails(expected, grid, *arguments, status=status)
    assert len(list(out.glob("*/record.json"))) == num_records


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ("--flags=--learning_rate=1",),
            "--flags: --learning_rate is set by the grid search. Remove --learning_rate",
        ),
        (("--flags=--nouse_blur",), "--flags: --use_blur is set by the grid search"),
        (("--flags=--precision=half",), "--precision=half"),
        (("--flags=--seed='",), "--flags=--seed='"),
        *(
            ((argument,), f"argument {argument.split('=')[0]}:")
            for argument in ("--jobs=0", "--seed=-1", "--learning_rates=0.1,0", "--weight_decays=x")
        ),
        (
            ("--out=gs://bucket/out",),
            "--out=gs://bucket/out: the trials' logs need a local directory",
        ),
    ],
)
def test_invalid_grids_give_one_line_errors_and_create_no_directory(
    arguments, expected, grid, out, fails
):
    fails(expected, grid, *arguments)
    assert not out.exists()


def test_corrupt_record_is_reported_and_an_empty_one_is_repeated(grid, program, out, fails):
    grid(*SINGLE)
    [path] = out.glob("rate_*/record.json")
    path.write_text("{")
    fails(f"{path}: the file is corrupt", grid, *SINGLE)
    path.write_text("")
    grid(*SINGLE)
    assert len(program()) == 3


def test_trials_hold_the_lock_of_the_output_directory(grid, program, monkeypatch, out):
    """Checks that a trial whose search was killed still prevents a second search in the directory."""
    monkeypatch.setattr(
        child_processes.Launcher,
        "run",
        lambda self, job, devices=None: (inherited.extend(map(os.fstat, job.inherited)), 1 / 0),
    )
    inherited = []
    with pytest.raises(ZeroDivisionError):
        grid(*SINGLE)
    assert os.path.samestat(inherited[0], os.stat(out / "train.lock"))


@pytest.mark.slow
def test_training_from_scratch_on_a_folder_skips_a_corrupt_image(grid, tmp_path, out):
    dataset = write_folder(tmp_path, train=20, val=10, test=10)
    for path in (tmp_path / "photos").glob("*/*/*.png"):
        color = np.full([10, 12, 3], 255 * (path.parent.name == "dog"), np.uint8)
        path.write_bytes(tf.io.encode_png(color).numpy())
    (tmp_path / "photos" / "train" / "cat" / "bad.png").write_bytes(b"nothing")
    flags = ("--corrupt_images=skip", "--metric=mean_per_class", "--steps=20", "--batch_size=16")
    values = ("--learning_rates=1", "--weight_decays=0.001")
    grid(dataset, *flags, *values, protocol="scratch")
    results = result_of(out)
    assert results["test"] == results["validation"][0]["metric"] == 1.0
    assert len(np.load(out / "predictions.npz")["labels"]) == 20


@pytest.mark.slow
def test_fine_tuning_with_the_real_run_py_selects_the_better_learning_rate(
    grid, tmp_path, monkeypatch, out
):
    monkeypatch.setitem(resnet.DEPTHS, 10, (False, (1, 1, 1, 1)))  # as in the processes of run.py
    splits = ("--train=train[:300]", "--validation=train[300:400]", "--test=test[:100]")
    values = ("--learning_rates=1,1000", "--weight_decays=0", "--steps=60", "--batch_size=32")
    grid(f"--checkpoint={write_network(tmp_path)}", *splits, *values)
    results = result_of(out)
    assert results["learning_rate"] == 1 and results["test"] > 0.3
    saved = np.load(out / "predictions.npz")
    hits = saved["logits"].argmax(1) == saved["labels"]
    assert hits.mean() == results["test"] and len(hits) == 100


def test_output_directory_in_a_relative_link_may_have_any_name_and_contain_files_of_the_user(
    grid, tmp_path, program, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.symlink("real", "link")
    name = "-x $(touch y);'\"" + "\u00e9" * 119  # 255 bytes
    files = ("notes.txt", "rate_0.1_decay_0/notes.txt", "best_rate_0.1_decay_0/draft.tmp")
    for path in map((tmp_path / "real" / name).joinpath, files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("notes")
    grid(f"--out=link/{name}", *SINGLE)
    assert (tmp_path / "real" / name / "result.json").exists()
    assert all((tmp_path / "link" / name / file).read_text() == "notes" for file in files)
    assert {entry.name for entry in tmp_path.iterdir()} == {"program", "real", "link"}


@pytest.mark.parametrize("flag", ["out", "checkpoint"])
@pytest.mark.parametrize("value", ["x*", "a\nb", "", "s3://x/y"])
def test_unsafe_paths_are_rejected(flag, value, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    for command in ("linear", "finetune"):
        arguments = [command, "--checkpoint=x", "--dataset=digits", f"--{flag}={value}"]
        fails(f"--{flag}=", cli.main, arguments)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- significance


def draw_correct(count, *accuracies, seed=0):
    random = default_rng(seed)
    return [random.random(count) < accuracy for accuracy in accuracies]


@pytest.mark.parametrize(
    "count, accuracy, other_accuracy", [(40, 0.6, 0.7), (1000, 0.8, 0.82), (9, 0, 1)]
)
def test_permutation_test_on_accuracies_matches_the_mcnemar_test(count, accuracy, other_accuracy):
    correct, other_correct = draw_correct(count, accuracy, other_accuracy)
    only_first, only_second = (correct & ~other_correct).sum(), (other_correct & ~correct).sum()
    exact = stats.binomtest(int(only_first), int(only_first + only_second)).pvalue
    result = significance.permutation_test(correct, other_correct)
    assert result["difference"] == approx(correct.mean() - other_correct.mean())
    assert result["p"] == approx(exact, abs=4 * np.sqrt(0.25 / significance.NUM_PERMUTATIONS))
    assert significance.permutation_test(correct, correct) == dict(difference=0.0, p=1.0)


def test_permutation_test_on_mean_per_class_accuracies_matches_scipy():
    labels = default_rng(1).choice([0, 1, 4, 7], 60, p=[0.1, 0.2, 0.3, 0.4])
    correct, other_correct = draw_correct(60, 0.75, 0.6, seed=2)

    def difference(first, second):
        classes = [labels == label for label in (0, 1, 4, 7)]
        return np.mean([first[rows].mean() - second[rows].mean() for rows in classes])

    expected = stats.permutation_test(
        (correct, other_correct), difference, permutation_type="samples", n_resamples=4000
    )
    result = significance.permutation_test(correct, other_correct, labels)
    assert result["difference"] == approx(expected.statistic)
    assert result["p"] == approx(expected.pvalue, abs=4 * np.sqrt(0.25 / 4000))


def test_multi_label_predictions_are_compared_by_accuracy():
    random = default_rng(3)
    labels = random.integers(-1, 2, (50, 4))
    labels[:, 0] = np.maximum(labels[:, 0], 0)
    scores, other_scores = labels + random.normal(size=(2, 50, 4)) * [[[0.5]], [[0.9]]] - 0.5
    correct, other_correct = (
        [np.mean((row > 0) == known, where=known >= 0) for row, known in zip(values, labels)]
        for values in (scores, other_scores)
    )
    result = significance.compare(labels, scores, other_scores, "mean_average_precision")
    assert result == approx(significance.permutation_test(correct, other_correct))


LABELS = np.arange(6) % 2
LOGITS = np.eye(2)[LABELS]
MULTI_LABELS = LOGITS.astype(np.int64)


@pytest.mark.parametrize(
    "labels, logits",
    [
        (LABELS.astype(np.uint8), LOGITS.astype(np.float16)),
        (LABELS + 5, np.where(LOGITS > 0, 1.0, -np.inf)),
        (MULTI_LABELS - [1, 0], LOGITS),
    ],
)
def test_valid_predictions_are_accepted(labels, logits, tmp_path):
    """Checks that valid predictions are accepted, including logits of -inf, which mean that a class was not learned."""
    np.savez(tmp_path / "x.npz", labels=labels, logits=logits)
    assert_equal(output.read_predictions(f"{tmp_path}/x.npz"), (labels, logits))


@pytest.mark.parametrize(
    "labels, logits, expected",
    [
        (LABELS, LOGITS * np.nan, None),
        (LABELS, LOGITS - np.inf, None),
        (LABELS / 1, LOGITS, None),
        (LABELS - 1, LOGITS, None),
        (MULTI_LABELS * 0 - 1, LOGITS, None),
        (LABELS, LOGITS[:4], None),
        (MULTI_LABELS, LOGITS[:, :1], None),
        (LABELS[:4], LOGITS[:4], "the predictions are for different examples"),
        (LABELS.astype(object), LOGITS, "x.npz: the arrays labels, logits cannot be read"),
    ],
)
def test_invalid_predictions_are_rejected(labels, logits, expected, tmp_path, fails):
    np.savez(tmp_path / "x.npz", labels=labels, logits=logits)
    np.savez(tmp_path / "good.npz", labels=LABELS, logits=LOGITS)
    arguments = ["compare", f"{tmp_path}/good.npz", f"{tmp_path}/x.npz"]
    fails(expected or "x.npz: expected integer labels", cli.main, arguments)


def test_compare_reports_significance(tmp_path, capsys):
    labels = np.arange(200) % 2
    for name, num_wrong in (("good", 10), ("bad", 80)):
        predictions = np.where(np.arange(200) < num_wrong, 1 - labels, labels)
        np.savez(tmp_path / f"{name}.npz", labels=labels, logits=np.eye(2)[predictions])
    cli.main(["compare", f"{tmp_path}/good.npz", f"{tmp_path}/bad.npz"])
    assert "the difference is significant" in capsys.readouterr().out
