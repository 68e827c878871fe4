"""Files for the Embedding Projector, read with TensorBoard's own plugin."""

import json
import signal

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.projector import projector_plugin
from werkzeug import test as werkzeug_test

from inference import cli as inference_cli
from inference import endpoints, projector
from runtime.errors import STOPPED_STATUS

LEVELS = {"cat/a.png": 40, "cat/b.png": 80, "dog/a.png": 120, "dog/b.png": 160, "dog/c.png": 200}


@pytest.fixture
def photos(tmp_path):
    """Writes gray images of two classes, and one corrupt image."""
    for name, level in LEVELS.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (level,) * 3).save(path)
    (tmp_path / "photos" / "cat" / "bad.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def mean_encoder(monkeypatch):
    """Replaces the SavedModel with a function that returns the mean color."""
    monkeypatch.setattr(
        endpoints,
        "load_endpoint",
        lambda *_: (lambda images: tf.reduce_mean(images, [1, 2]), {"image_size": 8}),
    )


def read(directory):
    """Returns the configuration, vectors and metadata lines that TensorBoard serves."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(directory)).Reload()
    plugin = projector_plugin.ProjectorPlugin(
        base_plugin.TBContext(
            logdir=str(directory),
            data_provider=data_provider.MultiplexerDataProvider(multiplexer, str(directory)),
        )
    )
    apps = plugin.get_plugin_apps()

    def get(route):
        response = werkzeug_test.Client(apps[route]).get("/?run=.&name=vectors")
        assert response.status_code == 200, response.data
        return response.data

    config = json.loads(get("/info"))["embeddings"][0]
    vectors = np.frombuffer(get("/tensor"), np.float32).reshape(config["tensorShape"])
    assert get("/sprite_image").startswith(b"\x89PNG")
    return config, vectors, get("/metadata").decode().splitlines()


def test_tensorboard_reads_the_files(photos, tmp_path, capsys):
    inference_cli.main(["embed", "model", str(photos), f"--projector={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    assert f"tensorboard --logdir {tmp_path / 'out'}" in printed and "skipped" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(projector.FILES)
    config, vectors, metadata = read(tmp_path / "out")
    names = list(LEVELS)
    np.testing.assert_allclose(vectors, [[LEVELS[name] / 255] * 3 for name in names], rtol=1e-5)
    assert metadata == ["file\tclass", *(f"{name}\t{name.partition('/')[0]}" for name in names)]
    side = config["sprite"]["singleImageDim"][0]
    with Image.open(tmp_path / "out" / "sprite.png") as sprite:
        columns = sprite.width // side
        for row, name in enumerate(names):
            center = row % columns * side + side // 2, row // columns * side + side // 2
            assert sprite.getpixel(center) == (LEVELS[name],) * 3


def test_vectors_and_projector_files_are_written_in_one_pass(photos, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    (tmp_path / "out" / "vectors.tsv").write_text("old")
    inference_cli.main(
        [
            "embed",
            "model",
            str(photos),
            f"--projector={tmp_path / 'out'}",
            f"--out={tmp_path / 'v.npz'}",
        ]
    )
    np.testing.assert_allclose(
        read(tmp_path / "out")[1], np.load(tmp_path / "v.npz")["vectors"], rtol=1e-5
    )
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "out", "v.npz"}


def test_file_names_with_tabs_are_escaped_and_unlabeled_images_have_one_column(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("a\tb.png", "c\nd.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    inference_cli.main(
        ["embed", "model", str(tmp_path / "photos"), f"--projector={tmp_path / 'out'}"]
    )
    assert read(tmp_path / "out")[2] == ["a\\tb.png", "c\\nd.png"]


def test_embed_leaves_no_projector_files_if_stopped_by_a_signal(
    photos, tmp_path, monkeypatch, capsys
):
    def stopped(images):
        signal.raise_signal(signal.SIGTERM)
        return tf.zeros([len(images), 3])

    monkeypatch.setattr(endpoints, "load_endpoint", lambda *_: (stopped, {"image_size": 8}))
    with pytest.raises(SystemExit) as stop:
        inference_cli.main(["embed", "model", str(photos), f"--projector={tmp_path / 'out'}"])
    assert stop.value.code == STOPPED_STATUS and list(tmp_path.iterdir()) == [photos]
    assert "nothing was written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "count, side", [(0, 64), (1, 64), (16_384, 64), (16_385, 63), (100_000, 25)]
)
def test_thumbnails_fit_in_the_largest_sprite(count, side):
    assert projector.thumbnail_side(count) == side
    assert side * int(np.ceil(np.sqrt(count))) <= 8192


def test_images_above_the_point_limit_of_the_projector_are_omitted(
    photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(projector, "_MAX_POINTS", 3)
    inference_cli.main(["embed", "model", str(photos), f"--projector={tmp_path / 'out'}"])
    assert "the projector shows at most 3 images" in capsys.readouterr().out
    _, vectors, metadata = read(tmp_path / "out")
    assert len(vectors) == 3 and len(metadata) == 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--out: no output is specified. Set --out=FILE, --projector=DIR or both."),
        (["--projector=photos/cat/a.png"], "cat/a.png: the path is a file. Use a directory."),
        (["--projector=missing/out"], "does not exist. Create it"),
        (["--projector="], ""),
    ],
)
def test_invalid_outputs_give_one_line_errors(
    arguments, words, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        inference_cli.main(["embed", "model", str(photos), *arguments])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and words in printed and printed.count("\n") == 1
