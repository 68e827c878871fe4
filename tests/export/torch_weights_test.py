"""PyTorch weights: export, import, and comparisons with torchvision, timm and a ResNet in NumPy."""

import functools
import json
import os
import pathlib

import numpy as np
import pytest
import safetensors
import sklearn.datasets
import tensorflow as tf
import tf_keras as keras
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

import inference
import model as model_lib
import resnet
from checkpoints import architecture, inspection, loading, summary, torch_names, weight_files
from config import Config
from export import cli
from support import ROOT, SMALL, golden, no_space, processes, runs, write_json
from support.errors import rejects

CLASSES = ["a", "b|c", "d"]
DOWNSAMPLE = "layer1.0.downsample."


@pytest.fixture(autouse=True)
def without_random_values(monkeypatch):
    """Initializes kernels with zeros, which is fast. The tests load all weights."""
    monkeypatch.setattr(keras.initializers, "VarianceScaling", keras.initializers.Zeros)


def make_checkpoint(directory, **settings):
    """Writes a run with weights from `golden.computed_weight`. Returns the model and the checkpoint prefix."""
    model, _ = golden.build_model(Config(**SMALL | settings), len(CLASSES))
    checkpoint = tf.train.Checkpoint(model=model, global_step=tf.Variable(7, dtype=tf.int64))
    write_json(directory / "flags.json", settings)
    write_json(directory / "classes.json", CLASSES)
    return model, checkpoint.write(f"{directory}/ckpt-7")


def export(checkpoint, directory):
    """Exports a checkpoint as PyTorch weights. Returns the path of the encoder file."""
    path = f"{directory}/torch/encoder.safetensors"
    cli.main(["torch", f"--checkpoint={checkpoint}", f"--out={path}"])
    return path


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Exports a network with heads. Returns the model and the directory of its checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    model, checkpoint = make_checkpoint(directory, resnet_depth=10, image_size=8)
    export(checkpoint, directory)
    return model, directory


def metadata_of(path):
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata()


# ------------------------------------------------------------------------------------------------ ResNet in NumPy


def windows(inputs, size, stride, padding, value=0.0):
    """Returns windows [n, c, h', w', size, size] of inputs [n, c, h, w], after padding both axes by (before, after)."""
    padded = np.pad(inputs, [(0, 0), (0, 0), padding, padding], constant_values=value)
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))[
        :, :, ::stride, ::stride
    ]


def batch_norm(tensors, name, inputs):
    """Normalizes inputs [n, c] or [n, c, h, w] with moving statistics, in float64."""
    weight, bias, mean, variance = (
        tensors[f"{name}.{variable}"].astype(np.float64).reshape([-1] + [1] * (inputs.ndim - 2))
        for variable in ("weight", "bias", "running_mean", "running_var")
    )
    return (inputs - mean) / np.sqrt(variance + 1e-5) * weight + bias


