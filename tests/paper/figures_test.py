"""Every figure is made, shows something, and has its data beside it."""

import csv
import xml.etree.ElementTree

import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf

import model as model_lib
from config import Config
from paper import figures

SMALL = dict(resnet_depth=10, image_size=8, num_proj_layers=1, proj_head_mode="linear", proj_out_dim=512)


def make(tmp_path, name, *arguments):
    """Makes a figure; returns its data as rows of text."""
    figures.main([name, *arguments, f"--out={tmp_path / 'out'}"])
    picture = tf.io.decode_png((tmp_path / "out" / f"{name}.png").read_bytes(), channels=1).numpy()
    assert min(picture.shape[:2]) > 150 and picture.std() > 10 and len(np.unique(picture)) > 20
    assert 0.01 < (picture < 128).mean() < 0.95
    xml.etree.ElementTree.parse(tmp_path / "out" / f"{name}.svg")
    with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert rows and all(len(row) == len(header) for row in rows)
    return rows


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A checkpoint of a network with a square linear head."""
    model = model_lib.build_model(Config(**SMALL), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path_factory.mktemp("network") / "ckpt-1"))
    return path, model._projection_head.linear_layers[0].dense.kernel.numpy()


def test_operators(tmp_path):
    rows = make(tmp_path, "operators")
    assert {row[0] for row in rows} >= {"crop, resize, flip", "colour drop", "Sobel", "AutoAugment"}
    assert len({tuple(row[2:]) for row in rows if row[0] == "Gaussian noise"}) == 3
    grey = next(row for row in rows if row[0] == "colour drop")
    assert grey[2] == grey[3] == grey[4]


def test_histograms(tmp_path):
    rows = make(tmp_path, "histograms")
    totals = {}
    for image, distorted, crop, _, values in rows:
        totals[image, distorted, crop] = totals.get((image, distorted, crop), 0) + int(values)
    assert len(totals) == 2 * 2 * 4 and set(totals.values()) == {160 * 160 * 3}


def test_views(tmp_path):
    assert len(make(tmp_path, "views", "--dataset=digits", "--flags=--image_size=16 --augmentation=broader")) == 16


def test_eigenvalues(tmp_path, network):
    path, kernel = network
    rows = make(tmp_path, "eigenvalues", f"--checkpoint={path}")
    found = np.array([float(row[1]) for row in rows])
    expected = np.sort(scipy.linalg.eig(np.float64(kernel), right=False).real ** 2)[::-1]
    np.testing.assert_allclose(found[:200], expected[:200], rtol=1e-3)


def test_tsne(tmp_path, network):
    rows = make(tmp_path, "tsne", f"--checkpoint={network[0]}", "--dataset=digits", "--split=test[:60]",
                "--flags=--image_size=8 --eval_batch_size=20")
    assert len(rows) == 60 and {row[0] for row in rows} == set("0123456789")


def write_csv(path, text):
    path.write_text(text)
    return f"--csv={path}"


def test_pairs(tmp_path):
    lines = ["crop,crop,0.3", "crop,color,0.55", "color,crop,0.5"]
    table = write_csv(tmp_path / "in.csv", "first,second,accuracy\n" + "\n".join(lines))
    assert make(tmp_path, "pairs", table) == [line.split(",") for line in lines]


def test_batches(tmp_path):
    lines = [f"{epochs},{size},{0.3 + 0.1 * epochs / size}" for epochs in (10, 20) for size in (32, 64, 128)]
    assert len(make(tmp_path, "batches", write_csv(
        tmp_path / "in.csv", "epochs,batch_size,accuracy\n" + "\n".join(lines)))) == 6


def test_parameters(tmp_path):
    lines = ["R50,24,0.69,1000 epochs", "R50 (2x),94,0.74,1000 epochs", "R18,11,0.5,100 epochs"]
    assert len(make(tmp_path, "parameters", write_csv(
        tmp_path / "in.csv", "network,million parameters,accuracy,group\n" + "\n".join(lines)))) == 3


@pytest.mark.parametrize("arguments, words", [
    (["pairs", "--csv=/no/such.csv"], "--csv=/no/such.csv cannot be read"),
    (["operators", "--image=/no/such.png"], "--image=/no/such.png: there is no such file"),
    (["views", "--dataset=digits", "--flags=--temprature=1"], "--flags: Unknown command line flag"),
    (["views", "--dataset=digits", "--flags=x"], "--flags: x is not a flag"),
    (["eigenvalues", "--checkpoint=/no/such"], "--checkpoint=/no/such")])
def test_mistakes_are_told_in_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        figures.main(arguments)
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_a_table_without_its_columns_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures.main(["batches", write_csv(tmp_path / "in.csv", "epochs,accuracy\n1,0.5\n")])
    assert "has no column batch_size" in capsys.readouterr().err


@pytest.mark.parametrize("text, words", [
    ("epochs,batch_size,accuracy\n1,8,58 %\n", "accuracy 58 % is no number from 0 to 1"),
    ("epochs,batch_size,accuracy\n1,8,58\n", "accuracy 58 is no number from 0 to 1"),
    ("epochs,batch_size,accuracy\n1,8,nan\n", "accuracy nan is no number from 0 to 1"),
    ("epochs,accuracy,batch_size\n1,0.5,8\n1,0.5\n", "batch_size None is no number above 0"),
    ("epochs,batch_size,accuracy\n0,8,0.5\n", "epochs 0 is no number above 0"),
    ("epochs,batch_size,accuracy\n1,8,\n", "has no row with an accuracy"),
    ("epochs,batch_size,accuracy\n1,8,0.5\n1,8,0.6\n", "has two accuracies for batch 8, 1 epochs")])
def test_a_table_that_cannot_be_drawn_is_told(text, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures.main(["batches", write_csv(tmp_path / "in.csv", text)])
    assert words in capsys.readouterr().err


def test_scalings_are_bars_of_their_own(tmp_path):
    rows = make(tmp_path, "batches", write_csv(
        tmp_path / "in.csv", "scaling,epochs,batch_size,accuracy\nlinear,1,8,0.5\nsqrt,1,8,0.6\n"))
    assert rows == [["linear", "8", "1", "0.5"], ["sqrt", "8", "1", "0.6"]]


def test_runs_without_an_accuracy_are_left_out(tmp_path):
    rows = make(tmp_path, "batches", write_csv(
        tmp_path / "in.csv", "epochs,batch_size,accuracy\n1,8.0,0.5\n1,16,\n"))
    assert rows == [["", "8", "1", "0.5"]]


def test_a_network_without_a_head_has_no_z(tmp_path, capsys):
    model = model_lib.build_model(Config(**{**SMALL, "proj_head_mode": "none"}), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit):
        figures.main(["tsne", f"--checkpoint={path}", "--dataset=digits", "--flags=--image_size=8"])
    assert "--checkpoint: the network has no projection head" in capsys.readouterr().err


def test_few_images_are_enough_for_views(tmp_path):
    assert len(make(tmp_path, "views", "--dataset=digits", "--flags=--image_size=16 --train_split='train[:5]'")) == 10


def test_other_heads_have_no_eigenvalues(tmp_path, capsys):
    model = model_lib.build_model(Config(**{**SMALL, "proj_out_dim": 16}), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit):
        figures.main(["eigenvalues", f"--checkpoint={path}"])
    assert "no square linear projection head: pretrain one by --proj_head_mode=linear --proj_out_dim=512" in (
        capsys.readouterr().err)
