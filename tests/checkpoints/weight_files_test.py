"""Weight files in all formats: architecture inference, loading, summaries and errors."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorflow.core.protobuf import trackable_object_graph_pb2

import data_util
import model as model_lib
import resnet
from checkpoints import architecture, cli, inspection, loading, summary, tf1_names, weight_files
from config import Config
from paper import report, results, studies
from paper.runner import Runner
from runtime.errors import UserError
from sources import digits
from support import SMALL, golden
from support.errors import rejects

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
TF2_NETWORKS = golden.load_json("checkpoint_keys")
TF1_NETWORKS = golden.load_json("tf1_checkpoint_names")


@pytest.fixture(autouse=True)
def without_random_values(monkeypatch):
    """Initializes kernels with zeros, which is fast. The tests load all weights."""
    monkeypatch.setattr(keras.initializers, "VarianceScaling", keras.initializers.Zeros)


def config_of(name):
    """Parses a name such as `resnet_depth=18_image_size=64` into a `Config`."""
    settings = {
        key: float(value) if "." in value else int(value)
        for key, value in re.findall(r"_?([a-z_]+)=([0-9.]+)", name)
    }
    return Config(**{"image_size": 32, **settings})


def zeros(key, shape):
    return np.zeros(shape, np.float32)


def weights_file(directory, shapes, suffix, extra=(), compute=golden.computed_weight):
    """Writes a checkpoint without an object graph.

    Args:
      directory: `pathlib.Path` of the output directory.
      shapes: dict mapping names to shapes.
      suffix: string that is appended to each name in `shapes`.
      extra: names of additional scalars.
      compute: function of a name and a shape that returns the weights.

    Returns:
      The checkpoint prefix.
    """
    tensors = {f"{name}{suffix}": compute(name, tuple(shape)) for name, shape in shapes.items()}
    tensors.update({name: np.int64(7) for name in extra})
    return golden.save_tensors(directory / "ckpt-7", tensors)


def assert_is_inferred(name, path):
    """Asserts that the settings of a network with 10 classes are inferred from its file. `name` contains them."""
    expected, file = config_of(name), weight_files.open_weights(path)
    config = inspection.read_config(file, {})
    assert file.num_classes == 10 and config.cifar_stem == expected.cifar_stem
    # The file shows the kind of the stem, but not the image size.
    assert config.replace(image_size=expected.image_size, stem=expected.stem) == expected


@pytest.mark.parametrize("name", sorted(TF1_NETWORKS))
def test_tf1_checkpoints_reproduce_the_recorded_outputs(name, tmp_path):
    arrays, config = golden.load("tf1_network"), config_of(name)
    cases = ("case0", "case1", "case2")
    (case,) = [case for case in cases if golden.config_of(arrays, case)[0] == config]
    path = weights_file(tmp_path, TF1_NETWORKS[name], "", extra=("global_step",))
    assert_is_inferred(name, path)
    model = model_lib.build_model(config, 10)
    file = loading.load_model(model, path)
    assert (file.format, file.step) == ("TF1 checkpoint", 7)
    random = np.random.default_rng(int(arrays[f"{case}/images_seed"]))
    images = random.uniform(0, 1, (4, config.image_size, config.image_size, 3)).astype(np.float32)
    outputs = model(images, training=False)
    golden.assert_outputs_match(outputs, arrays, case, 1e-5, "final_avg_pool")


@pytest.mark.parametrize("name", TF2_NETWORKS)
def test_network_is_inferred_from_the_file(name, tmp_path):
    assert_is_inferred(name, weights_file(tmp_path, TF2_NETWORKS[name], SUFFIX, compute=zeros))


def test_network_mismatch_error_lists_matching_flags(tmp_path):
    name = "resnet_depth=50_sk_ratio=0.0625_image_size=64"
    path = weights_file(tmp_path, TF2_NETWORKS[name], SUFFIX, compute=zeros)
    with pytest.raises(UserError) as error:
        loading.warm_start(model_lib.build_model(Config(resnet_depth=10, image_size=8), 10), path)
    assert "--resnet_depth=50 --width_multiplier=1 --sk_ratio=0.0625" in str(error.value)
    assert "missing: model/" in str(error.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("something/else", "does not contain a SimCLR network"),
        ("model/resnet_model/initial_conv_relu_max_pool/0/conv2d/kernel", "unsupported encoder"),
    ],
)
def test_checkpoints_of_other_networks_are_rejected(name, message, tmp_path):
    path = weights_file(tmp_path, {name: [3, 3, 3, 8]}, SUFFIX)
    with rejects(message):
        summary.describe(path)


def test_unreadable_paths_and_other_index_files_are_rejected(tmp_path):
    with rejects("--checkpoint=.*the path cannot be read"):
        weight_files.open_weights("nowhere://bucket/run")
    (tmp_path / "model.index").touch()
    with rejects("neither a checkpoint .*Pass a checkpoint prefix, such as .*/model.$"):
        weight_files.open_weights(str(tmp_path))


def write_tf1_checkpoint(directory):
    """Writes a TF1 checkpoint of a ResNet-18, and returns its prefix."""
    shapes = TF1_NETWORKS["resnet_depth=18_image_size=32"]
    return weights_file(directory, shapes, "", extra=("global_step",))


def test_corrupt_tensors_are_rejected_and_nothing_is_assigned(tmp_path):
    path = write_tf1_checkpoint(tmp_path)
    data_file = tmp_path / "ckpt-7.data-00000-of-00001"
    content = data_file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    model = model_lib.build_model(Config(resnet_depth=18, image_size=32), 10)
    before = [variable.numpy() for variable in model.variables]
    for fault, message in (
        (b"", "ckpt-7 cannot be read"),
        (  # This is detected before anything is read.
            content[: len(content) // 3],
            r"ckpt-7 cannot be read \(the index describes .* bytes, but the files have",
        ),
        (flipped, "ckpt-7: the file is corrupt"),
    ):
        data_file.unlink(missing_ok=True)
        if fault:
            data_file.write_bytes(fault)
        with rejects(message):
            loading.warm_start(model, path)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable, value)


def make_saved_model(directory):
    """Creates the file by which directories are recognized as SavedModels."""
    directory.mkdir(parents=True)
    (directory / "saved_model.pb").touch()


def test_newest_saved_model_of_a_run_is_used(tmp_path):
    for step in ("9", "10"):
        make_saved_model(tmp_path / step)
    assert weight_files.locate(str(tmp_path)) == (
        str(tmp_path / "10" / "variables" / "variables"),
        True,
    )


def test_names_of_published_networks_are_found_in_the_authors_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "_PUBLISHED", f"{tmp_path}/bucket")
    name = "simclrv2/finetuned_10pct/r50_1x_sk0"
    target = tmp_path / "bucket" / name / "saved_model"
    make_saved_model(target)
    monkeypatch.chdir(tmp_path)
    assert weight_files.locate(name) == (f"{target}/variables/variables", True)
    (tmp_path / name).mkdir(parents=True)  # An existing local path takes precedence.
    with rejects(f"--checkpoint={name}: this directory contains neither"):
        weight_files.locate(name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TF1 checkpoint", "SavedModel"])
def test_published_networks_are_evaluated_and_reported_next_to_the_papers_accuracy(kind, tmp_path):
    """Uses small networks in the formats of the published ones, and digits instead of ImageNet."""
    if kind == "TF1 checkpoint":
        path = write_tf1_checkpoint(tmp_path)
    else:  # A tf.Module that holds the Keras model, as in the original.
        module, path = tf.Module(), f"{tmp_path}/saved_model"
        module.saved_model = model_lib.build_model(Config(**SMALL), 10)
        module.saved_model(tf.zeros([1, 32, 32, 3]))
        tf.saved_model.save(module, path)
    study, name = studies.STUDIES["published"], "simclrv1/pretrain/1x"
    run = dataclasses.replace(studies.find_run(("published", name)), flags=dict(checkpoint=path))
    extra = dict(dataset="digits", eval_split="test", image_size=32, eval_batch_size=60)
    executor = Runner(str(tmp_path), "paper", extra)
    record = executor.run("published", run)
    model, _ = loading.open_network(path, dict(image_size=32))
    records = digits.digits_source().records("test").as_numpy_iterator()
    _, images, labels = map(np.stack, zip(*records))
    views = data_util.preprocess_for_eval(tf.cast(images, tf.float32) / 255, 32, False, "crop")
    hits = np.argmax(model(views, training=False)["logits_sup"], 1) == labels
    assert record.results["eval/label_top_1_accuracy"] == pytest.approx(hits.mean(), abs=1e-6)
    rows = results.table("published", [results.Result(run, "x", record)], executor)
    table, _ = report.shown_table(study, results.means(rows))
    (shown,) = table.to_dict("records")
    assert shown["paper, top-1"] == "69.1" and shown["linear head"] == f"{100 * hits.mean():.1f}"


def test_describe_prints_a_summary(tmp_path, capsys):
    cli.main(["describe", write_tf1_checkpoint(tmp_path)])
    printed = capsys.readouterr().out
    for text in ("TF1 checkpoint", "--resnet_depth=18", "10 classes; its input is unknown"):
        assert text in printed
    assert re.search(r"\nstep +7\n", printed)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff",
        b'model_checkpoint_path: "ckpt-8"',
        b'model_checkpoint_path: "/elsewhere/ckpt-7"',
    ],
)
def test_newest_checkpoint_is_found_without_a_valid_checkpoint_state_file(content, tmp_path):
    path = weights_file(tmp_path, {"base_model/conv2d/kernel": [3, 3, 3, 8]}, "")
    if content is not None:
        (tmp_path / "checkpoint").write_bytes(content)
    assert weight_files.locate(str(tmp_path)) == (path, False)


def test_checkpoint_state_file_with_a_glob_pattern_is_rejected(tmp_path):
    weights_file(tmp_path, {"base_model/conv2d/kernel": [3, 3, 3, 8]}, "")
    (tmp_path / "ckpt-*.index").touch()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-*"')
    with rejects(r"contains \*"):
        weight_files.locate(str(tmp_path))


def test_object_graph_with_many_paths_is_read_in_bounded_time(tmp_path):
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root, loop = graph.nodes.add(), graph.nodes.add()
    root.children.add(node_id=1, local_name="resnet_model")
    for name in (*map(str, range(40)), "layers"):  # The graph has 41**10 paths of length 10.
        loop.children.add(node_id=1, local_name=name)
    golden.save_tensors(
        tmp_path / "ckpt-1", {"_CHECKPOINTABLE_OBJECT_GRAPH": graph.SerializeToString()}
    )
    with rejects("ckpt-1 does not contain a SimCLR network"):
        weight_files.open_weights(str(tmp_path))


@pytest.mark.parametrize(
    "depth, stem, sk_ratio, se_ratio",
    [
        (50, "imagenet", 0.25, 0.125),
        (10, "imagenet", 0.25, 0.125),
        (10, "imagenet", 0.0, 0.0),
        (10, "cifar", 0.0, 0.0),
    ],
)
def test_settings_of_an_encoder_are_counted_in_tf2_and_tf1(depth, stem, sk_ratio, se_ratio):
    bottleneck, blocks = resnet.DEPTHS[depth]
    if not bottleneck and sk_ratio:
        sk_ratio = 0.0625  # Basic blocks do not depend on the ratio.
    shapes = architecture.encoder_shapes(bottleneck, blocks, 3, stem == "cifar", sk_ratio, se_ratio)
    flags = architecture.infer_flags(shapes)
    expected = dict(resnet_depth=depth, width_multiplier=3, sk_ratio=sk_ratio, se_ratio=se_ratio)
    assert flags == dict(expected, stem=stem, proj_head_mode="none")
    tf1 = {name: shapes[key] for key, name in tf1_names.names_by_key(shapes).items()}
    keys = tf1_names.find_tensors(tf1, {name: name for name in tf1})
    assert {key: tf1[name] for key, name in keys.items()} == shapes
    del tf1["base_model/conv2d_5/kernel"]
    keys = tf1_names.find_tensors(tf1, {name: name for name in tf1})
    assert architecture.infer_flags(dict.fromkeys(keys, (3, 3, 3, 64))) is None
