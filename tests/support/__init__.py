"""Functions and data shared by test modules."""

import errno
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = dict(resnet_depth=10, image_size=8, num_proj_layers=2, proj_out_dim=16)
TINY = dict(
    SMALL,
    dataset="digits",
    train_batch_size=32,
    eval_batch_size=90,
    seed=7,
    color_jitter_strength=0.0,  # Tracing it would take a third of the time of a short run.
    train_split="train[:64]",
    learning_rate=0.02,
)


def no_space(*_, **__):
    """Raises the error that a full disk causes."""
    raise OSError(errno.ENOSPC, "No space left on device")


def read_json(path):
    """Returns the content of a JSON file."""
    return json.loads(path.read_text())


def write_json(path, content):
    path.write_text(json.dumps(content))
