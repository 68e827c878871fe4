"""Fixtures for the tests of the programs that reproduce the paper's tables and figures."""

import pytest
import tensorflow as tf

import model as model_lib
from config import Config
from paper import tables


@pytest.fixture
def program(tmp_path, capsys):
    """Returns a function that calls `paper.tables` with results in `tmp_path`, and returns what it prints."""

    def call(*arguments):
        tables.main([*arguments, f"--dir={tmp_path}"])
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def write_network():
    """Returns a function that writes a ResNet-10 with a linear head. It returns the checkpoint and the network."""

    def write(directory, **settings):
        head = dict(num_proj_layers=1, proj_head_mode="linear", proj_out_dim=512)
        config = Config(**{"resnet_depth": 10, "image_size": 8, **head, **settings})
        network = model_lib.build_model(config, 10)
        return tf.train.Checkpoint(model=network).write(f"{directory}/ckpt-1"), network

    return write


@pytest.fixture(scope="module")
def network(write_network, tmp_path_factory):
    """Returns the checkpoint of a network with a square linear projection head, and the network."""
    return write_network(tmp_path_factory.mktemp("network"))
