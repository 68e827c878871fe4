"""Tests of the benchmarks on small sizes, and comparisons of the baselines with our implementations."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import model as model_lib
import objective
import resnet
import simclr
from benchmarks import baselines, cases, cli, measure, other_programs
from benchmarks import compiled as steps
from checkpoints import torch_names
from config import Config
from lars_optimizer import LARSOptimizer
from support import ROOT, documents, golden, processes

SHORT = ("--train_steps=2", "--train_batch_size=16", "--resnet_depth=10")
TINY = ("--resnet_depth=10", "--image_size=16")
# benchmark -> SIZE, flags, and the largest difference between the results of both implementations
SMALL = {
    "step": (8, TINY, None),
    "input": (16, TINY, None),
    "startup": (30, (), 0),
    "loss": (64, (), 1e-4),
    "compiled": (4, TINY, None),
    "precision": (1, SHORT, None),
    "parity": (1, (*SHORT, "--warmup_epochs=0"), None),
    "race": (1, (*SHORT, "--warmup_epochs=0", "--dataset=digits"), None),
}
# Stands in for the original's program. Like it, it defines only some of our flags.
ORIGINAL = """
import runpy, sys
sys.path.insert(0, "{root}")
flags = "--dataset --train_steps --train_batch_size --image_size --resnet_depth --data_dir --mode --model_dir"
definitions = '''
DEFINE_string('dataset', DEFINE_integer('train_steps', DEFINE_integer(
    'train_batch_size', DEFINE_integer('image_size', DEFINE_integer('resnet_depth', '''
