"""Smoke tests of the benchmarks at small sizes, and comparisons of the implementations that they measure."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import data
import model as model_lib
import objective
from benchmarks import (
    accelerator,
    gallery,
    input_pipeline,
    loss,
    measure,
    optimizer,
    original_pipeline,
    plain_keras,
)
from checkpoints import torch_names
from config import Config
from sources import datasets
from support import ROOT, documents, golden, images, tfds_data

COMMANDS = {
    words[2].removeprefix("benchmarks."): words[3:]
    for words in (
        documents.arguments(example.text)
        for example in documents.find_examples("benchmarks/README.md")
    )
}
PROGRAMS = {path.stem for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text()}
SHORT_RUNS = "--train_steps=2 --train_batch_size=16 --resnet_depth=10"
# Arguments that are appended to the documented ones.
CASES = [
    ("determinism", "--batch=8", "--rounds=1"),
    ("evaluation_memory", "--evaluations=2"),
    ("gallery", "--sizes=300"),
    ("input_pipeline", "--rounds=1", "--seconds=0.1"),
    ("l2_path", "--examples=60"),
    ("loss", "--sizes=64"),
    ("micro_batches", "--batch=8", "--micro=4", "--whole"),
    ("optimizer", "--depths=10", "--rounds=1"),
    ("parity", "--seeds=1", f"--flags={SHORT_RUNS} --warmup_epochs=0"),
    ("precision", "--tfds_dir=", "--seeds=1", f"--flags={SHORT_RUNS}"),
    ("probing_memory", "contrastive", "--sizes=80"),
    ("probing_memory", "logistic_regression", "--sizes=2000"),
    ("probing_memory", "mlp", "--sizes=2000"),
    ("train_step", "--batch=8", "--depth=10", "--rounds=1"),
]


def test_every_benchmark_is_documented_and_has_a_smoke_test():
    assert PROGRAMS == set(COMMANDS) == {"accelerator", *(case[0] for case in CASES)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns a directory with the files that the documented commands read."""
    directory = tmp_path_factory.mktemp("inputs")
    tfds_data.write_tfds("cifar10", directory / "tfds", train=300, test=40)
    names = [f"photos/{label}/{index}.jpg" for label in "ab" for index in range(20)]
    images.write_images(directory, *names, size=(300, 280))
    random = np.random.default_rng(0)
    np.savez(
        directory / "features.npz",
        vectors=random.normal(size=(60, 8)).astype(np.float32),
        labels=random.integers(0, 3, 60),
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_benchmark_prints_the_documented_json_lines(case, inputs, tmp_path):
    name, *arguments = case
    documented = [
        re.sub(r"--features=.*", f"--features={inputs}/features.npz", argument)
        .replace("tfds_dir=DIR", f"tfds_dir={inputs}/tfds")
        .replace("photos_dir=DIR", f"photos_dir={inputs}/photos")
        .replace("runs_dir=DIR", f"runs_dir={tmp_path}")
        for argument in COMMANDS[name]
    ]
    output = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *documented, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    machine, *lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert set(machine) == {"processor", "cores", "python", "tensorflow"}
    lines = [line for line in lines if set(line) != {"evaluations", "resident_megabytes"}]
    assert lines
    for line in lines:
        assert (
            set(line) >= {"benchmark", "case", "unit", "ours", "baseline", "ratio"}
            and line["benchmark"] == name
        )
        values = [line[key] for key in ("ours", "baseline") if line[key] is not None]
        # The increase in memory of a small computation may be zero.
        assert all(
            math.isfinite(value) and (value > 0 or value == 0 and line["unit"] == "MB")
            for value in values
        )
        if line["baseline"]:
            assert line["ratio"] == pytest.approx(
                line["ours"] / line["baseline"], rel=0.01, abs=0.001
            )
        if name == "l2_path":
            assert line["max_loss_excess"] < 2e-5  # README.md states this limit.
        if "results" in line:
            # The tolerance for the MLP is large, because its initial weights are random.
            tolerance = {"contrastive": 1e-4, "logistic_regression": 0.02, "mlp": 0.2}[arguments[0]]
            assert line["results"][0] == pytest.approx(line["results"][1], abs=tolerance)


def test_cases_that_were_skipped_or_failed_are_not_finished(tmp_path):
    lines = [
        dict(part="loss", case="64", error=None),
        dict(part="loss", case="128", error="killed by signal 9"),
        dict(part="torch", case="resnet18", error=None, skipped="PyTorch is not installed"),
    ]
    path = tmp_path / "lines.json"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"part": "golden", "ca')
    assert accelerator.finished_cases(path) == {("loss", "64")}


@pytest.mark.parametrize("case", ["loss", "loss_and_metrics"])
def test_both_losses_and_their_gradients_are_equal(case):
    ours, baseline = (
        loss.make_computation(form, case, 64)() for form in (loss.blocked, loss.plain)
    )
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
        np.testing.assert_allclose(
            variable.numpy() - start, copy.numpy() - start, rtol=1e-3, atol=1e-7
        )
        assert np.any(copy.numpy() != start)


def test_both_input_pipelines_return_views_of_all_records(tmp_path):
    """Without color distortion, the views of an image with a single gray level have this level."""
    levels = images.write_images(
        tmp_path, *(f"{label}/{index}.png" for label in "ab" for index in range(8))
    )
    expected = sorted((level, "ab".index(name[0])) for name, level in levels.items())
    source = datasets.open_source(f"folder:{tmp_path}")
    config = Config(dataset="photos", image_size=8, train_batch_size=4, color_jitter_strength=0.0)
    ours = data.build_train_dataset(config, source, 0, 4)
    baseline = original_pipeline.build(input_pipeline.shuffled_records(source, config), 8, 0.0, 4)
    for pipeline in (ours, baseline):
        views, labels = zip(*pipeline.take(4).as_numpy_iterator())
        views, labels = np.concatenate([*map(np.hstack, views)]), np.concatenate(labels)
        assert views.shape == (16, 16, 8, 3) and views.dtype == np.float32
        np.testing.assert_allclose(
            views, np.broadcast_to(views[:, :1, :1, :1], views.shape), atol=1e-5
        )
        assert sorted(zip((255 * views[:, 0, 0, 0]).round(), labels)) == expected


@pytest.mark.parametrize("depth, size", [(18, 32), (50, 224)])
def test_both_networks_have_the_same_variables(depth, size):
    config = Config(resnet_depth=depth, image_size=size)
    with tf.Graph().as_default():  # In a graph, weights are not initialized.
        networks = (
            model_lib.build_model(config, 10),
            plain_keras.resnet(depth, size, cifar_stem=config.cifar_stem),
        )
        shapes = [
            sorted(tuple(variable.shape) for variable in network.trainable_variables)
            for network in networks
        ]
    assert shapes[0] == shapes[1]


def test_plain_keras_has_nearly_the_same_loss_in_half_precision():
    views, labels = (
        np.random.default_rng(0).uniform(0, 1, (8, 8, 8, 6)).astype(np.float32),
        np.arange(8),
    )
    models = [
        plain_keras.resnet(10, 8, precision=precision)
        for precision in ("float32", "mixed_bfloat16")
    ]
    models[1].set_weights(models[0].get_weights())
    assert all(variable.dtype == tf.float32 for variable in models[1].variables)
    losses = [
        plain_keras.make_step(model)(tf.constant(views), tf.constant(labels))[0].numpy()
        for model in models
    ]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [dict(resnet_depth=18, image_size=16), dict(resnet_depth=50, image_size=64)],
    ids=str,
)
def test_losses_and_gradients_match_those_in_pytorch(settings, torch_python, tmp_path):
    config = Config(**settings)
    model = model_lib.build_model(config, 10)
    variables = golden.assign_computed_weights(model)
    heads = torch_names.head_names(variables)
    names = {
        **{
            key: torch_names.torch_name(key)
            for key in variables
            if key.startswith("model/resnet_model/")
        },
        **{key: f"{part}.{name}" for part in heads for key, name in heads[part].items()},
    }
    assert set(names) == set(variables)
    random, size = np.random.default_rng(0), config.image_size
    views, labels = (
        random.uniform(0, 1, (16, size, size, 3)).astype(np.float32),
        random.integers(0, 10, 8),
    )
    np.savez(
        tmp_path / "input.npz",
        views=views,
        labels=labels,
        **{
            names[key]: torch_names.to_torch(variable.numpy())
            for key, variable in variables.items()
        },
    )
    with tf.GradientTape() as tape:
        outputs = model(views, training=True)
        losses = [
            objective.add_contrastive_loss(outputs["proj_head_output"], True, config.temperature)[
                0
            ],
            model_lib.supervised_loss(outputs["logits_sup"], tf.constant(labels))[0],
        ]
        total_loss = tf.add_n(losses)
    gradients = tape.gradient(total_loss, model.trainable_variables)
    worker = [torch_python, str(ROOT / "tests" / "support" / "torch_step_worker.py")]
    subprocess.run(
        [
            *worker,
            str(config.resnet_depth),
            config.stem_name,
            tmp_path / "input.npz",
            tmp_path / "out.npz",
        ],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
    )
    arrays = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(arrays["losses"], losses, rtol=1e-4)
    keys = {variable.ref(): key for key, variable in variables.items()}
    for variable, gradient in zip(model.trainable_variables, gradients):
        name = names[keys[variable.ref()]]
        # In float32, the gradients of the first layers of ResNet-50 differ by about 3 %.
        assert golden.relative_error(torch_names.from_torch(arrays[name]), gradient) < 0.1, name


