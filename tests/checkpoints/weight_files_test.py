"""Weight files in all formats: architecture inference, loading, summaries and errors."""

import contextlib
import dataclasses
import http.server
import io
import re
import tarfile
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

import data_util
import evaluate
import model as model_lib
import resnet
import train
from checkpoints import architecture, cli, inspection, restoring, summary, tf1_names, weight_files
from config import Config, settings_with
from export import saving
from paper import report, results, studies
from paper.runner import Runner
from runtime.errors import UserError
from sources import digits
from support import SMALL, golden, runs
from support.errors import rejects

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
TF2_NETWORKS = golden.load_json("checkpoint_keys")
TF1_NETWORKS = golden.load_json("tf1_checkpoint_names")


def config_of(name):
    """Parses a name such as `resnet_depth=18_image_size=64` into a `Config`."""
    settings = {
        key: float(value) if "." in value else int(value)
        for key, value in re.findall(r"_?([a-z_]+)=([0-9.]+)", name)
    }
    return Config(**{"image_size": 32, **settings})


def computed_weights_file(directory, shapes, suffix, extra=()):
    """Writes a checkpoint with weights from `golden.computed_weight` and without an object graph.

    Args:
      directory: `pathlib.Path` of the output directory.
      shapes: dict mapping names to shapes.
      suffix: string that is appended to each name in `shapes`.
      extra: names of additional scalars.

    Returns:
      The checkpoint prefix.
    """
    tensors = {
        f"{name}{suffix}": golden.computed_weight(name, tuple(shape))
        for name, shape in shapes.items()
    }
    tensors.update({name: np.int64(7) for name in extra})
    return golden.save_tensors(directory / "ckpt-7", tensors)


@pytest.mark.parametrize("name", sorted(TF1_NETWORKS))
def test_tf1_checkpoints_reproduce_the_recorded_outputs(name, tmp_path):
    arrays, config = golden.load("tf1_network"), config_of(name)
    cases = ("case0", "case1", "case2")
    (case,) = [case for case in cases if golden.config_of(arrays, case)[0] == config]
    model = model_lib.build_model(config, 10)
    file = restoring.load_model(
        model, computed_weights_file(tmp_path, TF1_NETWORKS[name], "", extra=("global_step",))
    )
    assert (file.format, file.step) == ("TF1 checkpoint", 7)
    random = np.random.default_rng(int(arrays[f"{case}/images_seed"]))
    images = random.uniform(0, 1, (4, config.image_size, config.image_size, 3)).astype(np.float32)
    outputs = model(images, training=False)
    for ours, theirs in (
        ("final_avg_pool", "hidden"),
        ("proj_head_output", "proj"),
        ("logits_sup", "logits"),
    ):
        assert golden.relative_error(outputs[ours], arrays[f"{case}/{theirs}"]) < 1e-5


