"""Transfer: the l2 path against cold fits, the protocol from end to end, significance."""

import json
import os
import re
import shutil
import subprocess
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import config as config_lib
import model as model_lib
from checkpoints import weight_files
from checkpoints.lock import Lock
from config import Config
from probing import features, logistic_regression
from runtime import child_processes
from runtime.errors import UserError
from sources import digits
from support import hostile
from support.flags import make_flags
from support.images import write_images
from transfer import cli, grid_search, linear_evaluation, measures, output, significance, tasks

SMALL = dict(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16)


@pytest.fixture(scope="module")
def sets():
    """Three sets of four overlapping classes, with features that are positive and unlike in size, as an encoder's."""
    random = np.random.default_rng(0)
    centers, sizes = random.normal(size=(4, 12)), 10.0 ** random.uniform(-0.5, 0.5, 12)

    def draw(count):
        labels = random.integers(0, 4, count)
        drawn = np.maximum(centers[labels] + 1 + 2 * random.normal(size=(count, 12)), 0) * sizes
        return drawn.astype(np.float32), labels

    return draw(300), draw(150), draw(200)


# ---------------------------------------------------------------------------------------------------------- the path


def objective(scores, weights, labels, l2_of_sum):
    """Mean cross-entropy + l2_of_sum / 2 |W|^2 for each example, in plain NumPy."""
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean() + l2_of_sum / 2 * (weights**2).sum() / len(labels)


def test_the_path_against_cold_fits(sets):
    from sklearn import linear_model

    (inputs, labels), _, (test_inputs, test_labels) = sets
    path = logistic_regression.LogisticPath(inputs, labels)
    for number, l2_of_sum in enumerate(linear_evaluation.L2_OF_SUM_CHOICES):
        path.fit(l2_of_sum)
        if number % 4 and number < 40:  # All of the weakest, which take longest.
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cold = linear_model.LogisticRegression(
                C=1 / l2_of_sum, max_iter=logistic_regression.PATH_ITERATIONS, tol=logistic_regression.PATH_TOLERANCE)
            cold.fit(np.float64(inputs), labels)
        warm_loss = objective(path.scores(inputs), path.kernel, labels, l2_of_sum)
        assert warm_loss <= objective(cold.decision_function(inputs), cold.coef_, labels, l2_of_sum) + 1e-4
        hits = path.scores(test_inputs).argmax(1) == test_labels
        assert hits.mean() == pytest.approx(cold.score(test_inputs, test_labels), abs=0.03)


def test_the_path_with_more_features_than_examples():
    """Which weak regularisation separates, so that losses are near zero, and minima far away."""
    from sklearn import linear_model

    random = np.random.default_rng(4)
    inputs, labels = np.maximum(random.normal(size=(60, 200)) + 0.5, 0).astype(np.float32), np.arange(60) % 3
    path = logistic_regression.LogisticPath(inputs, labels)
    for number, l2_of_sum in enumerate(linear_evaluation.L2_OF_SUM_CHOICES):
        warm_loss = objective(path.fit(l2_of_sum).scores(inputs), path.kernel, labels, l2_of_sum)
        if number % 6 == 0:
            cold = linear_model.LogisticRegression(C=1 / l2_of_sum, max_iter=10_000, tol=1e-9)
            cold.fit(np.float64(inputs), labels)
            assert warm_loss <= objective(cold.decision_function(inputs), cold.coef_, labels, l2_of_sum) + 1e-4


def test_two_classes_are_a_softmax_too(sets):
    """Whose weights are those of one classifier in halves: their squares are half as much."""
    from sklearn import linear_model

    inputs, labels = sets[0]
    inputs, labels = inputs[labels < 2], labels[labels < 2]
    scores = logistic_regression.LogisticPath(inputs, labels).fit(2.0).scores(inputs)
    cold = linear_model.LogisticRegression(max_iter=3000, tol=1e-8).fit(np.float64(inputs), labels)
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], cold.decision_function(inputs), atol=0.01)


def test_a_sweep_goes_on_where_it_was_stopped(sets):
    fit, choose, _ = sets
    strengths, noted = (100.0, 1.0, 0.01), []
    best, found = linear_evaluation.sweep(fit, choose, "top_1", strengths, note=lambda found: noted.append(dict(found)))
    assert [len(each) for each in noted] == [1, 2, 3] and noted[-1] == found
    noted.clear()
    again = linear_evaluation.sweep(fit, choose, "top_1", strengths, found={100.0: found[100.0], 1.0: 0.0},
                                    note=noted.append)
    assert len(noted) == 1 and again[1][1.0] == 0.0  # Taken as it was given, not fitted.
    assert again[1][0.01] == pytest.approx(found[0.01], abs=0.02) and again[0] in (100.0, 0.01)


def test_classes_that_were_not_seen_are_never_chosen(sets):
    inputs, labels = sets[0]
    for kept in ((0, 2), (0, 1, 3), (2, 3)):
        rows = np.isin(labels, kept)
        scores = logistic_regression.LogisticPath(inputs[rows], labels[rows]).fit(1.0).scores(inputs)
        assert scores.shape == (300, max(kept) + 1) and set(scores.argmax(1)) <= set(kept)
        assert (scores.argmax(1) == labels)[rows].mean() > 0.5


