"""Smoke tests of the benchmarks at small sizes, and comparisons of the implementations that they measure."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

import data
import model as model_lib
from benchmarks import gallery, input_pipeline, loss, optimizer, original_pipeline, plain_keras
from config import Config
from sources import datasets
from support import ROOT, documents, images, tfds_data

COMMANDS = {words[2].removeprefix("benchmarks."): words[3:] for words in (
    documents.arguments(example.text) for example in documents.find_examples("benchmarks/README.md"))}
PROGRAMS = {path.stem for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text()}
SHORT_RUNS = "--train_steps=2 --train_batch_size=16 --resnet_depth=10"
# Arguments that are appended to the documented ones.
CASES = [
    ("determinism", "--batch=8", "--rounds=1"), ("evaluation_memory", "--evaluations=10"), ("gallery", "--sizes=300"),
    ("input_pipeline", "--rounds=1", "--seconds=0.1"), ("l2_path", "--examples=60"), ("loss", "--sizes=64,128"),
    ("micro_batches", "--batch=8", "--micro=4", "--whole"), ("optimizer", "--depths=10", "--rounds=1"),
    ("parity", "--seeds=1", f"--flags={SHORT_RUNS} --warmup_epochs=0"),
    ("precision", "--seeds=1", f"--flags={SHORT_RUNS}"), ("probing_memory", "contrastive", "--sizes=80"),
    ("probing_memory", "logistic_regression", "--sizes=2000"), ("probing_memory", "mlp", "--sizes=2000"),
    ("train_step", "--batch=8", "--rounds=1"),
]


def test_every_benchmark_is_documented_and_has_a_smoke_test():
    assert PROGRAMS == set(COMMANDS) == {case[0] for case in CASES}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns a directory with the files that the documented commands read."""
    directory = tmp_path_factory.mktemp("inputs")
    tfds_data.write_tfds("cifar10", directory / "tfds", train=300, test=40)
    names = [f"photos/{label}/{index}.jpg" for label in "ab" for index in range(20)]
    images.write_images(directory, *names, size=(300, 280))
    random = np.random.default_rng(0)
    np.savez(directory / "features.npz", vectors=random.normal(size=(60, 8)).astype(np.float32),
             labels=random.integers(0, 3, 60))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_benchmark_prints_the_documented_json_lines(case, inputs, tmp_path):
    name, *arguments = case
    documented = [re.sub(r"--features=.*", f"--features={inputs}/features.npz", argument).replace(
        "tfds_dir=DIR", f"tfds_dir={inputs}/tfds").replace("photos_dir=DIR", f"photos_dir={inputs}/photos").replace(
        "runs_dir=DIR", f"runs_dir={tmp_path}") for argument in COMMANDS[name]]
    output = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *documented, *arguments], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, check=True).stdout
    machine, *lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert set(machine) == {"processor", "cores", "python", "tensorflow"}
    lines = [line for line in lines if set(line) != {"evaluations", "resident_megabytes"}]
    assert lines
    for line in lines:
        assert set(line) >= {"benchmark", "case", "unit", "ours", "baseline", "ratio"} and line["benchmark"] == name
        values = [line[key] for key in ("ours", "baseline") if line[key] is not None]
        # The increase in memory of a small computation may be zero.
        assert all(math.isfinite(value) and (value > 0 or value == 0 and line["unit"] == "MB") for value in values)
        if line["baseline"]:
            assert line["ratio"] == pytest.approx(line["ours"] / line["baseline"], rel=0.01, abs=0.001)
        if name == "l2_path":
            assert line["max_loss_excess"] < 2e-5  # README.md states this limit.
        if "results" in line:
            # The tolerance for the MLP is large, because its initial weights are random.
            tolerance = {"contrastive": 1e-4, "logistic_regression": 0.02, "mlp": 0.2}[arguments[0]]
            assert line["results"][0] == pytest.approx(line["results"][1], abs=tolerance)


@pytest.mark.parametrize("case", ["loss", "loss_and_metrics"])
def test_both_losses_and_their_gradients_are_equal(case):
    ours, baseline = (loss.make_computation(form, case, 64)() for form in (loss.blocked, loss.plain))
    assert len(ours) == len(baseline) == loss._NUM_OUTPUTS[case] + 1
    for actual, expected in zip(ours, baseline):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_both_searches_find_the_same_pairs():
    vectors = gallery.clustered_vectors(1000)
    assert gallery.blocked(vectors) == gallery.plain(vectors) >= 10


def test_both_optimizers_make_the_same_updates():
    config = Config(resnet_depth=10, image_size=32)
    model = model_lib.build_model(config, 10)
    gradients = optimizer.make_gradients(model)
    baseline_update, copies = optimizer.make_baseline_update(config, model, gradients)
    our_update = optimizer.make_our_update(config, model, gradients)
    before = [variable.numpy() for variable in copies]
    for _ in range(2):
        our_update()
        baseline_update()
    for variable, copy, start in zip(model.trainable_variables, copies, before):
        np.testing.assert_allclose(variable.numpy() - start, copy.numpy() - start, rtol=1e-3, atol=1e-7)
        assert np.any(copy.numpy() != start)


def test_both_input_pipelines_return_views_of_all_records(tmp_path):
    """Without color distortion, the views of an image with a single gray level have this level."""
    levels = images.write_images(tmp_path, *(f"{label}/{index}.png" for label in "ab" for index in range(8)))
    expected = sorted((level, "ab".index(name[0])) for name, level in levels.items())
    source = datasets.open_source(f"folder:{tmp_path}")
    config = Config(dataset="photos", image_size=8, train_batch_size=4, color_jitter_strength=0.0)
    ours = data.build_train_dataset(config, source, 0, 4)
    baseline = original_pipeline.build(input_pipeline.shuffled_records(source, config), 8, 0.0, 4)
    for pipeline in (ours, baseline):
        views, labels = map(np.concatenate, zip(*pipeline.take(4).as_numpy_iterator()))
        assert views.shape == (16, 8, 8, 6) and views.dtype == np.float32
        np.testing.assert_allclose(views, np.broadcast_to(views[:, :1, :1, :1], views.shape), atol=1e-5)
        assert sorted(zip((255 * views[:, 0, 0, 0]).round(), labels)) == expected


def test_both_networks_have_the_same_variables():
    model = model_lib.build_model(Config(resnet_depth=18, image_size=32), 10)
    shapes = [sorted(tuple(variable.shape) for variable in network.trainable_variables)
              for network in (model, plain_keras.resnet18(32))]
    assert shapes[0] == shapes[1]
