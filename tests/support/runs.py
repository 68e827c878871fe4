"""Small training runs within the test process."""

import pytest
import tensorflow as tf

import run as run_lib
from checkpoints.run_context import RunContext
from config import Config
from runtime import console, signals
from sources import datasets
from support import TINY, networks, read_json


def tiny_config(**settings):
    """Returns a `Config` with the settings `TINY`, except for the given ones."""
    return Config(**{**TINY, **settings})


def run(model_dir, given=("dataset",), with_export=False, **settings):
    """Calls `run.main` in the test process. Returns the log.

    The export, and the contrastive loss of the untrained network, are optional because they take
    several seconds.
    """
    lines, log = [], console.log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "log", lambda text: (lines.append(text), log(text)))
        if not with_export:
            patch.setattr(run_lib.saving, "export_to_model_dir", lambda *_: "not made")
            networks.replace_untrained_network(patch.setattr)
        run_lib.main(tiny_config(model_dir=str(model_dir), **settings), given)
    return "\n".join(lines)


def contents(directory):
    """Returns a dict that maps the relative paths of all files in a directory to their contents."""
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def lasting_files(directory):
    """Returns `contents` without locks and TensorBoard events, whose names contain the time."""
    return {
        path: content
        for path, content in contents(directory).items()
        if "tfevents" not in path.name and path.suffix != ".lock"
    }


def read_results(path):
    """Returns the scalars in a result.json."""
    return {
        name: value for name, value in read_json(path).items() if isinstance(value, (int, float))
    }


def read_events(directory):
    """Returns the step and the value of each TensorBoard summary in a directory."""
    return [
        (event.step, value)
        for path in sorted(directory.iterdir())
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]


def make_context(config, source=None, strategy=None):
    """Returns a `RunContext` of a single worker. The default source is that of `config`."""
    source = source or datasets.open_source(config.dataset, config.data_dir)
    strategy = strategy or tf.distribute.get_strategy()
    return RunContext(config, source, strategy, True, signals.StopSignals())