names = {{argument.partition("=")[0] for argument in sys.argv[1:]}}
assert names == {{*flags.split()}}, sys.argv
runpy.run_path("{root}/run.py", run_name="__main__")
"""


def test_every_benchmark_is_documented_and_has_a_small_size():
    examples = documents.find_examples("benchmarks/README.md")
    names = {documents.arguments(example.text)[3] for example in examples}
    assert names == set(SMALL) == set(cases.BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SMALL} - {"compiled", "parity"}))  # as `race`
def test_implementations_run_and_agree(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "torch_python", lambda: None)
    monkeypatch.chdir(ROOT)
    size, flags, tolerance = SMALL[name]
    options = types.SimpleNamespace(
        flags=list(flags),
        profile=None,
        data_dir=None,
        runs_dir=str(tmp_path),
        original=str(tmp_path),
    )
    (tmp_path / "run.py").write_text(ORIGINAL.format(root=ROOT))
    for case in cases.BENCHMARKS[name][0](size, options):
        if "deterministic" in case.name:  # cannot be disabled again in this process
            continue
        forms = filter(None, (case.ours, case.baseline))
        first, *others = [measure.measure(*form, 1, case.warm_up, case.images) for form in forms]
        assert all(first[unit] >= 0 for unit in case.units)
        if tolerance is not None:
            assert first["result"] == pytest.approx(others[0]["result"], abs=tolerance, rel=0)


def test_training_is_repeated_only_if_it_was_not_finished_with_the_same_settings(
    tmp_path, monkeypatch
):
    commands, model_dir = [], tmp_path / "run"

    def train(*flags, fails=False):
        def run(command, **options):
            commands.append(command)
            (model_dir / f"file_{len(commands)}").touch()
            if fails:
                raise subprocess.CalledProcessError(1, command)

        monkeypatch.setattr(subprocess, "run", run)
        other_programs.train("simclr", ["--dataset=digits", *flags], str(model_dir), None)
        return len(commands), sorted(path.name for path in model_dir.glob("file_*"))

    with pytest.raises(subprocess.CalledProcessError):
        train(fails=True)
    assert train() == train() == (2, ["file_2"])
    assert train("--image_size=8") == (3, ["file_3"])
    assert "--image_size=8" in commands[2] and "--mode=train" in commands[2]


@pytest.mark.slow
def test_the_program_prints_json_lines_and_writes_a_profile(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "step", "--sizes=8", "--calls=2", "--rounds=1"]
    command += [f"--profile={tmp_path}", f"--flags={' '.join(TINY)}"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    machine, line = map(json.loads, output.splitlines())
    assert set(machine) == {"processor", "versions"} and "simclr-tf2" in machine["versions"]
    assert line["benchmark"] == "step" and line["ours"] > 0 and line["baseline"] is None
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_medians_of_alternate_measurements_and_errors_are_reported(monkeypatch):
    outputs = [{"s": 1, "MB": 7, "result": 5}, {"s": 4}, {"s": 3, "MB": 7}, {"s": 2}]
    failed = iter([*outputs, {"s": 2, "MB": 7}, {"error": "killed"}])
    monkeypatch.setattr(cli, "_measure", lambda form, **settings: next(failed))
    case = cases.Case("x", ("ours", {}), ("baseline", {}))
    lines = [*cli.compare(case, 1, 2), next(cli.compare(case, 1, 1))]
    values = [(line["unit"], line["ours"], line["baseline"], line["ratio"]) for line in lines]
    assert values == [("s", 2, 3, 0.6667), ("MB", 7, None, None), ("s", 2, None, None)]
    assert lines[0]["results"] == [5, None] and lines[2]["error"] == "killed"


def test_baseline_of_lars_makes_the_same_updates():
    start = [tf.ones([3, 2]), tf.ones(2), tf.zeros([2, 2])]
    ours, theirs = ([tf.Variable(value) for value in start] for _ in range(2))
    optimizer = LARSOptimizer(
        0.1, weight_decay=1e-6, exclude_from_weight_decay=lambda variable: variable.shape.rank <= 1
    )
    update = baselines.lars_updates(theirs)
    gradients = [value + 0.5 for value in start]
    for _ in range(2):
        optimizer.apply_gradients(zip(gradients, ours))
        update(gradients)
    for variable, expected, value in zip(ours, theirs, start):
        np.testing.assert_allclose(variable - value, expected - value, rtol=1e-3)
        assert np.any(expected != value)


def shapes_of(network):
    return sorted(tuple(variable.shape) for variable in network.trainable_variables)


@pytest.mark.parametrize("depth, size", [(18, 32), (50, 224)])
def test_both_networks_have_the_same_variables(depth, size, monkeypatch):
    has_bottleneck, _ = resnet.DEPTHS[depth]
    monkeypatch.setitem(resnet.DEPTHS, depth, (has_bottleneck, (2, 1)))
    config = Config(resnet_depth=depth, image_size=size)
    with tf.Graph().as_default():  # In a graph, weights are not initialized.
        ours = model_lib.build_model(config, 10)
        theirs = baselines.keras_resnet(depth, size, config.cifar_stem)
    assert shapes_of(ours) == shapes_of(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("depth, size", [(18, 16), (50, 64)])
def test_losses_and_gradients_match_those_in_pytorch(depth, size, torch_python, tmp_path):
    config = Config(resnet_depth=depth, image_size=size)
    model, variables = golden.build_model(config)
    parts = torch_names.names_by_part(variables, False)
    names = {f"{part}.{name}": key for part in parts for key, name in parts[part].items()}
    assert set(names.values()) == set(variables)
    random = np.random.default_rng(0)
    views = random.uniform(0, 1, (16, size, size, 3)).astype(np.float32)
    labels = random.integers(0, 10, 8)
    weights = {name: torch_names.to_torch(variables[key].numpy()) for name, key in names.items()}
    files = [tmp_path / "input.npz", tmp_path / "out.npz"]
    np.savez(files[0], views=views, labels=labels, **weights)
    with tf.GradientTape() as tape:
        outputs = model(views, training=True)
        losses = [
            objective.add_contrastive_loss(outputs["proj_head_output"], True, 0.1)[0],
            simclr.supervised_loss(outputs["logits_sup"], tf.constant(np.tile(labels, 2)))[0],
        ]
        total_loss = tf.add_n(losses)
    arguments = (str(depth), config.stem_name, *files)
    processes.run_in(torch_python, "torch_step_worker.py", *arguments)
    arrays = np.load(files[1])
    np.testing.assert_allclose(arrays["losses"], losses, rtol=1e-4)
    trained = {name: variables[key] for name, key in names.items() if variables[key].trainable}
    for (name, _), gradient in zip(trained.items(), tape.gradient(total_loss, [*trained.values()])):
        # In float32, the gradients of the first layers of ResNet-50 differ by about 3 %.
        assert golden.relative_error(torch_names.from_torch(arrays[name]), gradient) < 0.1, name


def test_compiled_operations_of_a_graph_are_counted():
    """The comments contain the kernels, and the bytes that they read and write."""
    variable = tf.Variable(tf.ones([8]))
    square = tf.function(lambda x: x * x, jit_compile=True)
    double = tf.function(lambda x: x + x)  # 1 kernel: 128 + 128

    @tf.function(autograph=False)
    def step(x):
        with tf.device("CPU:1"):
            y = tf.exp(x)  # 1: 128 + 128
            z = tf.reshape(y * variable, [8, 4])  # 1: 128 + 32 + 128
            shape = tf.range(tf.cast(y[0, 0], tf.int32))  # 2: 128 + 24 + 4, 4 + 4; the range: host
            total = tf.sqrt(tf.cast(tf.size(z), tf.float32))  # constant
            variable.assign(tf.transpose(z)[0])  # 2: 128 + 8 + 128, 128 + 12 + 32
            result = square(double(y)) * total  # 1: 128 + 4 + 128
            result += tf.cast(tf.size(shape), tf.float32)  # 2: 4 + 4, 128 + 4 + 128
        with tf.device("CPU:0"):
            return tf.tanh(result)

    def compiled(operation, function):
        assert operation.inputs[0].shape == [4, 8]
        return steps.Cost(kernels=10, bytes=1000, temporary=100)

    graph = step.get_concrete_function(tf.TensorSpec([4, 8])).graph
    assert steps.graph_cost(graph, compiled, "CPU:1") == {
        "kernels": 1 + 1 + 1 + 2 + 2 + 1 + 2 + 10,
        "bytes": 256 + 256 + 288 + 156 + 8 + 264 + 172 + 260 + 8 + 260 + 1000,
        "all-reduces": 0,
        # In `double`, y and the result exist, and the result of the call.
        "temporary": 128 + 128 + 128,
    }


def test_compiled_instructions_are_counted():
    text = """HloModule step, is_scheduled=true

