"""Replacements for the networks of the inference commands and of exports."""

import itertools
import pathlib
import types

import tensorflow as tf

import evaluate
import metrics
from checkpoints import inspection
from config import Config
from export import saving
from inference import endpoints


def replace_network(monkeypatch, function, class_names=None, multi_label=False, **settings):
    """Makes `endpoints.load_endpoint` return `function`, which maps images [n, 8, 8, 3] to values."""
    config = Config(**{"image_size": 8, **settings})
    info = inspection.CheckpointInfo(config, class_names, None, False, None, multi_label, None)
    monkeypatch.setattr(endpoints, "load_endpoint", lambda *_: (function, info))


def replace_untrained_network(set_attribute=setattr):
    """Replaces the contrastive loss and accuracy of the untrained network by constants, since it is slow to trace."""
    results = {metrics.CONTRAST_LOSS: 9.0, metrics.CONTRAST_ACCURACY: 0.01}
    results = {name + metrics.UNTRAINED: value for name, value in results.items()}
    set_attribute(evaluate.Evaluator, "_untrained_contrastive", results)


def replace_exports(set_attribute=setattr):
    """Makes exports write small files quickly, without a network. A test passes `monkeypatch.setattr`."""
    calls = itertools.count()  # The digest differs, because equal exports are not repeated.
    file = types.SimpleNamespace(
        format="TF2 checkpoint", class_names=None, digest=lambda: str(next(calls))
    )
    info = inspection.CheckpointInfo(Config(), None, None, True, 4, False, file)

    def save(module, path, signatures):
        for name in saving.FILES:
            target = pathlib.Path(path, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"new")

    set_attribute(saving.loading, "open_network", lambda *_: (None, info))
    set_attribute(saving, "build_module", lambda *_: (None, None))
    set_attribute(tf.saved_model, "save", save)
