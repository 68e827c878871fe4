"""Fixtures for the tests of the programs that reproduce the paper's tables and figures."""

import functools
import pathlib

import matplotlib.pyplot as plt
import pytest
import tensorflow as tf

import model as model_lib
from config import Config
from paper import runner, tables


@pytest.fixture(scope="module", autouse=True)
def cached_configs():
    """Parses the arguments of each run only once, because the studies have many runs."""
    parse = functools.cache(lambda *arguments, parse=runner.config_of: parse([*arguments]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "config_of", lambda arguments: parse(*arguments))
        yield


@pytest.fixture(scope="module", autouse=True)
def savefig():
    """Replaces the method that saves figures by one that writes an empty image. Yields the original."""

    def write(figure, path, **_):
        pathlib.Path(path).write_text("<svg/>")

    original = plt.Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt.Figure, "savefig", write)
        yield original


@pytest.fixture
def program(tmp_path, capsys):
    """Returns a function that calls `paper.tables` with results in `tmp_path`, and returns what it prints."""

    def call(*arguments):
        tables.main([*arguments, f"--dir={tmp_path}"])
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def write_network(tiny_resnet):
    """Returns a function that writes a small network with a linear head, and returns the checkpoint and the network."""

    def write(directory, **settings):
        head = {"num_proj_layers": 1, "proj_head_mode": "linear", "proj_out_dim": 128}
        config = Config(**{"resnet_depth": 10, "image_size": 8, **head, **settings})
        network = model_lib.build_model(config, 10)
        return tf.train.Checkpoint(model=network).write(f"{directory}/ckpt-1"), network

    return write


@pytest.fixture(scope="module")
def network(write_network, tmp_path_factory):
    """Returns the checkpoint of a network with a square linear projection head, and the network."""
    return write_network(tmp_path_factory.mktemp("network"))
