"""SavedModels: contents, use by clients, and command-line export and inference."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import types

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_hub
import tf_keras as keras
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from PIL import Image
from pyarrow import parquet
from tensorflow.core.protobuf import saved_model_pb2

import data_util
import model as model_lib
from checkpoints import inspection, loading, lock, weight_files
from config import Config
from export import cli, exporting, model_card, saving
from inference import cli as inference_cli
from inference import endpoints, writers
from runtime import signals, storage
from runtime.errors import STOPPED_STATUS, Stopped
from support import SMALL, golden, networks, no_space, processes, read_json, write_json
from support.errors import rejects

TINY = dict(SMALL, weight_decay=1e-4)
CLASSES = [f"kind {index}" for index in range(10)]
OUTPUTS = {
    "initial_conv",
    "initial_max_pool",
    "block_group1",
    "block_group2",
    "block_group3",
    "block_group4",
    "final_avg_pool",
    "logits_sup",
    "proj_head_input",
    "proj_head_output",
}


IMAGES = np.random.default_rng(2).random([2, 8, 8, 3], np.float32)


def assert_outputs_match(outputs, expected, tolerance=1e-5):
    """Asserts that the outputs for `IMAGES` equal those of the network up to rounding."""
    assert set(outputs) == OUTPUTS
    for name in OUTPUTS:
        assert golden.relative_error(outputs[name], expected[name]) < tolerance, name


def test_saved_model_outputs_and_call_signatures_match_the_original(exported, expected):
    for outputs in (
        exported(IMAGES, trainable=False),
        exported(IMAGES, training=False),
        exported(IMAGES),
        exported.signatures["serving_default"](inputs=tf.constant(IMAGES)),
    ):
        assert_outputs_match(outputs, expected, 1e-6)


def test_trainable_variables_list_contains_the_trained_variables_as_in_the_original(
    network, exported
):
    variables = exported.trainable_variables_list
    assert len(variables) == len(network.trainable_variables) > 20
    for variable, expected in zip(variables, network.trainable_variables):
        assert_array_equal(variable, expected)


def naive_input(image):
    """Crops an image [h, w, 3] in [0, 1] to its central square, and resizes the square to 8 x 8 pixels."""
    side = min(image.shape[:2])
    top, left = ((length - side + 1) // 2 for length in image.shape[:2])
    square = tf.image.resize(image[top : top + side, left : left + side], [8, 8], "bicubic")
    return tf.clip_by_value(square, 0, 1)


def test_serving_uint8_accepts_images_of_any_size(exported):
    images = np.random.default_rng(1).integers(0, 256, [3, 20, 30, 3], np.uint8)
    outputs = exported.signatures["serving_uint8"](inputs=tf.constant(images))
    expected = exported(tf.stack([naive_input(image) for image in images / np.float32(255)]))
    assert_allclose(outputs["final_avg_pool"], expected["final_avg_pool"], rtol=1e-4, atol=1e-5)


def test_regularization_loss_is_the_weight_decay(exported):
    (regularization_loss,) = exported.regularization_losses
    decayed = [
        v.numpy() for v in exported.trainable_variables if not re.search("gamma|beta", v.name)
    ]
    expected = TINY["weight_decay"] * sum(np.sum(np.square(value)) for value in decayed) / 2
    assert regularization_loss().numpy() == pytest.approx(expected, rel=1e-5)


def test_saved_model_works_as_keras_3_layer(saved_model, expected):
    keras_3 = pytest.importorskip("keras", minversion="3")
    inputs = keras_3.Input([8, 8, 3])
    encoder = keras_3.layers.TFSMLayer(
        saved_model, call_endpoint="serving_default", trainable=False
    )
    assert_outputs_match(encoder(IMAGES), expected)
    outputs = keras_3.layers.Dense(2)(encoder(inputs)["final_avg_pool"])
    classifier = keras_3.Model(inputs, outputs)
    classifier.compile("adam", keras_3.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = classifier.fit(IMAGES, np.array([0, 1]), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0] and len(classifier.trainable_weights) == 2


def test_saved_model_converts_to_tflite(saved_model, expected):
    converter = tf.lite.TFLiteConverter.from_saved_model(
        saved_model, signature_keys=["serving_default"]
    )
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    run = interpreter.get_signature_runner("serving_default")
    assert_outputs_match(run(inputs=IMAGES), expected)


def test_saved_model_converts_to_onnx(saved_model, expected, tmp_path, monkeypatch):
    convert = pytest.importorskip("tf2onnx.convert")
    import onnxruntime

    path, names = f"{tmp_path}/model.onnx", sorted(OUTPUTS)
    monkeypatch.setattr(sys, "argv", ["", "--saved-model", saved_model, "--output", path])
    convert.main()
    outputs = onnxruntime.InferenceSession(path).run(names, {"inputs": IMAGES})
    assert_outputs_match(dict(zip(names, outputs)), expected)


def test_saved_model_can_be_fine_tuned_in_hub_keras_layer(saved_model):
    layer = tensorflow_hub.KerasLayer(saved_model, trainable=True, output_key="final_avg_pool")
    classifier = keras.Sequential([layer])
    classifier.compile(keras.optimizers.SGD(0.05), "mse")

    def statistics():
        return [variable.numpy() for variable in layer.variables if "moving" in variable.name]

    before = statistics()
    losses = classifier.fit(IMAGES, np.zeros([2, 512]), epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    after = statistics()
    assert len(after) > 20 and all((new != old).any() for new, old in zip(after[:2], before))
    layer(IMAGES, training=False)
    assert_equal(statistics(), after)


def test_saved_model_contains_only_operations_with_their_usual_gradients(saved_model):
    """The batch norm of several replicas has a gradient of its own, and parts that XLA compiles."""
    content = saved_model_pb2.SavedModel.FromString(
        pathlib.Path(saved_model, "saved_model.pb").read_bytes()
    )
    functions = content.meta_graphs[0].graph_def.library.function
    names = {name for function in functions for name in function.attr}
    names |= {name for function in functions for node in function.node_def for name in node.attr}
    assert "_input_shapes" in names and not {"_XlaMustCompile", "_gradient_op_type"} & names


def test_exports_omit_the_outputs_of_missing_heads():
    config = Config(**TINY | dict(proj_head_mode="none", lineareval_while_pretraining=False))
    _, signatures = saving.build_module(model_lib.build_model(config, 10), config)
    outputs = signatures["serving_default"](tf.constant(IMAGES))
    assert set(outputs) == OUTPUTS - {"proj_head_input", "proj_head_output", "logits_sup"}


@pytest.fixture
def quick_save(monkeypatch):
    networks.replace_exports(monkeypatch.setattr)


@pytest.fixture
def without_graphs(quick_save, monkeypatch):
    """Makes exports describe the network, without writing its graph and its weights."""
    monkeypatch.setattr(
        loading, "open_network", lambda *given: (None, inspection.inspect_checkpoint(*given))
    )


@pytest.fixture
def root(tmp_path):
    return tmp_path / "saved_model"


@pytest.fixture
def export_steps(quick_save, tmp_path):
    """Returns a function that exports checkpoints to `root`, and returns the paths of the SavedModels."""

    def export(*steps, keep=1, **settings):
        config = Config(**TINY, keep_hub_module_max=keep, **settings)
        return [
            saving.export_to_model_dir(config, str(tmp_path), f"{tmp_path}/ckpt-{step}")
            for step in steps
        ]

    return export


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def tree(directory):
    """Returns the relative paths of all files and links in a directory."""
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


def test_old_and_unfinished_exports_are_deleted(root, export_steps):
    (root / f"{storage.TEMP_PREFIX}0a_1b2c3" / "saved_model" / "variables").mkdir(parents=True)
    export_steps(3, 4, 4)
    assert names_in(root) == {"4"}


@pytest.mark.parametrize(
    "mode, keep, names",
    [
        ("train", 2, {"15", "30"}),
        ("eval", 2, {"10", "20", "30"}),
        ("eval", 3, {"15", "20", "30"}),
        ("eval", 0, {"10", "15", "20", "30"}),
    ],
)
def test_training_keeps_its_new_export_and_evaluations_keep_exports_of_later_steps(
    mode, keep, names, root, export_steps, capsys
):
    export_steps(10, 20, 30, keep=3)
    (exported,) = export_steps(15, keep=keep, mode=mode)
    assert names_in(root) == names
    assert (exported is None) == ("15" not in names)
    assert ("step 15 is not exported" in capsys.readouterr().out) == ("15" not in names)


def test_export_waits_until_another_process_releases_the_lock(
    tmp_path, root, export_steps, monkeypatch, capsys
):
    with processes.holding_lock(tmp_path, "--model_dir", lock.EXPORT) as other:
        is_written = []

        def sleep(_):
            is_written.append(root.exists())
            if len(is_written) == 3:
                other.kill()
                other.wait()

        monkeypatch.setattr(lock.time, "sleep", sleep)
        export_steps(1)
    assert len(is_written) >= 3 and not any(is_written) and names_in(root) == {"1"}
    printed = capsys.readouterr().out
    assert printed.count(f"waiting for another process to release {tmp_path}/export.lock") == 1


def test_waiting_for_another_export_can_be_stopped_by_a_signal(tmp_path):
    with lock.Lock(str(tmp_path), name=lock.EXPORT), signals.StopSignals(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        lock.Lock(str(tmp_path), name=lock.EXPORT, wait=True)


def test_only_files_that_exports_wrote_are_replaced_or_deleted(
    tmp_path, root, export_steps, capsys
):
    elsewhere = tmp_path / "elsewhere"
    export_steps(1, 2, 4, keep=0)
    mine = (
        "1/notes.txt",
        "2/assets.extra/labels.txt",
        "4/variables/mine",
        "unfinished_abcdefgh/mine",
        "\u00b2/mine",
    )
    for name in mine:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    elsewhere.mkdir()
    (elsewhere / "variables.index").write_text("mine")
    (root / "3").mkdir()
    (root / "3" / "variables").symlink_to(elsewhere)
    (root / "0").symlink_to(elsewhere)
    (root / "4" / "saved_model.pb").write_text("old")
    export_steps(4)
    assert tree(root) == {*mine, "3/variables", "0", *(f"4/{name}" for name in saving.FILES)}
    assert (root / "4" / "saved_model.pb").read_bytes() == b"new"
    assert (elsewhere / "variables.index").read_text() == "mine"
    printed = capsys.readouterr().out
    for step, name in ((0, "variables.index"), (1, "notes.txt"), (2, "assets.extra")):
        assert f"/{step} contains other files, which are kept: {name}" in printed


@pytest.mark.parametrize("link", ["4", "4/variables"])
def test_links_are_not_replaced(link, tmp_path, root, export_steps):
    (path,) = export_steps(4)
    target = tmp_path / "target"
    (root / link).rename(target)
    (root / link).symlink_to(target)
    before = tree(target)
    with rejects(f"{path}/.*: links are not replaced"):
        export_steps(4)
    assert before and tree(target) == before


def test_nothing_is_deleted_if_the_saved_model_directory_is_a_link(tmp_path, root, export_steps):
    export_steps(1, 2, keep=9)
    root.rename(tmp_path / "exports")  # This directory is shared with other runs.
    root.symlink_to(tmp_path / "exports")
    export_steps(3)
    assert names_in(root) == {"1", "2", "3"}


@pytest.fixture(scope="module")
def network():
    """Builds a network whose weights are computed by a formula."""
    return golden.build_model(Config(**TINY))[0]


@pytest.fixture(scope="module")
def expected(network):
    return network(IMAGES, training=False)


@pytest.fixture(scope="module")
def run_dir(network, tmp_path_factory):
    """Writes a run directory with flags, classes, results, and a checkpoint of `network`."""
    directory = tmp_path_factory.mktemp("run")
    checkpoint = tf.train.Checkpoint(model=network, global_step=tf.Variable(4, dtype=tf.int64))
    checkpoint.write(f"{directory}/ckpt-4")
    write_json(directory / "flags.json", TINY)
    write_json(directory / "classes.json", CLASSES)
    weights = weight_files.open_weights(f"{directory}/ckpt-4").digest()
    record = dict(
        weights=weights,
        dataset="digits",
        eval_split="test",
        examples=360,
        trained_examples=9,
        train_split="train",
        label_fraction=1.0,
    )
    results = {"eval/label_top_1_accuracy": 0.51234, "computed_from": record}
    write_json(directory / "result_4.json", results)
    return directory


@pytest.fixture
def checkpoint(run_dir, tmp_path):
    """Copies the checkpoint of `run_dir` without the other files of the run. Returns its prefix."""
    for path in run_dir.glob("ckpt-4.*"):
        shutil.copy(path, tmp_path)
    return f"{tmp_path}/ckpt-4"


@pytest.fixture(scope="module")
def saved_model(run_dir):
    """Exports `run_dir` with `python -m export`. Returns the path of the SavedModel."""
    path = run_dir / "exported"
    archive = f"--archive={run_dir / 'simclr.tar.gz'}"
    cli.main([f"--checkpoint={run_dir}", f"--export_dir={path}", archive])
    return str(path)


@pytest.fixture(scope="module")
def exported(saved_model):
    return tf.saved_model.load(saved_model)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Writes a folder that contains images in several sizes and formats, a corrupt image and a text file."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    sizes = {"b/x.png": (9, 12), "a.jpg": (20, 11), "b/c/y.PNG": (8, 8), ".thumbs/a.jpg": (8, 8)}
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, [*size, 3], np.uint8)).save(path)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image either")
    return str(folder)


_CLIENT = """
import importlib.util, sys
import numpy as np, tensorflow as tf
assert not any(importlib.util.find_spec(name) for name in ("run", "lars_optimizer", "train"))
module = tf.saved_model.load(sys.argv[1])
images = tf.constant(np.load("images.npy"))
np.savez("call.npz", **module(images, trainable=False))
np.savez("serving.npz", **module.signatures["serving_default"](inputs=images))
"""


def test_saved_model_works_in_a_client_without_this_project(saved_model, expected, tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    subprocess.run([sys.executable, "-c", _CLIENT, saved_model], check=True, cwd=tmp_path)
    for name in ("call.npz", "serving.npz"):
        assert_outputs_match(np.load(tmp_path / name), expected)


def test_archive_contains_the_saved_model_and_is_described_by_its_model_card(
    saved_model, run_dir, tmp_path
):
    with tarfile.open(run_dir / "simclr.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
        assert {(item.uid, item.gid, item.uname, item.mtime) for item in tar} == {(0, 0, "root", 0)}
    assert tree(tmp_path) == tree(pathlib.Path(saved_model)) == set(saving.FILES)
    card = (run_dir / "simclr.md").read_text()
    for text in (
        "---\nlibrary_name: tf-keras\n",
        "\ntags: [simclr, self-supervised-learning, contrastive-learning]\n---\n\n# resnet10",
        "--num_proj_layers=2",
        "4 steps",
        "10 (kind 0",
        "The image size is 8 pixels",
        "Trained on imagenet2012 (train)",
        "Evaluated on 360 images of digits (test). **9 of these images were also used for training",
        "| eval/label_top_1_accuracy | 0.5123 |",
    ):
        assert text in card


def test_exports_record_settings_and_classes_but_not_the_paths_of_data_and_weights(
    checkpoint, without_graphs, tmp_path
):
    paths = dict(dataset="folder:/home/me/photos", checkpoint="/home/me/runs/ckpt-5")
    settings = dict(TINY, **paths, train_mode="finetune", eval_center_crop=True)
    write_json(tmp_path / "flags.json", settings)
    write_json(tmp_path / "classes.json", dict(names=CLASSES, multi_label=True))
    new, archive, again = (tmp_path / name for name in ("new", "new.tar.gz", "again.tar.gz"))
    cli.main([f"--checkpoint={checkpoint}", f"--export_dir={new}", f"--archive={archive}"])
    for path in (tmp_path / "new.md", new / weight_files.DESCRIPTION_FILE):
        text = path.read_text()
        assert "/home" not in text and "folder:photos" in text and "ckpt-5" in text
    info = inspection.inspect_checkpoint(checkpoint)
    assert info.config.eval_center_crop and info.multi_label and info.class_names == CLASSES
    description = weight_files.read_description(str(new))
    assert description["multi_label"] and description["eval_center_crop"]
    assert exporting.write_archive(str(new), str(again)).endswith("again.md")
    assert again.read_bytes() == archive.read_bytes()


def test_results_of_other_weights_are_not_exported(run_dir, checkpoint, tmp_path):
    assert inspection.inspect_checkpoint(str(run_dir)).results
    results = read_json(run_dir / "result_4.json")
    others = ({**results, "computed_from": {"weights": "0" * 64}}, {"eval/label_top_1_accuracy": 1})
    for content in others:
        write_json(tmp_path / "result_4.json", content)
        assert inspection.inspect_checkpoint(checkpoint).results is None


def test_exporting_a_saved_model_keeps_its_description(saved_model, without_graphs, tmp_path):
    cli.main([f"--checkpoint={saved_model}", f"--export_dir={tmp_path / 'again'}"])
    description = weight_files.read_description(f"{tmp_path}/again")
    assert description == weight_files.read_description(saved_model) | {"weights": "SavedModel"}


def test_checkpoint_without_run_files_is_exported_without_training_settings(
    checkpoint, without_graphs, tmp_path
):
    new, archive = tmp_path / "new", tmp_path / "missing/folder/new.tar.gz"
    paths = f"--checkpoint={checkpoint}", f"--export_dir={new}", f"--archive={archive}"
    cli.main([*paths, "--image_size=16"])
    card = (tmp_path / "missing/folder/new.md").read_text()
    assert "\n## Training\n\nNot recorded.\n\n## Results" in card
    description = weight_files.read_description(str(new))
    assert "class_names" not in description and ", training not recorded\n" in card
    assert description["image_size"] == 16


def test_network_has_recorded_settings_and_others_are_inferred_from_the_tensors(
    checkpoint, tmp_path
):
    write_json(tmp_path / "flags.json", {"dataset": "digits", "proj_out_dim": 64})
    write_json(tmp_path / "classes.json", ["two", "classes"])
    info = inspection.inspect_checkpoint(checkpoint)
    config = info.config
    assert (config.resnet_depth, config.dataset, config.proj_out_dim) == (10, "digits", 64)
    assert len(info.class_names) == 10
    with rejects("different network.*_projection_head.*Pass --resnet_depth=10 .*--proj_out_dim=16"):
        loading.open_network(checkpoint)


FILES = ["a.jpg", "b/c/y.PNG", "b/x.png"]


def naive_vectors(exported, folder, output):
    """Returns the vectors [n, d] that an endpoint computes for `FILES`, one file at a time."""
    rows = []
    for name in FILES:
        content = tf.io.read_file(f"{folder}/{name}")
        image = tf.io.decode_image(content, channels=3, dtype=tf.float32)
        rows.append(exported(naive_input(image)[tf.newaxis])[output][0])
    return np.array(rows)


def read_output(path, name):
    """Returns a dict of the columns of strings in an output file, the values `name`, and their names, or None."""
    if path.suffix == ".npz":
        renamed = {"files": "file", "classes": "class"}
        columns = {renamed.get(key, key): array.tolist() for key, array in np.load(path).items()}
        return columns, columns.pop(name), columns.pop("class_names", None)
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        columns, names = table.to_pydict(), (table.schema.metadata or {}).get(b"class_names")
        return columns, columns.pop(name), names and names.decode().split("\n")
    table = pd.read_csv(path)
    columns = {key: table.pop(key).tolist() for key in ("file", "class") if key in table}
    return columns, table.to_numpy(), list(table)


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_embed_and_predict_write_one_row_per_image(
    suffix, saved_model, exported, photos, tmp_path, capsys
):
    logits = naive_vectors(exported, photos, "logits_sup")
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    classes = [CLASSES[index] for index in logits.argmax(-1)]
    vectors = naive_vectors(exported, photos, "proj_head_output")
    vector_names = [f"v{index}" for index in range(16)] if suffix == "csv" else None
    for arguments, name, *expected in (
        ("embed --output=proj_head_output", "vectors", {"file": FILES}, vectors, vector_names),
        ("predict", "probabilities", {"file": FILES, "class": classes}, probabilities, CLASSES),
    ):
        out = tmp_path / f"{name}.{suffix}"
        inference_cli.main([*arguments.split(), saved_model, photos, f"--out={out}"])
        skipped, written = capsys.readouterr().out.splitlines()
        assert skipped.startswith(f"skipped {photos}/broken.jpg: ")
        assert written.startswith("wrote 3 ") and written.endswith(f" to {out}")
        columns, values, names = read_output(out, name)
        assert (columns, names) == (expected[0], expected[2])
        assert_allclose(values, expected[1], rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 2


def test_embedded_vectors_do_not_depend_on_batch_boundaries(photos, monkeypatch):
    networks.replace_network(monkeypatch, lambda images: images)
    paths = [f"{photos}/{name}" for name in ("a.jpg", "b/x.png", "broken.jpg", "b/c/y.PNG")]
    results = []
    for batch_size, counts in ((2, [2, 1]), (9, [3])):
        unreadable = {}
        batches = endpoints.compute_endpoint("model", "", None, paths, unreadable, batch_size)
        readable, vectors, _ = zip(*batches)
        assert list(map(len, readable)) == counts and list(unreadable) == [paths[2]]
        results.append(np.concatenate(vectors))
    assert_array_equal(*results)


@pytest.mark.parametrize(
    "multi_label, probabilities",
    [
        (False, "kind 1 0.600, kind 3 0.200, kind 0 0.100, kind 4 0.050, kind 2 0.040"),
        (True, "kind 1 0.375, kind 3 0.167, kind 0 0.091, kind 4 0.048, kind 2 0.038"),
    ],
)
def test_predict_prints_the_most_probable_classes(
    multi_label, probabilities, photos, monkeypatch, capsys
):
    logits = tf.math.log([[0.1, 0.6, 0.04, 0.2, 0.05, 0.01]])
    networks.replace_network(monkeypatch, lambda images: logits, CLASSES, multi_label)
    inference_cli.main(["predict", "model", f"{photos}/a.jpg", f"{photos}/broken.jpg"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{photos}/a.jpg: {probabilities}"
    assert second.startswith(f"skipped {photos}/broken.jpg: ")


def test_files_and_folders_are_accepted_in_one_command(photos):
    paths = [f"{photos}/{name}" for name in FILES]
    assert endpoints.find_images([paths[0], f"{photos}/b"]) == dict(zip(paths, paths))


def test_images_are_cropped_with_the_settings_of_the_network(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    load = endpoints.image_loader(Config(image_size=40, eval_center_crop=True))
    expected = data_util.preprocess_for_eval(pixels / np.float32(255), 40, True)
    assert_allclose(load(f"{tmp_path}/a.png"), expected, atol=1e-6)


HOSTILE_CLASSES = ["<script>alert(1)</script>", "`a` | b", "two\nlines", "\x1b[31mred", "[link](x)"]


def test_model_card_escapes_markup_in_names(tmp_path):
    storage.write_json(
        str(tmp_path / weight_files.DESCRIPTION_FILE),
        dict(
            network="resnet10",
            image_size=8,
            step=4,
            class_names=HOSTILE_CLASSES,
            results={
                "<b>|": 0.5,
                "computed_from": {
                    **dict.fromkeys(("dataset", "eval_split", "train_split"), "[a](b)"),
                    **dict(examples=1, trained_examples=0, label_fraction=0.1),
                },
            },
            flags={
                "dataset": "folder:<img src=x>\n# title",
                "train_split": "`x`",
                "train_mode": "pretrain",
            },
        ),
    )
    card = model_card.model_card(str(tmp_path))
    for text in ("<script", "<img", "<b>", "\x1b", "\n# title", "two\nlines", "`a`"):
        assert text not in card
    assert (
        r"&lt;script&gt;alert(1)&lt;/script&gt;, \`a\` \| b, two\\nlines, \\x1b\[31mred,"
        r" \[link\](x))" in card
    )


def test_networks_whose_evaluation_used_few_labels_can_be_loaded(checkpoint, tmp_path):
    distillation = dict(train_mode="distill", teacher="x", distill_alpha=0.5)
    for settings, expected in ((dict(train_mode="pretrain"), 1), (distillation, 0.1)):
        flags = dict(settings, label_fraction=0.1, label_seed=3)
        write_json(tmp_path / "flags.json", TINY | flags)
        assert inspection.inspect_checkpoint(checkpoint).config.label_fraction == expected


def test_malformed_description_is_rejected(tmp_path):
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / "assets.extra" / "simclr.json").write_bytes(b"{")
    with rejects("simclr.json: the file is corrupt"):
        weight_files.read_description(str(tmp_path))


@pytest.mark.parametrize(
    "flags, problem",
    [
        ({"weight_decay": "x"}, "has the wrong type"),
        ({"temperature": -1}, "recorded settings are invalid"),
    ],
)
def test_flags_json_with_invalid_values_is_rejected(flags, problem, checkpoint, tmp_path):
    write_json(tmp_path / "flags.json", TINY | flags)
    with rejects(problem):
        inspection.inspect_checkpoint(checkpoint)


def test_file_names_that_look_like_formulas_are_escaped_in_csv(tmp_path):
    escaped = ["=1+1.png", "+a.png", "-a.png", "@a.png", "\ta.png", "\ra.png"]
    names = [*escaped, "a=b.png", 'two\nlines, "quoted".png']
    with writers.open_writer(f"{tmp_path}/v.csv", "probabilities") as add:
        strings = {"file": names, "class": ["=class"] * len(names)}
        add(strings, np.zeros([len(names), 1], np.float32), ["=class"])
    columns, _, class_names = read_output(tmp_path / "v.csv", "probabilities")
    assert class_names == ["'=class"] and set(columns["class"]) == {"'=class"}
    assert columns["file"] == [*(f"./{name}" for name in escaped), *names[6:]]
    assert list(map(os.path.normpath, columns["file"])) == names


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_embed_leaves_no_files_if_stopped_by_a_signal(
    signal_number, photos, tmp_path, monkeypatch, capsys
):
    def stopped(images):
        assert len(list(tmp_path.iterdir())) == 1  # the temporary directory
        signal.raise_signal(signal_number)
        return tf.zeros([len(images), 3])

    networks.replace_network(monkeypatch, stopped)
    before = signal.getsignal(signal_number)
    with pytest.raises(SystemExit) as stop:
        inference_cli.main(["embed", "model", photos, f"--out={tmp_path / 'v.npz'}"])
    assert stop.value.code == STOPPED_STATUS and not list(tmp_path.iterdir())
    assert signal.getsignal(signal_number) is before
    assert capsys.readouterr().out.splitlines() == [
        f"stopped by {signal_number.name}: nothing was written; run the same command again"
    ]


def test_embed_on_a_full_disk_leaves_no_file(photos, tmp_path, monkeypatch, fails):
    networks.replace_network(monkeypatch, lambda images: tf.zeros([len(images), 3]))
    monkeypatch.setattr(os, "replace", no_space)
    arguments = ["embed", "model", photos, f"--out={tmp_path}/v.npz"]
    fails("No space left on device. Free disk space", inference_cli.main, arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command, name, existing",
    [
        ("embed", "v.npz", "v.npz"),
        ("predict", "v.csv", "v.csv"),
        ("gallery", "g.html", "g.html"),
        ("gallery", "g.html", "g.pairs.csv"),
    ],
)
def test_existing_files_are_kept(command, name, existing, photos, tmp_path, fails):
    (tmp_path / existing).write_text("older")
    words = f"--out={tmp_path / existing}: the path exists. Use another path"
    fails(words, inference_cli.main, [command, "MODEL", photos, f"--out={tmp_path / name}"])
    assert (tmp_path / existing).read_text() == "older" and len(list(tmp_path.iterdir())) == 1


def test_failed_export_leaves_no_files(quick_save, tmp_path, monkeypatch, fails):
    def fail(module, path, signatures):
        (pathlib.Path(path) / "saved_model.pb").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", fail)
    arguments = ["--checkpoint=run", f"--export_dir={tmp_path / 'new'}"]
    fails("No space left on device", cli.main, arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".", "empty", "n" * 255, "n\u00e9w/"])
def test_export_dir_may_be_empty_or_have_an_unusual_name(
    name, tmp_path, quick_save, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if name == "empty":
        (tmp_path / "empty").mkdir()
    cli.main(["--checkpoint=run", f"--export_dir={name}"])
    assert capsys.readouterr().out == f"exporting the SavedModel\nSavedModel: {name}\n"
    assert tree(tmp_path / name) == set(saving.FILES)
    assert not list(tmp_path.glob(f"{storage.TEMP_PREFIX}*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--archive=README"], "not a valid archive name"),
        (["--archive=.tar.gz"], "not a valid archive name"),
        (["--archive=gs://bucket/x.tar.gz"], "not a valid archive name"),
        (["--archive=a*.tar.gz"], "contains *"),
        (["--archive=README.tar.gz"], "README.md: the path exists"),
        (["--archive=dangling.tar.gz"], "dangling.tar.gz: the path exists"),
        (["--archive=README.md/x.tar.gz"], "README.md is not a writable directory"),
        (["--export_dir=new.md", "--archive=new.tar.gz"], "new.md would be inside --export_dir"),
        (["--archive=new/x.tar.gz"], "x.tar.gz would be inside --export_dir"),
        (["--export_dir=/"], "the path exists"),
        (["--export_dir=full"], "the path exists"),
        (["--export_dir=full link"], "the path exists"),
        (["--export_dir=README.md"], "the path exists"),
        (["--export_dir=README.md/no/where"], "README.md is not a writable directory"),
        (["--export_dir=run[1]"], "contains ["),
        (["--checkpoint=ckpt-*"], "contains *"),
    ],
)
def test_invalid_export_paths_are_rejected_before_loading_the_checkpoint(
    arguments, message, tmp_path, monkeypatch, fails
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "full link").symlink_to("full")
    (tmp_path / "dangling.tar.gz").symlink_to("nowhere")
    monkeypatch.setattr(inspection, "inspect_checkpoint", pytest.fail)
    before = tree(tmp_path)
    fails(message, cli.main, ["--checkpoint=run", "--export_dir=new", *arguments])
    assert tree(tmp_path) == before


def test_folder_and_image_names_may_contain_special_characters(
    photos, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "My photos [2019] *?"
    folder.mkdir()
    for name in ("a[1].png", "-x.png", "new\nline.png", "b" * 251 + ".png"):
        shutil.copy(f"{photos}/b/x.png", folder / name)
    names = ["x", "\x1b[31m", "two\nlines"]
    networks.replace_network(monkeypatch, lambda images: tf.zeros([len(images), 3]), names)
    inference_cli.main(["embed", "model", str(folder), f"--out={tmp_path / 'v.npz'}"])
    with np.load(tmp_path / "v.npz") as arrays:
        assert arrays["files"].tolist() == sorted(path.name for path in folder.iterdir())
    capsys.readouterr()
    inference_cli.main(["predict", "model", f"{folder}/a[1].png"])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "\x1b" not in printed and r"two\nlines 0.333" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("embed m* PHOTOS --out=v.npz", "MODEL=m*: the path contains *"),
        ("embed m s3://photos --out=v.npz", "INPUT=s3://photos: s3:// is not supported"),
        ("embed m gs://photos --out=v.npz", "INPUT=gs://photos: only local paths"),
        ("embed m . --out=v.npz", "no images found"),
        ("embed m PHOTOS --out=gs://v.npz", "--out=gs://v.npz: only local paths"),
        ("embed m PHOTOS --out=v.txt", "ends in .npz or .csv or .parquet"),
        ("embed m PHOTOS --out=PHOTOS/a.jpg/v.csv", "a.jpg is not a writable directory"),
        ("embed m PHOTOS --out=v.npz --nope=\x1b", "unrecognized arguments: --nope=\\x1b"),
        ("embed m PHOTOS --out=v.npz --image_size=\u00b2", "--image_size: invalid int value"),
        ("embed . PHOTOS --out=v.npz", "MODEL=.: "),
        ("embed MODEL PHOTOS --out=v.csv --output=pool", "has no output pool. Use"),
        ("embed MODEL PHOTOS/broken.jpg --out=v.npz", "no image can be read ("),
        ("predict MODEL PHOTOS", "python run.py --train_mode=finetune --mode=train_then_eval --ch"),
        ("predict m none.png", "no such file"),
        ("predict m \x1b[31m.png", "control characters"),
    ],
)
def test_unusable_inference_arguments_give_one_line_errors_and_no_files(
    arguments, message, photos, tmp_path, monkeypatch, fails
):
    monkeypatch.chdir(tmp_path)
    if "MODEL" in arguments:
        network = types.SimpleNamespace(endpoint_names=["final_avg_pool"], config=Config())
        monkeypatch.setattr(loading, "open_network", lambda *_: (network, network))
    fails(message, inference_cli.main, arguments.replace("PHOTOS", photos).split())
    assert not list(tmp_path.iterdir())