def numpy_resnet(tensors, images):
    """Computes the outputs of torchvision's ResNet in float64, with the changes that the model card describes.

    Args:
      tensors: dict mapping names to arrays.
      images: [n, h, w, 3].

    Returns:
      The pooled features [n, c].
    """

    def layer(conv, norm, inputs, stride=1):
        """Applies the convolution and the batch norm with these names."""
        kernel = tensors[f"{conv}.weight"]
        size = kernel.shape[-1]
        inputs = windows(inputs, size, stride, (size // 2, size // 2))
        outputs = np.einsum("ncxyij,ocij->noxy", inputs, kernel, optimize=True)
        return batch_norm(tensors, norm, outputs)

    def relu(inputs):
        return np.maximum(inputs, 0)

    outputs = images.transpose(0, 3, 1, 2).astype(np.float64)
    has_pooling = tensors["conv1.weight"].shape[-1] == 7
    outputs = relu(layer("conv1", "bn1", outputs, 2 if has_pooling else 1))
    if has_pooling:
        padding = (0, 1) if outputs.shape[-1] % 2 == 0 else (1, 1)
        outputs = windows(outputs, 3, 2, padding, -np.inf).max((-1, -2))
    for group in range(1, 5):
        block = 0
        while f"layer{group}.{block}.conv1.weight" in tensors:
            name, stride = f"layer{group}.{block}.", 2 if group > 1 and block == 0 else 1
            shortcut = outputs
            num_layers = 3 if f"{name}conv3.weight" in tensors else 2
            if f"{name}downsample.0.weight" in tensors:
                names = f"{name}downsample.0", f"{name}downsample.1"
                shortcut = layer(*names, outputs, stride)
            for index in range(1, num_layers + 1):
                names = f"{name}conv{index}", f"{name}bn{index}"
                # The convolution before the last one has the stride.
                outputs = layer(*names, relu(outputs), stride if index == num_layers - 1 else 1)
            outputs = relu(outputs + shortcut)
            block += 1
    return outputs.mean((2, 3))


def random_images(size):
    return np.random.default_rng(size).random([2, size, size, 3], np.float32)


# --------------------------------------------------------------------------------------------------------- export


ATTENTION = [  # networks with selective kernels or squeeze-and-excitation
    dict(resnet_depth=50, image_size=63, sk_ratio=0.0625),
    dict(resnet_depth=50, image_size=64, sk_ratio=0.25, se_ratio=0.07),
    dict(resnet_depth=50, image_size=32, sk_ratio=0.0625, stem="cifar"),
    dict(resnet_depth=18, image_size=57, sk_ratio=0.0625, se_ratio=0.25),
    dict(resnet_depth=10, image_size=32, se_ratio=0.07, width_multiplier=2, stem="cifar"),
]
NO_HEADS = dict(proj_head_mode="none", lineareval_while_pretraining=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(resnet_depth=10, image_size=33),
        dict(resnet_depth=18, image_size=16, stem="cifar", **NO_HEADS),
        dict(resnet_depth=50, image_size=31, stem="imagenet"),
        *ATTENTION[1:],
    ],
    ids=str,
)
def test_exported_encoder_matches_a_resnet_in_numpy_and_can_be_imported(
    settings, tmp_path, monkeypatch
):
    if settings in ATTENTION:  # All blocks except the first in a group are similar.
        for depth, is_bottleneck in ((18, False), (50, True)):
            monkeypatch.setitem(resnet.DEPTHS, depth, (is_bottleneck, (2, 1, 1, 1)))
    model, checkpoint = make_checkpoint(tmp_path, **settings)
    path = export(checkpoint, tmp_path)
    tensors, config = load_file(path), Config(**settings)
    if settings in ATTENTION:  # In PyTorch, these networks are tested below.
        assert {"layer1.0.downsample.1.weight", "layer4.0.bn1.bias"} <= tensors.keys()
    else:
        images = random_images(config.image_size)
        expected = model(images, training=False)["final_avg_pool"]
        assert golden.relative_error(numpy_resnet(tensors, images), expected) < 1e-5
        names = ("resnet_depth", "width_multiplier", "sk_ratio", "se_ratio", "image_size")
        metadata = {name: str(getattr(config, name)) for name in names}
        assert metadata_of(path) == dict(metadata, format="pt", stem=config.stem_name, step="7")
    assert {tensors[name].dtype for name in tensors} == {np.dtype(np.float32), np.dtype(np.int64)}
    loaded, info = loading.open_network(path)
    assert (info.step, info.class_names) == (7, None)
    for name in ("image_size", "resnet_depth", "width_multiplier", "stem_name"):
        assert getattr(info.config, name) == getattr(config, name)
    variables = loading.variables_by_key(model=model)
    for key, variable in loading.variables_by_key(model=loaded).items():
        assert_array_equal(variable, variables[key], err_msg=key)
    num_heads = 0 if "proj_head_mode" in settings else 2
    assert len(os.listdir(tmp_path / "torch")) == 3 + num_heads
    table = summary.describe(path)
    assert "PyTorch weights" in table and f"--image_size={config.image_size}" in table


def test_exported_heads_match_the_heads_of_the_model(small_run):
    model, run_dir = small_run
    directory = run_dir / "torch"
    head = load_file(directory / "encoder.projection_head.safetensors")
    linear_file = directory / "encoder.linear_head.safetensors"
    linear = load_file(linear_file)
    images = random_images(8)
    outputs = model(images, training=False)
    hidden = outputs["final_avg_pool"].numpy()
    values = batch_norm(head, "layer0.bn", hidden @ head["layer0.linear.weight"].T)
    values = np.maximum(values, 0) @ head["layer1.linear.weight"].T
    values = batch_norm(head, "layer1.bn", values)
    assert golden.relative_error(values, outputs["proj_head_output"]) < 1e-5
    logits = hidden @ linear["weight"].T + linear["bias"]
    assert golden.relative_error(logits, outputs["logits_sup"]) < 1e-5
    assert len(head) == 12 and not head["layer1.bn.bias"].any()
    encoder = inference.load(f"{directory}/encoder.safetensors")
    assert golden.relative_error(encoder(images), hidden) < 1e-5
    assert json.loads(metadata_of(linear_file)["class_names"]) == CLASSES
    card = (directory / "encoder.md").read_text()
    assert "Classes of the linear head: 3 (a, b\\|c, d)." in card
    modes = {file.stat().st_mode for file in directory.iterdir()}
    assert modes == {(run_dir / "flags.json").stat().st_mode}


@pytest.mark.parametrize(
    "out, message",
    [
        ("encoder.pth", "unsupported format"),
        (".safetensors", "unsupported format"),
        ("a.safetensors", "a.safetensors: the path exists"),
        ("b.safetensors", "b.md: the path exists"),
        ("c.safetensors", "c.linear_head.safetensors: the path exists"),
        ("other/d.safetensors", "other/torch_resnet.py: the path exists"),
        ("a.safetensors/b.safetensors", "is not a writable directory"),
    ],
)
def test_invalid_paths_are_rejected_before_loading_the_checkpoint(
    out, message, tmp_path, monkeypatch, fails
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection, "inspect_checkpoint", pytest.fail)
    (tmp_path / "other").mkdir()
    for name in ("a.safetensors", "b.md", "c.linear_head.safetensors", "other/torch_resnet.py"):
        (tmp_path / name).write_text("mine")
    fails(message, cli.main, ["torch", "--checkpoint=run", f"--out={out}"])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4 and {path.read_text() for path in files} == {"mine"}


def test_two_exports_share_the_code_and_a_failed_export_leaves_no_files(
    small_run, monkeypatch, capsys
):
    _, run_dir = small_run
    directory = run_dir / "torch"
    before = sorted(os.listdir(directory))
    out = directory / "2.safetensors"
    second = ["torch", f"--checkpoint={run_dir}", f"--out={out}"]

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(pathlib.Path, "write_bytes", no_space)
        cli.main(second)
    assert sorted(os.listdir(directory)) == before
    cli.main(second)
    assert len(os.listdir(directory)) == 2 * len(before) - 1
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {out}"


# --------------------------------------------------------------------------------------------------------- import


@functools.cache
def stock_tensors(depth, stem=7):
    """Returns the tensors of a stock ResNet, with random values."""
    bottleneck, blocks = resnet.DEPTHS[depth]
    shapes = architecture.encoder_shapes(bottleneck, blocks, 1, stem == 3)
    tensors = {}
    for key, shape in shapes.items():
        name = torch_names.torch_name(key, False)
        if bottleneck or not name.startswith(DOWNSAMPLE):
            tensors[name] = torch_names.to_torch(golden.computed_weight(key, shape))
    random = np.random.default_rng(0)
    num_features = shape[-1]
    tensors["fc.weight"] = random.normal(size=(len(CLASSES), num_features)).astype(np.float32)
    tensors["fc.bias"] = random.normal(size=len(CLASSES)).astype(np.float32)
    tensors["bn1.num_batches_tracked"] = np.array(4, np.int64)
    return tensors


def save_stock(directory, tensors):
    """Writes tensors to a file, and returns its path."""
    path = f"{directory}/stock.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("depth", [18, 50])
def test_stock_network_is_loaded_with_its_classifier(depth, tmp_path):
    tensors, images = stock_tensors(depth), random_images(32)
    path = save_stock(tmp_path, tensors)
    config = inspection.read_config(weight_files.open_weights(path), {})
    actual = config.resnet_depth, config.stem_name, config.proj_head_mode
    assert actual == (depth, "imagenet", "none")
    model = model_lib.build_model(config.replace(image_size=32), len(CLASSES))
    loaded = loading.load_parts(model, path, loading.PARTS)
    outputs, hidden = model(images, training=False), numpy_resnet(tensors, images)
    assert golden.relative_error(outputs["final_avg_pool"], hidden) < 1e-5
    logits = hidden @ tensors["fc.weight"].T + tensors["fc.bias"]
    assert golden.relative_error(outputs["logits_sup"], logits) < 1e-5
    assert not loaded.not_loaded
    assert "images are not normalized" in loaded.lines[-1]
    assert ("identity shortcut of layer1.0" in loaded.lines[1]) == (depth == 18)


def test_evaluation_uses_the_network_stored_in_the_file(tmp_path):
    path = save_stock(tmp_path, stock_tensors(10, stem=3))
    settings = dict(resnet_depth=10, stem="cifar", eval_protocol="knn", eval_split="test[:20]")
    log = runs.run(tmp_path / "run", mode="eval", checkpoint=path, **settings)
    assert "images are not normalized" in log and "10 nearest neighbors" in log


def test_stock_network_is_exported_for_pytorch(tmp_path):
    exported = load_file(export(save_stock(tmp_path, stock_tensors(10)), tmp_path))
    assert_array_equal(exported[f"{DOWNSAMPLE}0.weight"][:, :, 0, 0], np.eye(64))
    assert "fc.weight" not in exported


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("layer1.0.se.fc1.weight", 1, "layer1.0.se.fc1.weight is not supported"),
        ("conv1.0.weight", 1, "conv1.0.weight is not supported"),
        ("layer2.0.downsample.2.weight", 1, "layer2.0.downsample.2.weight is not supported"),
        ("layer2.0.conv2.bias", 1, "layer2.0.conv2.bias is not supported"),
        ("other.weight", 1, "other.weight is not supported"),
        ("layer4.2.bn3.running_var", None, "layer4.2.bn3.running_var is missing"),
        ("conv1.weight", None, "does not contain a ResNet .no tensor conv1.weight"),
        ("layer3.5.", None, "no ResNet of depth 10 to 200 has 3-4-5-3 bottleneck blocks"),
        (
            "layer2.0.conv2.weight",
            (128, 4, 3, 3),
            r"layer2.0.conv2.weight has shape \[128, 4, 3, 3\] instead of .* Grouped",
        ),
        (
            "layer1.0.conv1.weight",
            (128, 64, 1, 1),
            r"layer1.0.conv1.weight has shape \[128, 64, 1, 1\] instead of .*wide ResNets",
        ),
    ],
)
def test_unsupported_networks_and_tensors_are_rejected(name, shape, message, tmp_path):
    """Replaces a tensor, or removes all tensors whose names start with `name` if the shape is None."""
    tensors = stock_tensors(50) | {name: np.zeros(shape or 0, np.float32)}
    if shape is None:
        tensors = {key: tensors[key] for key in tensors if not key.startswith(name)}
    path = save_stock(tmp_path, tensors)
    with rejects(f"^--checkpoint={path}: .*{message}") as error:
        weight_files.open_weights(path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("fault", ["cut", "text"])
def test_corrupt_files_are_rejected(fault, tmp_path):
    path = pathlib.Path(save_stock(tmp_path, stock_tensors(10)))
    path.write_bytes(path.read_bytes()[:-9] if fault == "cut" else b"not weights" * 99)
    with rejects(f"^--checkpoint={path}: "):
        weight_files.open_weights(str(path))


def test_settings_of_other_runs_are_ignored_and_non_finite_weights_are_rejected(tmp_path):
    write_json(tmp_path / "flags.json", dict(resnet_depth=10, image_size=24))
    write_json(tmp_path / "classes.json", CLASSES)
    path = save_stock(tmp_path, stock_tensors(10))
    assert weight_files.open_weights(path).class_names is None
    info = inspection.inspect_checkpoint(path)
    assert info.config.image_size == 224 and not info.has_training_config and info.results is None
    name = "layer1.0.bn1.weight"
    save_stock(tmp_path, stock_tensors(10) | {name: np.full(64, np.nan, np.float32)})
    with rejects("conv2d_bn_layers/1/bn/gamma contains NaN"):
        loading.load_model(model_lib.build_model(info.config, 3), path)


def test_half_precision_is_converted(tmp_path):
    tensors = {name: array.astype(np.float16) for name, array in stock_tensors(10).items()}
    model, _ = loading.open_network(save_stock(tmp_path, tensors), {"image_size": 40})
    assert_array_equal(model.supervised_head.linear_layer.dense.kernel, tensors["fc.weight"].T)


# -------------------------------------------------------------------------------------------------------- PyTorch


def photographs(size):
    """Returns two photographs: float32 [2, size, size, 3], with values in [0, 1]."""
    images = np.stack(sklearn.datasets.load_sample_images().images) / 255
    return np.clip(tf.image.resize(images, [size, size], "bicubic"), 0, 1).astype(np.float32)


def run_worker(python, source, images, directory, module="torch_resnet"):
    """Runs tests/support/torch_worker.py in another interpreter. Returns the arrays that the program writes."""
    images_file = directory / "images.npy"
    np.save(images_file, images)
    out = directory / f"{module}.npz"
    processes.run_in(python, "torch_worker.py", source, images_file, module, out)
    return np.load(out)


def compute_outputs(python, directory, dtype, **settings):
    """Returns a model, and its outputs for `photographs` in PyTorch and in Keras."""
    model, checkpoint = make_checkpoint(directory, **settings)
    path = pathlib.Path(export(checkpoint, directory))
    images = photographs(settings["image_size"]).astype(dtype)
    outputs = run_worker(python, path.with_suffix(".md"), images, path.parent)
    return model, outputs, model(images, training=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(resnet_depth=10, image_size=225),
        dict(resnet_depth=18, image_size=224, ft_proj_selector=1, train_mode="finetune"),
        dict(resnet_depth=18, image_size=32, width_multiplier=3, proj_head_mode="linear"),
        dict(resnet_depth=34, image_size=63, width_multiplier=2),
        dict(resnet_depth=50, image_size=224, num_proj_layers=3),
        dict(resnet_depth=50, image_size=32, width_multiplier=2),
        dict(resnet_depth=101, image_size=64, proj_head_mode="none"),
        dict(resnet_depth=200, image_size=64, lineareval_while_pretraining=False),
        *ATTENTION,
        dict(resnet_depth=50, image_size=224, width_multiplier=3, sk_ratio=0.0625, se_ratio=0.05),
    ],
    ids=str,
)
def test_exported_code_reproduces_the_outputs_in_pytorch(settings, torch_python, tmp_path):
    model, outputs, expected = compute_outputs(torch_python, tmp_path, np.float32, **settings)
    endpoints = {"h": "final_avg_pool"}
    if model.num_proj_layers:
        endpoints["z"] = "proj_head_output"
    if model.supervised_head is not None:
        endpoints["logits"] = "logits_sup"
    assert set(outputs) == set(endpoints)
    for name, endpoint in endpoints.items():
        assert golden.relative_error(outputs[name], expected[endpoint]) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(resnet_depth=18, image_size=33), *ATTENTION], ids=str)