@pytest.mark.parametrize(
    "name, shapes, suffix",
    [
        *((name, shapes, SUFFIX) for name, shapes in TF2_NETWORKS.items()),
        *((name, shapes, "") for name, shapes in TF1_NETWORKS.items()),
    ],
)
def test_network_is_inferred_from_the_file_and_its_weights_are_loaded(
    name, shapes, suffix, tmp_path
):
    expected, path = config_of(name), computed_weights_file(tmp_path, shapes, suffix)
    file = weight_files.open_weights(path)
    config = inspection.infer_config(file)
    assert file.num_classes == 10 and config.cifar_stem == expected.cifar_stem
    for setting in (
        "resnet_depth",
        "width_multiplier",
        "sk_ratio",
        "se_ratio",
        "proj_head_mode",
        "num_proj_layers",
        "proj_out_dim",
    ):
        assert getattr(config, setting) == getattr(expected, setting), setting
    inferred = {
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    assert inferred <= set(settings_with("network"))
    if suffix:  # Other tests load the TF1 checkpoints.
        model = model_lib.build_model(expected, 10)
        restoring.load_model(model, path)
        assert_computed_weights(model)


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """Exports a model in three ways, with weights from `golden.computed_weight`.

    Returns a dict mapping exporters to directories.
    """
    model, _ = golden.build_model(Config(**SMALL), 4)
    directories = {}

    def save(exporter, module, **options):
        directories[exporter] = str(tmp_path_factory.mktemp(exporter))
        tf.saved_model.save(module, directories[exporter], **options)

    module, signatures = saving.build_module(model, Config(**SMALL))
    save("ours", module, signatures=signatures)
    # As in the original, a tf.Module holds the Keras model, so every layer is saved.
    module = tf.Module()
    module.saved_model = model
    save("original", module)
    # As in models converted from TF1, the variables are in a list, and only their names identify
    # them.
    module = tf.Module()
    module.variables_ = [
        tf.Variable(variable, name=golden.tf1_name(key))
        for key, variable in restoring.variables_by_key(model=model).items()
    ]
    save("converted", module)
    return directories


def assert_computed_weights(model):
    for key, variable in restoring.variables_by_key(model=model).items():
        np.testing.assert_array_equal(
            variable, golden.computed_weight(key, tuple(variable.shape)), err_msg=key
        )


@pytest.mark.parametrize("exporter", ["ours", "original", "converted"])
def test_weights_are_loaded_from_saved_models_of_all_exporters(exporter, saved_models):
    model = model_lib.build_model(Config(**SMALL), 4)
    file = restoring.load_model(model, saved_models[exporter])
    assert file.is_saved_model and ("TF1 names" in file.format) == (exporter == "converted")
    assert_computed_weights(model)


def test_saved_model_with_a_hub_handle_is_downloaded(saved_models, tmp_path, monkeypatch):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(saved_models["ours"], arcname=".")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            exists = self.path.startswith("/simclr/1") and "tf-hub-format=compressed" in self.path
            self.send_response(200 if exists else 404)
            self.end_headers()
            if exists:
                self.wfile.write(archive.getvalue())

        def log_message(self, *_):
            """Suppresses the request log."""

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFHUB_CACHE_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        model = model_lib.build_model(Config(**SMALL), 4)
        lines = restoring.warm_start(model, f"{address}/simclr/1").lines
        with rejects("--checkpoint=.*/simclr/2: the download failed"):
            weight_files.open_weights(f"{address}/simclr/2")
        server.shutdown()
    cache = tmp_path / ".cache" / "tfhub_modules"  # Other users cannot prepare files there.
    assert list(cache.iterdir()) and cache.stat().st_mode & 0o777 == 0o700
    assert lines[0].startswith(f"loaded {len(model.variables)} of {len(model.variables)} variables")
    assert_computed_weights(model)


def test_network_mismatch_error_lists_matching_flags(tmp_path):
    path = computed_weights_file(
        tmp_path, TF2_NETWORKS["resnet_depth=50_sk_ratio=0.0625_image_size=64"], SUFFIX
    )
    with pytest.raises(UserError) as error:
        restoring.warm_start(
            model_lib.build_model(Config(resnet_depth=50, image_size=64), 10), path
        )
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
    path = computed_weights_file(tmp_path, {name: [3, 3, 3, 8]}, SUFFIX)
    with rejects(message):
        summary.describe(path)


def test_missing_and_unreadable_checkpoints_are_rejected(tmp_path):
    for path, message in (
        (tmp_path, "this directory contains neither a checkpoint nor a SavedModel"),
        (tmp_path / "ckpt-1", "no such checkpoint"),
        ("nowhere://bucket/run", "the path cannot be read"),
    ):
        with rejects(f"--checkpoint=.*{message}"):
            weight_files.open_weights(str(path))
    (tmp_path / "model.index").touch()
    with rejects("neither a checkpoint .*Pass a checkpoint prefix, such as .*/model.$"):
        weight_files.open_weights(str(tmp_path))


@pytest.fixture
def tf1_checkpoint(tmp_path):
    """Writes a TF1 checkpoint of a ResNet-18, and returns its prefix."""
    shapes = TF1_NETWORKS["resnet_depth=18_image_size=32"]
    return computed_weights_file(tmp_path, shapes, "", extra=("global_step",))


@pytest.mark.parametrize("fault", ["cut", "missing", "flipped"])
def test_corrupt_tensors_are_rejected_and_nothing_is_assigned(fault, tf1_checkpoint, tmp_path):
    data_file = tmp_path / "ckpt-7.data-00000-of-00001"
    content = bytearray(data_file.read_bytes())
    data_file.unlink()
    message = "ckpt-7 cannot be read"
    if fault == "cut":  # This is detected before anything is read.
        data_file.write_bytes(content[: len(content) // 3])
        message += r" \(the index describes .* bytes, but the files have"
    elif fault == "flipped":
        content[len(content) // 2] ^= 1
        data_file.write_bytes(content)
        message = "ckpt-7: the file is corrupt"
    model = model_lib.build_model(Config(resnet_depth=18, image_size=32), 10)
    before = [variable.numpy() for variable in model.variables]
    with rejects(message):
        restoring.warm_start(model, tf1_checkpoint)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable, value)


def test_newest_saved_model_of_a_run_is_used(saved_models, tmp_path):
    for step in ("9", "10"):
        (tmp_path / step).symlink_to(saved_models["ours"])
    assert weight_files.locate(str(tmp_path)) == (
        str(tmp_path / "10" / "variables" / "variables"),
        True,
    )


def test_names_of_published_networks_are_found_in_the_authors_storage(
    saved_models, tmp_path, monkeypatch
):
    monkeypatch.setattr(weight_files, "_PUBLISHED", str(tmp_path / "bucket"))
    name = "simclrv2/finetuned_10pct/r50_1x_sk0"
    target = tmp_path / "bucket" / name / "saved_model"
    target.parent.mkdir(parents=True)
    target.symlink_to(saved_models["ours"])
    monkeypatch.chdir(tmp_path)
    assert weight_files.locate(name) == (f"{target}/variables/variables", True)
    (tmp_path / name).mkdir(parents=True)  # An existing local path takes precedence.
    with rejects(f"--checkpoint={name}: this directory contains neither"):
        weight_files.locate(name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TF1 checkpoint", "SavedModel"])
def test_published_networks_are_evaluated_and_reported_next_to_the_papers_accuracy(
    kind, tf1_checkpoint, tmp_path
):
    """Uses small networks in the formats of the published ones, and digits instead of ImageNet."""
    path = tf1_checkpoint
    if kind == "SavedModel":  # A tf.Module that holds the Keras model, as in the original.
        module, path = tf.Module(), str(tmp_path / "saved_model")
        module.saved_model = model_lib.build_model(Config(**SMALL), 10)
        module.saved_model(tf.zeros([1, 32, 32, 3]))
        tf.saved_model.save(module, path)
    study, name = studies.STUDIES["published"], "simclrv1/pretrain/1x"
    run = dataclasses.replace(studies.find_run(("published", name)), flags=dict(checkpoint=path))
    extra = dict(dataset="digits", eval_split="test", image_size=32, eval_batch_size=60)
    executor = Runner(str(tmp_path), "paper", extra)
    record = executor.run("published", run)
    model, _ = restoring.open_network(path, dict(image_size=32))
    records = digits.digits_source().records("test").as_numpy_iterator()
    _, images, labels = map(np.stack, zip(*records))
    views = data_util.preprocess_for_eval(tf.cast(images, tf.float32) / 255, 32, False, "crop")
    hits = np.argmax(model(views, training=False)["logits_sup"], 1) == labels
    assert record.results["eval/label_top_1_accuracy"] == pytest.approx(hits.mean(), abs=1e-6)
    rows = results.table("published", [results.Result(run, "x", record)], executor)
    ((titles, (texts,)), _) = report.shown_table(study, results.means(rows))
    shown = dict(zip(titles, texts))
    assert shown["paper, top-1"] == "69.1" and shown["linear head"] == f"{100 * hits.mean():.1f}"


@pytest.mark.parametrize("selector, rejected", [(-1, True), (0, False)])
def test_classifier_on_a_projection_layer_requires_the_projection_weights(
    selector, rejected, tf1_checkpoint
):
    """Missing projection weights raise an error if the classifier would otherwise use a randomly initialized layer."""
    config = Config(
        resnet_depth=18,
        image_size=32,
        num_proj_layers=2,
        checkpoint=tf1_checkpoint,
        dataset="digits",
        train_mode="finetune",
        ft_proj_selector=selector,
    )
    model = model_lib.build_model(config, 10)
    parts = evaluate._required_parts(config, digits.digits_source())
    for load in (
        lambda: train._initialize_weights(runs.make_context(config), model),
        lambda: restoring.load_parts(model, tf1_checkpoint, parts),
    ):
        with rejects("--num_proj_layers=3") if rejected else contextlib.nullcontext():
            load()


@pytest.mark.parametrize("zero_init", [False, True])
def test_loaded_linear_head_is_logged_unless_it_is_zero_initialized(
    zero_init, tf1_checkpoint, capsys
):
    config = Config(
        resnet_depth=18,
        image_size=32,
        train_mode="finetune",
        checkpoint=tf1_checkpoint,
        zero_init_logits_layer=zero_init,
    )
    model = model_lib.build_model(config, 10)
    train._initialize_weights(runs.make_context(config, digits.digits_source()), model)
    assert ("pass --zero_init_logits_layer to start from zeros" in capsys.readouterr().out) == (
        not zero_init
    )
    assert model.supervised_head.linear_layer.dense.kernel.numpy().any() == (not zero_init)


def test_describe_prints_a_summary(tf1_checkpoint, capsys):
    cli.main(["describe", tf1_checkpoint])
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
    path = computed_weights_file(tmp_path, {"base_model/conv2d/kernel": [3, 3, 3, 8]}, "")
    if content is not None:
        (tmp_path / "checkpoint").write_bytes(content)
    assert weight_files.locate(str(tmp_path)) == (path, False)


def test_checkpoint_state_file_with_a_glob_pattern_is_rejected(tmp_path):
    computed_weights_file(tmp_path, {"base_model/conv2d/kernel": [3, 3, 3, 8]}, "")
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
    "settings", [dict(sk_ratio=0.25, se_ratio=0.125), {}, dict(cifar_stem=True)]
)
@pytest.mark.parametrize("depth", [10, 50])
@pytest.mark.parametrize("layer_names", [architecture.checkpoint_names, tf1_names.encoder_names])
def test_encoder_is_matched_only_if_all_shapes_agree(layer_names, depth, settings):
    bottleneck, blocks = resnet.DEPTHS[depth]
    if not bottleneck and "sk_ratio" in settings:
        settings = {**settings, "sk_ratio": 0.0625}  # Basic blocks do not depend on the ratio.
    specs = list(resnet.layer_specs(bottleneck, blocks, 3, **settings))
    shapes = {
        f"{name}/{variable}": shape
        for name, spec in zip(layer_names(specs), specs)
        for variable, shape in spec.variables().items()
    }
    flags, keys_by_name = architecture.match_encoder(shapes, layer_names)
    stem = "cifar" if settings.pop("cifar_stem", False) else "imagenet"
    expected = dict(resnet_depth=depth, width_multiplier=3, stem=stem, sk_ratio=0.0, se_ratio=0.0)
    assert flags == {**expected, **settings} and keys_by_name.keys() == shapes.keys()
    for name in (min(shapes), max(shapes)):
        assert architecture.match_encoder({**shapes, name: (5,)}, layer_names) is None
    one_block_more = resnet.layer_specs(bottleneck, (*blocks[:3], blocks[3] + 1))
    for spec in one_block_more:
        names = {f"{architecture.ENCODER}{spec.key}/{variable}" for variable in spec.kind}
        assert names <= architecture.all_keys()