# ------------------------------------------------------------------------------------------------------- accelerator


@pytest.mark.slow
def test_accelerator_runs_all_parts_and_skips_finished_cases(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.accelerator",
        "--small",
        f"--runs_dir={tmp_path}",
        f"--out={tmp_path}/out.jsonl",
    ]
    output = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout
    machine, *lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert set(machine) == {"processor", "cores", "python", "tensorflow"}
    statuses = [(line["part"], line["case"]) for line in lines if "part" in line]
    assert sorted(statuses) == sorted(
        (case.part, case.name) for case in accelerator.small_cases("")
    )
    results = [line for line in lines if "unit" in line]
    assert {line["case"].split(",")[0] for line in results} == {
        "golden",
        "reference",
        "step",
        "input",
        "loss",
        "memory",
        "deterministic",
        "cifar10",
    }
    for line in lines:
        assert (
            line["benchmark"] == "accelerator"
            and line.get("error") is None
            and line.get("holds") is not False
        )
    for line in results:
        assert any(
            line[key] is not None and math.isfinite(line[key]) for key in ("ours", "baseline")
        )
    assert (tmp_path / "out.jsonl").read_text().splitlines() == [json.dumps(line) for line in lines]
    again = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout
    # Cases that were skipped, because PyTorch is not installed, are tried again.
    skipped = [(line["part"], line["case"]) for line in lines if "skipped" in line]
    repeated = [json.loads(line) for line in again.splitlines()]
    assert (
        repeated[0] == machine
        and [(line["part"], line["case"]) for line in repeated[1:]] == skipped
    )