def test_exported_code_reproduces_the_outputs_in_double_precision(
    settings, torch_python, tmp_path, float64
):
    _, outputs, expected = compute_outputs(torch_python, tmp_path, np.float64, **settings)
    h = expected["final_avg_pool"]
    assert outputs["h"].dtype == h.dtype == np.float64
    assert golden.relative_error(outputs["h"], h) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch_resnet", "torchvision", "timm"])
def test_documented_code_reproduces_the_outputs(module, torch_python, tmp_path):
    model, checkpoint = make_checkpoint(tmp_path, resnet_depth=50, image_size=224)
    directory, images = pathlib.Path(export(checkpoint, tmp_path)).parent, photographs(224)
    outputs = run_worker(torch_python, ROOT / "docs" / "pytorch.md", images, directory, module)
    expected = model(images, training=False)["final_avg_pool"]
    assert golden.relative_error(outputs["h"], expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, library",
    [
        ("resnet18", "torchvision"),
        ("resnet34", "timm"),
        ("resnet50", "timm"),
        ("resnet101", "torchvision"),
    ],
)
def test_stock_networks_have_the_same_outputs_as_in_pytorch(name, library, torch_python, tmp_path):
    images = photographs(224)
    expected = run_worker(torch_python, f"stock:{name}", images, tmp_path, library)["logits"]
    model, info = loading.open_network(f"{tmp_path}/{library}.npz.safetensors")
    assert info.config.network_name == name and len(info.class_names) == 1000
    assert golden.relative_error(model(images, training=False)["logits_sup"], expected) < 1e-4