def test_one_against_the_rest(sets):
    from sklearn import linear_model

    inputs, labels = sets[0]
    several = np.eye(4, dtype=np.int64)[labels]
    several[:40, 1], several[:, 3] = -1, 0  # left out; never shown
    scores = logistic_regression.LogisticPath(inputs, several).fit(10.0).fit(1.0).scores(inputs)
    for number in range(3):
        rows = several[:, number] >= 0
        cold = linear_model.LogisticRegression(max_iter=3000, tol=1e-6).fit(
            np.float64(inputs[rows]), several[rows, number])
        np.testing.assert_allclose(scores[:, number], cold.decision_function(inputs), atol=0.05)
    assert (scores[:, 3] == -np.inf).all()


def test_l2_is_chosen_on_the_validation_set(sets):
    from sklearn import linear_model

    fit, choose, test = sets
    results, scores = linear_evaluation.linear(fit, choose, test, "top_1")
    found = {cell["l2"]: cell["metric"] for cell in results["validation"]}
    assert max(found.values()) == found[results["l2"]]
    assert np.mean(scores.argmax(1) == test[1]) > 0.6
    np.testing.assert_allclose(np.log10(list(found)), np.linspace(5, -6, 45), atol=1e-9)
    both = [np.concatenate(pair) for pair in zip(fit, choose)]
    cold = linear_model.LogisticRegression(C=1 / results["l2"], max_iter=3000, tol=1e-6)
    expected = cold.fit(np.float64(both[0]), both[1]).decision_function(test[0])
    expected -= expected.mean(1, keepdims=True)
    np.testing.assert_allclose(scores - scores.mean(1, keepdims=True), expected, atol=0.05)


def test_the_strongest_of_the_best_is_chosen(sets):
    """Labels to choose by are what one strength predicts: nothing is better, and equals are weaker or no better."""
    fit, (inputs, _), _ = sets
    strengths = (1e4, 30.0, 1.0, 1e-3)
    path = logistic_regression.LogisticPath(*fit)
    predicted = {l2_of_sum: path.fit(l2_of_sum).scores(inputs).argmax(1) for l2_of_sum in strengths}
    for l2_of_sum in strengths:
        best, found = linear_evaluation.sweep(fit, (inputs, predicted[l2_of_sum]), "top_1", strengths)
        assert found[l2_of_sum] == 1.0 and best == max(each for each in strengths if found[each] == 1.0)
    assert len({tuple(labels) for labels in predicted.values()}) == 4  # Else the test would not tell them apart.


# ------------------------------------------------------------------------------------------------------- end to end


@pytest.fixture
def few_iterations(monkeypatch):
    """Fits cut short: how well they fit is tested above."""
    monkeypatch.setattr(logistic_regression, "PATH_ITERATIONS", 30)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    directory = tmp_path_factory.mktemp("network")
    tf.train.Checkpoint(model=model_lib.build_model(Config(**SMALL), 10)).write(str(directory / "ckpt-1"))
    # Of its training's settings, those of evaluations do not count.
    settings = {"image_size": 8, "eval_steps": 1, "eval_split": "test[:150]", "eval_batch_size": 10}
    (directory / "flags.json").write_text(json.dumps(settings))
    return str(directory / "ckpt-1")


def run(*arguments):
    cli.main(["linear", *arguments])


