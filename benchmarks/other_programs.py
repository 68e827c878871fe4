"""Training with the original's program and with the library lightly, for `parity` and `race`.

The original's program is run.py of the folder `tf2` of a checkout of google-research/simclr. The
environment variable SIMCLR_ORIGINAL_PYTHON selects a Python interpreter with a version of
TensorFlow that it supports, such as 2.15.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import tensorflow_datasets as tfds

import config as config_lib
import model as model_lib
from benchmarks import cases, programs
from sources import datasets


def _original_command(config: config_lib.Config, model_dir: str, checkout: str) -> list[str]:
    """Returns the original's command with our settings. All its flags are defined in its run.py."""
    script = pathlib.Path(checkout, "run.py")
    defined = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", script.read_text())
    settings = {
        name: value
        for name, value in config.settings().items()
        if name in defined and value is not None
    }
    if config.dataset == "digits":
        settings["data_dir"] = f"{model_dir}/data"
        _write_digits(config, settings["data_dir"])
    python = os.environ.get("SIMCLR_ORIGINAL_PYTHON", sys.executable)
    settings.update(mode="train", model_dir=model_dir)
    return [python, str(script), *config_lib.as_flags(settings)]


def _write_digits(config: config_lib.Config, data_dir: str) -> None:
    """Writes our digits with the same split as a data set of TFDS."""
    source = datasets.open_configured(config)
    features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=10)}
    splits = {
        split: [
            (index, {"image": source.decode(item).numpy(), "label": int(label)})
            for index, (_, item, label) in enumerate(source.records(split))
        ]
        for split in ("train", "test")
    }
    builder = tfds.dataset_builders.store_as_tfds_dataset(
        "digits",
        "1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets=splits,
        data_dir=data_dir,
    )
    # The function above cannot set the keys for `as_supervised=True`, which the original uses.
    path = pathlib.Path(builder.data_dir, "dataset_info.json")
    keys = [{"featureKey": key} for key in features]
    info = json.loads(path.read_text()) | {"supervisedKeys": {"tuple": {"items": keys}}}
    path.write_text(json.dumps(info))


def _lightly_command(config: config_lib.Config, model_dir: str) -> list[str]:
    """Returns the command for training with lightly, and writes the images that it reads."""
    source = datasets.open_configured(config)
    images = [source.decode(item).numpy() for _, item, _ in source.records(config.train_split)]
    np.save(f"{model_dir}/images.npy", images)
    settings = {
        **config.settings(),
        "model_dir": model_dir,
        "cifar_stem": config.cifar_stem,
        "peak": model_lib.build_schedule(config, len(images)).peak,
    }
    return [cases.torch_python(), "-m", "benchmarks.lightly_training", json.dumps(settings)]


def train(name: str, flags: list[str], model_dir: str, checkout: str | None) -> float:
    """Trains with `simclr` (this program), `original` or `lightly`. Returns the time at which training started.

    Training is skipped if it was finished with the same settings. Otherwise, `model_dir` is
    replaced.
    """
    started, finished = (pathlib.Path(model_dir, file) for file in ("started", "finished"))
    config = config_lib.from_arguments(flags)
    settings = json.dumps(config.settings())
    if not finished.exists() or finished.read_text() != settings:
        shutil.rmtree(model_dir, ignore_errors=True)
        os.makedirs(model_dir)
        if name == "original":
            command = _original_command(config, model_dir, checkout)
        elif name == "lightly":
            command = _lightly_command(config, model_dir)
        else:
            command = [sys.executable, "run.py", *flags, "--mode=train", f"--model_dir={model_dir}"]
        started.touch()
        subprocess.run(command, stdout=sys.stderr, check=True)
        finished.write_text(settings)
    return started.stat().st_mtime


def accuracies(
    name: str, flags: list[str], model_dir: str, checkout: str | None
) -> programs.Implementation:
    """Trains with a program, and evaluates all its checkpoints with ours.

    The result is a dict with the accuracies of the last checkpoint and the minutes of training. The
    results of all checkpoints are written to accuracies.csv, next to `model_dir`, where they
    replace earlier results in the same `model_dir`.
    """

    directory, run_name = os.path.split(model_dir)

    def run(calls):
        start = train(name, flags, model_dir, checkout)
        rows = []
        protocol = ["--mode=eval", "--eval_protocol=lbfgs,knn"]
        suffix = "safetensors" if name == "lightly" else "index"
        for file in sorted(pathlib.Path(model_dir).glob(f"*.{suffix}"), key=os.path.getmtime):
            checkpoint = str(file).removesuffix(".index")
            evaluation = [*flags, *protocol, f"--checkpoint={checkpoint}"]
            results = programs.accuracies(evaluation, f"{checkpoint}_evaluation")(1)
            rows.append(
                {
                    "run": run_name,
                    "program": name,
                    "minutes": (file.stat().st_mtime - start) / 60,
                    **{key: results[metric] for key, metric in cases.FROZEN_METRICS.items()},
                }
            )
        path = f"{directory}/accuracies.csv"
        table = pd.DataFrame(rows)
        if os.path.exists(path):
            earlier = pd.read_csv(path)
            table = pd.concat([earlier[earlier["run"] != run_name], table])
        table.to_csv(path, index=False)
        return rows[-1]

    return run