%fused (a: f32[2,3]) -> (f32[2,3], bf16[]) {
  %a = f32[2,3]{1,0} parameter(0)
  ROOT %b = f32[2,3]{1,0} add(%a, %a)
}

%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = (s32[], f32[4]{0}) parameter(0)
  %d = s32[] get-tuple-element(%c), index=0
  %e = f32[4]{0} get-tuple-element(%c), index=1
  %f = f32[4]{0} copy(%e)
  ROOT %g = (s32[], f32[4]{0}) tuple(%d, %f)
}

%condition (h: (s32[], f32[4])) -> pred[] {
  %h = (s32[], f32[4]{0}) parameter(0)
  ROOT %i = pred[] constant(true)
}

ENTRY %main (j: f32[2,3], k: (s32[], f32[4])) -> f32[2,3] {
  %j = f32[2,3]{1,0} parameter(0)
  %k = (s32[], /*index=1*/f32[4]{0}) parameter(1)
  %l = (f32[2,3]{1,0}, bf16[]) fusion(%j, %j), kind=kLoop, calls=%fused, metadata={op_name="add"}
  %m = f32[2,3]{1,0} get-tuple-element(%l), index=0
  %n = f32[2,3]{1,0} all-reduce-start(%m), replica_groups={{0,1}}, to_apply=%fused
  %o = f32[2,3]{1,0} all-reduce-done(%n)
  %p = (s32[], f32[4]{0}) while(%k), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %q = f32[2,3]{1,0} custom-call(%o), custom_call_target="x"
}
"""
    kernels = {"fusion": 24 + 24 + 2, "all-reduce": 24 + 24, "copies": 5 * 32, "call": 24 + 24}
    counted = {"kernels": 1 + 1 + 5 + 1, "bytes": sum(kernels.values()), "all-reduces": 1}
    assert steps.hlo_cost(text) == counted


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, limits",
    [
        ("one GPU, --a", {"kernels": 1500, "MB/view": 400, "temporary MB/view": 50}),
        (
            "two GPUs",
            {"kernels": 2600, "MB/view": 700, "temporary MB/view": 50, "all-reduces": 120},
        ),
    ],
)
def test_compiled_step_on_gpus_is_within_limits(case, limits, jax_python):
    """ResNet-50 at 224 pixels with 256 images per H100, of which none is needed. Takes several minutes."""
    options = types.SimpleNamespace(flags=[])
    (found,) = (each for each in cases.compiled(256, options) if case in each.name)
    counts = cli._measure(found.baseline)
    assert all(0 < counts[unit] <= limit for unit, limit in limits.items()), counts