def test_linear_transfer_to_digits(network, few_iterations, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = (f"--checkpoint={network}", "--dataset=digits", "--train=train[:320]", "--validation=train[320:400]",
               "--test=test[:150]", f"--out={out}")
    run(*command)
    results = json.loads((out / "result.json").read_text())
    source, found = digits.digits_source(), {}
    for name, split in (("train", "train[:320]"), ("validation", "train[320:400]"), ("test", "test[:150]")):
        saved = np.load(out / f"features_{name}.npz")
        assert saved["labels"].tolist() == [int(label) for *_, label in source.records(split)]
        found[name] = saved["vectors"], saved["labels"]
    assert results["metric"] == "top_1" and results["test"] > 0.15  # Even by random features.
    predictions = np.load(out / "predictions.npz")
    again, scores = linear_evaluation.linear(*found.values(), "top_1")
    np.testing.assert_array_equal(predictions["logits"], scores)
    assert again["l2"] == results["l2"] and again["validation"] == results["validation"]
    assert (predictions["logits"].argmax(1) == predictions["labels"]).mean() == results["test"]
    assert f"top 1          {results['test']:.4f}" in capsys.readouterr().out
    monkeypatch.setattr(features, "extract", None)  # As after an interruption: what is there is not computed again.
    run(*command)
    assert json.loads((out / "result.json").read_text()) == results


def test_linear_transfer_to_a_folder(network, few_iterations, tmp_path, capsys):
    for split, count in (("train", 12), ("test", 6)):
        for name in ("cat", "dog"):
            write_images(tmp_path / "photos" / split / name, *(f"{number}.png" for number in range(count)))
    run(f"--checkpoint={network}", "--task=aircraft", f"--dataset=folder:{tmp_path / 'photos'}",
        "--validation=train[:7]", "--train=train[7:]", f"--out={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert "mean per class" in printed and "FGVC Aircraft" in printed
    counts = [len(np.load(tmp_path / "out" / f"features_{name}.npz")["labels"])
              for name in ("train", "validation", "test")]
    assert counts == [17, 7, 12]


@pytest.mark.parametrize("arguments, words", [
    ((), "give --task, one of food101, "),
    (("--task=birdsnap",), "TFDS does not have Birdsnap: give --dataset=folder:DIR"),
    (("--dataset=digits", "--train=train[:50%]"), "nothing is held out by itself: give --validation"),
    (("--dataset=digits", "--checkpoint=/no/such"), "--checkpoint=/no/such"),
    (("--dataset=digits", "--test=validation"), "--test=validation: digits has no such split"),
    (("--dataset=digits", "--metric=mean_average_precision"), "--metric=mean_average_precision does not fit digits"),
    (("--dataset=digits", "--out=/proc/none/out"), "--out=/proc/none/out: the directory cannot be created")])
def test_mistakes_are_told_in_one_line(arguments, words, network, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run(f"--checkpoint={network}", f"--out={tmp_path / 'out'}", *arguments)
    told = capsys.readouterr().err
    assert error.value.code == 2 and words in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()  # So that the same command, mended, may use it.


def test_features_that_are_no_numbers_are_told(network, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(features, "encoder_function", lambda model: lambda images: images[:, 0, 0] / 0)
    with pytest.raises(SystemExit) as error:
        run(f"--checkpoint={network}", "--dataset=digits", "--train=train[:60]", "--validation=train[60:80]",
            "--test=test[:20]", f"--out={tmp_path / 'out'}")
    told = capsys.readouterr().err
    assert error.value.code == 2 and "features of train[:60] contain NaN or Inf" in told and told.count("\n") == 1


def test_images_are_whole_in_height_and_cut_in_width(network, few_iterations, tmp_path, monkeypatch):
    """Above 32 pixels, too (paper, B.8.1): the shorter side is kept, of the longer one the centre."""
    random, images = np.random.default_rng(0), {}
    for split in ("train", "validation", "test"):
        for name in ("cat", "dog"):
            path = tmp_path / "photos" / split / name / "1.png"
            path.parent.mkdir(parents=True)
            images[split, name] = random.integers(0, 256, (40, 60, 3), np.uint8)
            path.write_bytes(tf.io.encode_png(images[split, name]).numpy())
    monkeypatch.setattr(features, "encoder_function", lambda model: lambda images: tf.reshape(images, [-1, 4800]))
    run(f"--checkpoint={network}", f"--dataset=folder:{tmp_path / 'photos'}", "--validation=validation",
        "--image_size=40", f"--out={tmp_path / 'out'}")
    saved = np.load(tmp_path / "out" / "features_test.npz")
    for label, name in enumerate(("cat", "dog")):
        row = saved["vectors"][saved["labels"].tolist().index(label)]
        np.testing.assert_allclose(row.reshape(40, 40, 3), images["test", name][:, 10:50] / 255, atol=1e-6)


def test_other_weights_make_another_transfer(network, few_iterations, tmp_path, capsys):
    arguments = ("--dataset=digits", "--train=train[:60]", "--validation=train[60:80]", "--test=test[:20]",
                 "--image_size=8", f"--out={tmp_path / 'out'}")
    directory = tmp_path / "network"
    for step in (1, 2):
        model = model_lib.build_model(Config(**SMALL), 10)
        tf.train.Checkpoint(model=model).write(str(directory / f"ckpt-{step}"))
        (directory / "checkpoint").write_text(f'model_checkpoint_path: "ckpt-{step}"\n')
        if step == 1:
            run(f"--checkpoint={directory}", *arguments)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(f"--checkpoint={directory}", *arguments)
    assert re.search(r"was begun with weights step None, content (\w+) \(now step None, content (?!\1)\w+\)",
                     capsys.readouterr().err)


SETTINGS = dict(command="linear", weights="step 1, content abc", seed=0)


@pytest.mark.parametrize("settings", [None, *hostile.HOSTILE.values(), b"{}", b'{"a": 1}'])
@pytest.mark.parametrize("result", [
    "features_train.npz", "sweep.json", "rate_0.1_decay_0.json", "best_rate_0.1_decay_0", "predictions.npz",
    "result.json"])
def test_results_of_unknown_settings_are_refused(result, settings, tmp_path):
    (tmp_path / result).touch()
    if settings is not None:
        (tmp_path / "settings.json").write_bytes(settings)
    with pytest.raises(UserError, match=f"--out={tmp_path}: it") as error:
        output._check_begun(str(tmp_path), SETTINGS)
    assert "\n" not in str(error.value)


def test_results_of_the_same_settings_are_accepted(tmp_path):
    output._check_begun(str(tmp_path), SETTINGS)
    (tmp_path / "notes.txt").touch()
    output._check_begun(str(tmp_path), SETTINGS)
    (tmp_path / "result.json").touch()
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    output._check_begun(str(tmp_path), SETTINGS)
    with pytest.raises(UserError, match="weights step 1, content abc .now step 2"):
        output._check_begun(str(tmp_path), {**SETTINGS, "weights": "step 2"})


def test_features_and_sweeps_belong_to_their_settings(network, few_iterations, tmp_path, capsys):
    out = tmp_path / "out"
    command = (f"--checkpoint={network}", "--dataset=digits", "--train=train[:60]", "--validation=train[60:80]",
               "--test=test[:20]", f"--out={out}")
    run(*command)
    (out / "result.json").unlink()
    features_of = dict(np.load(out / "features_validation.npz"))
    sweep = json.loads((out / "sweep.json").read_text())
    for path, contents, words in (
            ("features_validation.npz", [{"settings": "0123"}], "was written with other settings"),
            ("features_validation.npz", [{"vectors": features_of["vectors"] * np.nan},
                                     {"vectors": np.full([20, 512], np.inf)}], "contain NaN or infinite values"),
            ("features_validation.npz", [{"vectors": np.full([20, 2], "x")},
                                         {"labels": np.float32(features_of["labels"])},
                                         {"labels": features_of["labels"][1:]}, {"labels": np.int64(3)}],
             "are not features and labels"),
            ("features_validation.npz", [{"vectors": np.array([None])}], "cannot be read as a file of vectors"),
            ("sweep.json", [{"settings": "0123"}, {"settings": None}], "was written with other settings"),
            ("sweep.json", [{"metrics": {"1.0": float("nan")}}, {"metrics": {"x": 0.5}}, {"metrics": []},
                            {"metrics": {"1.0": "0.5"}}, {"metrics": {"1.0": 10**400}}], "are not numbers from 0")):
        before = (out / path).read_bytes()
        for content in contents:
            if path == "sweep.json":
                (out / path).write_text(json.dumps({**sweep, **content}))
            else:
                np.savez(out / path, **{**features_of, **content})
            with pytest.raises(SystemExit) as error:
                run(*command)
            told = capsys.readouterr().err
            assert error.value.code == 2 and path in told and words in told and told.count("\n") == 1
        (out / path).write_bytes(before)
    assert not (out / "result.json").exists()
    run(*command)
    assert (out / "result.json").exists()


def test_metrics_that_are_nan_are_errors(sets):
    fit, choose, _ = sets
    with pytest.raises(UserError, match="--metric=top_1: it is NaN, since the scores contain NaN"):
        measures.measure("top_1", np.array([0, 1]), np.array([[0.1, np.nan], [0.0, 1.0]]))
    several = np.zeros([len(choose[1]), 4], np.int64)  # No class is shown.
    with pytest.raises(UserError, match="--metric=mean_average_precision: it is NaN, since no label is 1"):
        linear_evaluation.sweep(
            (fit[0], np.eye(4, dtype=np.int64)[fit[1]]), (choose[0], several), "mean_average_precision",
                       (1.0,))


def test_the_same_weights_in_another_place_are_the_same(network, tmp_path):
    digests = []
    for name in ("here", "there"):
        shutil.copytree(os.path.dirname(network), tmp_path / name)
        digests.append(output.digest_of_weights(weight_files.open_weights(str(tmp_path / name / "ckpt-1"))))
    assert digests[0] == digests[1]


def test_a_validation_folder_is_used(network, few_iterations, tmp_path, capsys):
    for split, count in (("train", 12), ("val", 4), ("test", 3)):
        for name in ("cat", "dog"):
            write_images(tmp_path / "photos" / split / name, *(f"{number}.png" for number in range(count)))
    run(f"--checkpoint={network}", f"--dataset=folder:{tmp_path / 'photos'}", f"--out={tmp_path / 'out'}")
    assert "has a validation split, which chooses settings" in capsys.readouterr().out
    counts = [len(np.load(tmp_path / "out" / f"features_{name}.npz")["labels"])
              for name in ("train", "validation", "test")]
    assert counts == [24, 8, 6]


def test_a_transfer_that_runs_is_not_begun_again(network, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with Lock(str(tmp_path / "out")), pytest.raises(SystemExit):
        run(f"--checkpoint={network}", "--dataset=digits", f"--out={tmp_path / 'out'}")
    assert f"--out={tmp_path / 'out'} is in use by process " in capsys.readouterr().err


def test_tasks_are_the_papers():
    by_metric = {}
    for name, task in tasks.TASKS.items():
        by_metric.setdefault(task.metric, set()).add(name)
    assert len(tasks.TASKS) == 12 and by_metric["mean_average_precision"] == {"voc2007"}
    assert by_metric["mean_per_class"] == {"aircraft", "pets", "caltech101", "flowers"}
    divided = {name for name, task in tasks.TASKS.items() if task.validation}
    assert divided == {"aircraft", "voc2007", "dtd", "flowers"}
    assert tasks.TASKS["dtd"].trainval_split == "train+validation"
    assert tasks.TASKS["cars"].validation_split == "train[80%:]"


# ------------------------------------------------------------------------------------------------------------- grids


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
if rate < 0.002:
    sys.exit("run.py: error: no disk")
right = round(20 * (1 - abs(rate - 0.1)) - 1000 * float(flags["weight_decay"]) * rate)
labels = np.zeros(20, int)
os.makedirs(flags["model_dir"], exist_ok=True)
np.savez(os.path.join(flags["model_dir"], f"predictions_{flags['train_steps']}.npz"), labels=labels,
         logits=np.eye(2)[(np.arange(20) >= right).astype(int)])
with open(os.path.join(flags["model_dir"], "result.json"), "w") as file:
    json.dump({"eval/label_top_1_accuracy": right / 20}, file)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program in place of run.py, best at a rate of 0.1 without weight decay; a function that tells its calls."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "run.py").write_text(_PROGRAM)
    monkeypatch.setattr(grid_search, "_ROOT", str(tmp_path / "program"))

    def calls():
        return [json.loads(line) for line in (tmp_path / "program" / "calls").read_text().splitlines()]

    return calls


def grid(network, out, *more, kind="finetune"):
    cli.main([kind, f"--checkpoint={network}", "--dataset=digits", f"--out={out}", "--steps=30", "--jobs=2",
                   *more])


def test_a_grid_is_searched_and_the_best_is_tested(network, tmp_path, program, capsys):
    rates = ("--learning_rates=0.01,0.1,1", "--weight_decays=0,0.001")
    grid(network, tmp_path / "out", *rates)
    calls = program()
    assert len(calls) == 7 and {call["train_split"] for call in calls[:6]} == {"train[:80%]"}
    assert {call["eval_split"] for call in calls[:6]} == {"train[80%:]"}
    assert {(call["learning_rate"], call["weight_decay"]) for call in calls[:6]} == {
        ("0.01", "0"), ("0.01", "0.1"), ("0.1", "0"), ("0.1", "0.01"), ("1", "0"), ("1", "0.001")}
    last = calls[6]
    assert (last["train_split"], last["eval_split"], last["learning_rate"]) == ("train", "test", "0.1")
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert results["test"] == 1.0 and (results["learning_rate"], results["weight_decay"]) == (0.1, 0.0)
    assert [cell["metric"] for cell in results["validation"]] == [0.9, 0.85, 1.0, 0.95, None, None]
    printed = capsys.readouterr().out
    assert "rate_1_decay_0  diverged" in printed and "rate_0.1_decay_0.001  0.9500" in printed
    assert not (tmp_path / "out" / "rate_0.1_decay_0").exists()  # Weights of all trainings would fill a disk.
    (tmp_path / "out" / "rate_0.01_decay_0.json").unlink()  # As if it had been interrupted.
    grid(network, tmp_path / "out", *rates)
    assert len(program()) == 8 and program()[7]["learning_rate"] == "0.01"
    grid(network, tmp_path / "out", *rates, "--learning_rates=0.05,0.1")  # More of them: the others are there already.
    assert len(program()) == 10 and {call["learning_rate"] for call in program()[8:]} == {"0.05"}


def test_the_last_training_has_the_devices_of_one_of_many(network, tmp_path, program, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    devices = []
    monkeypatch.setattr(child_processes.Launcher, "run", lambda self, job, given=None: (
        devices.append(given), subprocess.run(job.command, check=True)))
    grid(network, tmp_path / "out", "--learning_rates=0.1", "--weight_decays=0,0.001", "--jobs=3")
    assert len(devices) == 3 and all(len(given) == 1 for given in devices)


def test_trainings_are_those_of_the_paper(network, tmp_path, program):
    one = ("--learning_rates=0.1", "--weight_decays=0.001")
    grid(network, tmp_path / "fine", *one, "--flags=--precision=mixed_bfloat16")
    grid(network, tmp_path / "random", *one, kind="scratch")
    fine, _, random, last = program()
    assert fine["checkpoint"] == network and "checkpoint" not in random
    assert (fine["train_mode"], random["train_mode"]) == ("finetune", "supervised")
    assert fine["precision"] == "mixed_bfloat16" and "nouse_blur" in fine and fine["color_jitter_strength"] == "0"
    assert {fine["optimizer"], fine["momentum"], fine["train_batch_size"], fine["train_steps"]} == {
        "momentum", "0.9", "256", "30"}
    assert fine["resnet_depth"] == "10" and fine["image_size"] == "8"
    assert float(fine["batch_norm_decay"]) == 0.9  # 1 - 10 / (1150 / 256) is less.
    settings = grid_search.training_flags("finetune", tasks.TASKS["food101"], 75750, 0.1, 0.0, 20000)
    assert float(settings["batch_norm_decay"]) == pytest.approx(1 - 10 / (75750 / 256), abs=1e-5)
    for given in (fine, random, last):  # They are settings that run.py takes.
        values = make_flags()
        values(["run.py", *(f"--{name}={value}" if value else f"--{name}" for name, value in given.items())])
        config_lib.from_flags(values)


def test_the_grids_are_the_papers():
    fine, random = tasks.GRIDS["finetune"], tasks.GRIDS["scratch"]
    assert (fine.steps, random.steps) == (20_000, 40_000)
    np.testing.assert_allclose(np.log10(fine.learning_rates), np.linspace(-4, -1, 7))
    np.testing.assert_allclose(np.log10(random.learning_rates), np.linspace(-3, 0, 7))
    assert fine.weight_decays[0] == 0
    np.testing.assert_allclose(np.log10(fine.weight_decays[1:]), np.linspace(-6, -3, 7))
    np.testing.assert_allclose(np.log10(random.weight_decays), np.linspace(-5, -1.5, 8))


@pytest.mark.parametrize("more, words", [
    (("--learning_rates=2,3", "--weight_decays=0"),
     "training has diverged with all 2 settings. Use lower learning rates."),
    (("--learning_rates=0.001", "--weight_decays=0"), "the run ended with status 1 (run.py: error: no disk)")])
def test_failed_trainings_end_with_one_line(more, words, network, tmp_path, program, capsys):
    with pytest.raises(SystemExit) as error:
        grid(network, tmp_path / "out", *more)
    told = capsys.readouterr().err
    assert error.value.code == (3 if "diverged" in words else 2) and words in told and told.count("\n") == 1


@pytest.mark.parametrize("more, words", [
    (("--flags=--learning_rate=1",), "--flags: --learning_rate is set by the grid search. Remove it."),
    (("--flags=--model_dir=x",), "--flags: --model_dir is set by the grid search"),
    (("--flags=--nouse_blur",), "--flags: --use_blur is set by the grid search"),
    (("--flags=--precision=half",), "--flags: flag --precision=half: value should be one of"),
    (("--flags=--min_crop_area=2",), "--min_crop_area=2"), (("--flags=--seed='",), "--flags=--seed='"),
    (("--jobs=0",), "--jobs=0 is below 1: raise it"),
    (("--steps=0",), "--steps=0 is below 1"), (("--learning_rates=0.1,0",), "--learning_rates=0 is not above 0"),
    (("--weight_decays=-1",), "--weight_decays=-1.0 is below 0"),
    (("--seed=-1",), "--seed=-1 is below 0"), (("--batch_size=0",), "--batch_size=0 is below 1"),
    (("--flags=--train_epochs=3",), "--flags: --train_epochs is set by the grid search"),
    (("--out=gs://bucket/out",), "--out=gs://bucket/out: the trainings' logs need a local directory"),
    (("--learning_rates=0.1,0.1001",), "must differ in their first three digits"),
    (("--batch_size=5000",), "--batch_size=5000: the split train[:80%] has only 1150 examples. Use at most 1150.")])
def test_a_grid_that_cannot_be_is_told(more, words, network, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        grid(network, tmp_path / "out", *more)
    told = capsys.readouterr().err
    assert error.value.code == 2 and words in told and told.count("\n") == 1 and not (tmp_path / "out").exists()


def test_what_is_not_a_divergence_is_no_result(network, tmp_path, program, capsys):
    """A run that did not measure what is asked for."""
    (tmp_path / "program" / "run.py").write_text(_PROGRAM.replace("eval/label_top_1_accuracy", "eval/other"))
    with pytest.raises(SystemExit):
        grid(network, tmp_path / "out", "--learning_rates=0.1", "--weight_decays=0")
    assert "result.json: eval/label_top_1_accuracy is None, not a number" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("rate*.json"))


@pytest.mark.parametrize("metric", ["float('nan')", "None", "'0.5'", "[]", "10**400", "-0.1"])
def test_a_metric_that_is_not_a_number_is_an_error(metric, network, tmp_path, program, capsys):
    (tmp_path / "program" / "run.py").write_text(_PROGRAM.replace("right / 20}", f"{metric}}}"))
    with pytest.raises(SystemExit) as error:
        grid(network, tmp_path / "out", "--learning_rates=0.1", "--weight_decays=0")
    told = capsys.readouterr().err
    assert error.value.code == 2 and "result.json: eval/label_top_1_accuracy is" in told and told.count("\n") == 1
    assert not list((tmp_path / "out").glob("rate*.json"))


def test_a_killed_training_has_not_diverged(network, tmp_path, program, capsys):
    """Also if an earlier start has written so to its log."""
    killed = "print('run.py: error: training has diverged: at step 3', flush=True); os.kill(os.getpid(), 9)\n"
    (tmp_path / "program" / "run.py").write_text(_PROGRAM.replace("rate = float", f"{killed}rate = float"))
    one = ("--learning_rates=0.1", "--weight_decays=0")
    for _ in range(2):
        with pytest.raises(SystemExit) as error:
            grid(network, tmp_path / "out", *one)
        told = capsys.readouterr().err
        assert error.value.code == 2 and "was killed by signal 9" in told and told.count("\n") == 1
        assert not list((tmp_path / "out").glob("rate*.json"))
    (tmp_path / "program" / "run.py").write_text(_PROGRAM)
    grid(network, tmp_path / "out", *one)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["test"] == 1.0


def test_trials_belong_to_their_settings(network, tmp_path, program, capsys):
    one, path = ("--learning_rates=0.1", "--weight_decays=0"), tmp_path / "out" / "rate_0.1_decay_0.json"
    grid(network, tmp_path / "out", *one)
    trial = json.loads(path.read_text())
    for change, words in (({"settings": "0123"}, "other settings"), ({"settings": None}, "other settings"),
                          ({"metric": float("nan")}, "metric=nan"), ({"metric": "0.5"}, "metric=0.5")):
        path.write_text(json.dumps({**trial, **change}))
        with pytest.raises(SystemExit) as error:
            grid(network, tmp_path / "out", *one)
        told = capsys.readouterr().err
        assert error.value.code == 2 and path.name in told and words in told and told.count("\n") == 1
    path.write_text(json.dumps(trial))
    with pytest.raises(SystemExit):  # The name has three digits.
        grid(network, tmp_path / "out", "--learning_rates=0.1001", "--weight_decays=0")
    assert "rate_0.1_decay_0.json: it was written with other settings" in capsys.readouterr().err
    assert len(program()) == 2
    path.write_bytes(b"[]")  # A corrupt result is computed again.
    grid(network, tmp_path / "out", *one)
    assert len(program()) == 3 and json.loads(path.read_text()) == trial


def test_directories_of_the_user_are_not_deleted(network, tmp_path, program, capsys):
    """Neither where a trial would run, nor behind a link there, nor with another grid's mark."""
    one, mine = ("--learning_rates=0.1", "--weight_decays=0"), tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (mine / "draft.tmp").write_text("mine")
    grid(network, tmp_path / "done", *one)
    for name in ("rate_0.1_decay_0", "best_rate_0.1_decay_0"):
        for kind in ("directory", "link", "file", "foreign mark", "only .tmp"):
            place = tmp_path / f"{kind} {name}" / name
            place.parent.mkdir()
            shutil.copy(tmp_path / "done" / "settings.json", place.parent)
            if name.startswith("best"):
                shutil.copy(tmp_path / "done" / "rate_0.1_decay_0.json", place.parent)
            if kind == "link":
                place.symlink_to(mine)
            elif kind == "file":
                place.write_text("mine")
            else:
                shutil.copytree(mine, place)
            kept = place if kind == "file" else place / ("draft.tmp" if kind == "only .tmp" else "notes.txt")
            if kind == "only .tmp":
                (place / "notes.txt").unlink()
            if kind == "foreign mark":
                (place / "trial.json").write_text('{"settings": "0123"}')
            with pytest.raises(SystemExit) as error:
                grid(network, place.parent, *one)
            told = capsys.readouterr().err
            assert error.value.code == 2 and told.count("\n") == 1
            assert f"{place} was not created by this search" in told and len(program()) == 2
            assert kept.read_text() == "mine"
    assert (mine / "notes.txt").read_text() == "mine"


def test_another_transfer_is_not_overwritten(network, tmp_path, program, capsys):
    one = ("--learning_rates=0.1", "--weight_decays=0")
    grid(network, tmp_path / "out", *one)
    for other, words in (("--test=test[:50%]", "examples {"), ("--batch_size=64", "batch_size 256 (now 64)"),
                         ("--steps=31", "steps 30 (now 31)"), ("--seed=1", "seed 0 (now 1)")):
        with pytest.raises(SystemExit):
            grid(network, tmp_path / "out", *one, other)
        told = capsys.readouterr().err
        assert f"was begun with {words}" in told and told.count("\n") == 1
    with pytest.raises(SystemExit):
        run(f"--checkpoint={network}", "--dataset=digits", f"--out={tmp_path / 'out'}")
    assert "was begun with command finetune (now linear): name another directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["learning_rates", "weight_decays"])
@pytest.mark.parametrize("value", ["nan", "0.1,inf", "x", ""])
def test_what_is_no_number_is_refused(name, value, network, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        grid(network, tmp_path / "out", f"--{name}={value}")
    assert error.value.code == 2 and f"--{name}" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_training_from_random_weights_on_a_folder(network, tmp_path):
    """With run.py itself, and an image that cannot be read."""
    for split, count in (("train", 20), ("val", 10), ("test", 10)):
        for number, name in enumerate(("black", "white")):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for each in range(count):
                image = tf.io.encode_png(np.full([10, 12, 3], 255 * number, np.uint8)).numpy()
                (tmp_path / "photos" / split / name / f"{each}.png").write_bytes(image)
    (tmp_path / "photos" / "train" / "black" / "bad.png").write_bytes(b"nothing")
    cli.main(["scratch", f"--checkpoint={network}", f"--dataset=folder:{tmp_path / 'photos'}",
                   "--corrupt_images=skip", "--metric=mean_per_class", "--steps=20", "--batch_size=16",
                   "--learning_rates=1", "--weight_decays=0.001", f"--out={tmp_path / 'out'}"])
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert results["test"] == results["validation"][0]["metric"] == 1.0
    assert len(np.load(tmp_path / "out" / "predictions.npz")["labels"]) == 20


@pytest.mark.slow
def test_fine_tuning_on_digits(network, tmp_path):
    """With run.py itself."""
    arguments = ("--train=train[:300]", "--validation=train[300:400]", "--test=test[:100]",
                 "--learning_rates=1,1000", "--weight_decays=0", "--steps=60")
    grid(network, tmp_path / "out", *arguments, "--batch_size=32")
    results = json.loads((tmp_path / "out" / "result.json").read_text())
    assert results["learning_rate"] == 1 and results["test"] > 0.3
    saved = np.load(tmp_path / "out" / "predictions.npz")
    assert (saved["logits"].argmax(1) == saved["labels"]).mean() == results["test"] and len(saved["labels"]) == 100


NAMES = ["a b", "-x", "\u00e9\u4e2d", "\u00e9" * 127, "x" * 255, "trailing/", "$(touch y);'\""]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_directory_works(name, network, tmp_path, program, monkeypatch):
    """Relative to the working directory, too, and through a link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    os.symlink("real", "link")
    grid(network, os.path.join("link", name), "--learning_rates=0.1", "--weight_decays=0")
    assert (tmp_path / "real" / name / "result.json").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"program", "real", "link"}


@pytest.mark.parametrize("flag", ["out", "checkpoint"])
@pytest.mark.parametrize("value", ["x*", "[a]", "?", "a\\b", "a\nb", "\x1b[31m", "", "s3://x/y", "\udcff"])
def test_names_with_patterns_are_refused(flag, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("linear", "finetune"):
        with pytest.raises(SystemExit) as error:
            cli.main([command, "--checkpoint=x", "--dataset=digits", f"--{flag}={value}"])
        told = capsys.readouterr().err
        assert error.value.code == 2 and f"--{flag}=" in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ significance


def draw_hits(count, share, other_share, seed=0):
    random = np.random.default_rng(seed)
    return random.random(count) < share, random.random(count) < other_share


@pytest.mark.parametrize("count, share, other_share", [(40, 0.6, 0.7), (1000, 0.8, 0.82), (1000, 0.5, 0.5), (9, 0, 1)])
def test_the_permutation_test_is_mcnemars(count, share, other_share):
    hits, other_hits = draw_hits(count, share, other_share)
    only_first, only_second = (hits & ~other_hits).sum(), (other_hits & ~hits).sum()
    exact = stats.binomtest(int(only_first), int(only_first + only_second)).pvalue
    found = significance.permutation_test(hits, other_hits)
    assert found["difference"] == pytest.approx(hits.mean() - other_hits.mean())
    assert found["p"] == pytest.approx(exact, abs=4 * np.sqrt(0.25 / significance.DRAWS))


def naive_p(right, other_right, statistic, draws=4000):
    random, drawn = np.random.default_rng(5), []
    for _ in range(draws):
        swap = random.random(len(right)) < 0.5
        drawn.append(statistic(np.where(swap, other_right, right)) - statistic(np.where(swap, right, other_right)))
    return np.mean(np.abs(drawn) >= abs(statistic(right) - statistic(other_right)) - 1e-12)


def test_per_class_accuracies_are_permuted_example_by_example():
    labels = np.random.default_rng(1).choice([0, 1, 4, 7], 60, p=[0.1, 0.2, 0.3, 0.4])
    hits, other_hits = draw_hits(60, 0.75, 0.6, seed=2)

    def mean_per_class(values):
        return np.mean([values[labels == label].mean() for label in (0, 1, 4, 7)])

    found = significance.permutation_test(hits, other_hits, labels)
    assert found["difference"] == pytest.approx(mean_per_class(hits) - mean_per_class(other_hits))
    assert found["p"] == pytest.approx(naive_p(hits, other_hits, mean_per_class), abs=4 * np.sqrt(0.25 / 4000))


def test_several_labels_are_compared_by_accuracy():
    random = np.random.default_rng(3)
    labels = random.integers(-1, 2, (50, 4))
    labels[:, 0] = np.maximum(labels[:, 0], 0)
    scores, other_scores = (labels + random.normal(size=(50, 4)) * scale - 0.5 for scale in (0.5, 0.9))
    rights = [np.array([np.mean([(value > 0) == label for value, label in zip(*row) if label >= 0])
                        for row in zip(each, labels)]) for each in (scores, other_scores)]
    found = significance.compare(labels, scores, other_scores, "mean_average_precision")
    assert found["difference"] == pytest.approx(rights[0].mean() - rights[1].mean())
    assert found["p"] == pytest.approx(naive_p(*rights, np.mean), abs=4 * np.sqrt(0.25 / 4000))


def test_equal_models_do_not_differ():
    hits, _ = draw_hits(50, 0.5, 0.5)
    assert significance.permutation_test(hits, hits) == dict(difference=0.0, p=1.0)


LABELS, LOGITS = np.arange(6) % 2, np.eye(2)[np.arange(6) % 2]
SEVERAL = np.eye(2, dtype=np.int64)[np.arange(6) % 2]


@pytest.mark.parametrize("labels, logits", [
    (LABELS, LOGITS), (LABELS.astype(np.uint8), LOGITS.astype(np.float16)), (LABELS + 5, LOGITS), (SEVERAL, LOGITS),
    (LABELS, np.where(LOGITS > 0, 1.0, -np.inf)), (SEVERAL - [1, 0], LOGITS)])
def test_predictions_of_all_kinds_are_read(labels, logits, tmp_path):
    """-inf is the logit of a class that was not learnt."""
    np.savez(tmp_path / "x.npz", labels=labels, logits=logits)
    found = output.read_predictions(str(tmp_path / "x.npz"))
    assert found[0].tolist() == labels.tolist() and found[1].tolist() == logits.tolist()


@pytest.mark.parametrize("labels, logits, words", [
    (LABELS, LOGITS * np.nan, "NaN or infinity"), (LABELS, np.where(LOGITS > 0, np.inf, 0), "NaN or infinity"),
    (LABELS, LOGITS - np.inf, "all -infinity"), (LABELS[:0], LOGITS[:0], "no examples"),
    (LABELS, LOGITS[:, :0], "no classes"), (LABELS.astype(str), LOGITS, "labels are <U21"),
    (LABELS, LOGITS.astype(str), "logits are <U"), (LABELS.astype(object), LOGITS, "cannot be read"),
    (LABELS, LOGITS.astype(complex), "logits are complex128"), (LABELS, LOGITS > 0, "logits are bool"),
    (LABELS / 1, LOGITS, "labels are float64"), (LABELS - 1, LOGITS, "labels are -1 to 0"),
    (LABELS.astype(np.uint64) + np.uint64(2**63), LOGITS, "labels are"), (SEVERAL * 2, LOGITS, "labels are 0 to 2"),
    (SEVERAL - 1, LOGITS - 1, None), (SEVERAL * 0 - 1, LOGITS, "no known label"),
    (LABELS, LOGITS[..., np.newaxis], "do not fit"), (LABELS[:, np.newaxis, np.newaxis], LOGITS, "labels are int64"),
    (np.int64(3), LOGITS, "labels are int64 ()"), (LABELS, np.float64(1), "do not fit"),
    (SEVERAL, LOGITS[:, :1], "do not fit"), (LABELS, np.array([(1.0, 2)] * 6, "f4,i4"), "do not fit")])
def test_other_predictions_are_refused(labels, logits, words, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", labels=labels, logits=logits)
    np.savez(tmp_path / "good.npz", labels=LABELS, logits=LOGITS)
    with pytest.raises(SystemExit) as error:
        cli.main(["compare", str(tmp_path / "good.npz"), str(tmp_path / "x.npz")])
    told = capsys.readouterr().err
    assert error.value.code == 2 and (words or "") in told and told.count("\n") == 1


def test_files_are_compared(tmp_path, capsys):
    labels = np.arange(200) % 2
    for name, share in (("good", 0.95), ("bad", 0.6), ("short", 0.6)):
        hits = np.random.default_rng(0).random(200) < share
        rows = slice(0, 100 if name == "short" else 200)
        logits = np.eye(2)[np.where(hits, labels, 1 - labels)]
        np.savez(tmp_path / f"{name}.npz", labels=labels[rows], logits=logits[rows])
    cli.main(["compare", str(tmp_path / "good.npz"), str(tmp_path / "bad.npz")])
    assert "the difference is significant" in capsys.readouterr().out
    (tmp_path / "no.npz").write_text("nothing")
    np.savez(tmp_path / "cut.npz", labels=labels, logits=logits[:50])
    for other, words in (("short", "are not of the same examples"), ("cut", "and logits (50, 2) do not fit"),
                         ("no", "no.npz cannot be read as a file of labels")):
        with pytest.raises(SystemExit):
            cli.main(["compare", str(tmp_path / "good.npz"), str(tmp_path / f"{other}.npz")])
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1