def test_failed_cases_are_reported_and_do_not_stop_the_others(monkeypatch, tmp_path, capsys):
    commands = {
        "fails": "echo '{\"value\": 1}'; exit 1",
        "is killed": "kill -9 $$",
        "is slow": "sleep 60",
        "succeeds": "echo text; echo '{\"value\": 2}'",
    }
    monkeypatch.setattr(
        accelerator, "child_command", lambda case, _: ["sh", "-c", commands[case.name]]
    )
    cases = [accelerator.Case("part", name, "", {}, max_seconds=1) for name in commands]
    out = tmp_path / "out.jsonl"
    assert not accelerator.run_cases(cases, [], out, None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["value"] for line in lines if "value" in line] == [1, 2]
    assert [line["error"] for line in lines if "part" in line] == [
        "a check or a measurement failed",
        "killed by signal 9",
        "stopped after 1 seconds",
        None,
    ]
    assert accelerator.finished_cases(out) == {("part", "succeeds")}
    assert accelerator.run_cases(cases[3:], [], out, 0) and not accelerator.run_cases(
        cases[:1], [], out, 0
    )
    assert "--max_seconds" in json.loads(capsys.readouterr().out)["error"]


def test_child_process_reports_exceptions_and_failed_checks(monkeypatch, capsys):
    def lines():
        yield {"value": 1}
        yield {"holds": False}

    def fail():
        raise ValueError("no memory\nleft")

    for function, expected in (
        (lines, [{"value": 1}, {"holds": False}]),
        (
            fail,
            [{"benchmark": "accelerator", "case": "part, name", "error": "ValueError: no memory"}],
        ),
    ):
        monkeypatch.setattr(measure, "function", function, raising=False)
        assert (
            accelerator.run_child(
                accelerator.Case("part", "name", "benchmarks.measure.function", {})
            )
            == 1
        )
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
