"""Recorded (golden) values, and deterministic weights that are generated from the checkpoint keys."""

import json
import zlib

import numpy as np
import tensorflow as tf

import data_util
import model as model_lib
import resnet
from checkpoints import architecture, loading, tf1_names
from config import Config
from support import ROOT

_DIRECTORY = ROOT / "tests" / "golden"


def load(name):
    """Loads the arrays from golden/<name>.npz."""
    return np.load(_DIRECTORY / f"{name}.npz")


def load_json(name):
    """Loads golden/<name>.json."""
    return json.loads((_DIRECTORY / f"{name}.json").read_text())


def config_of(arrays, case):
    """Returns the `Config` of a recorded case, and a dict of all settings in the recording."""
    settings = json.loads(str(arrays[f"{case}/config"]))
    names = Config.__dataclass_fields__
    return Config(**{name: value for name, value in settings.items() if name in names}), settings


def computed_weight(key, shape):
    """Returns an array that depends only on the key and shape. The golden outputs were recorded with these weights."""
    x = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    leaf = key.rsplit("/", 1)[-1]
    if leaf == "kernel":
        return x * np.float32(np.sqrt(1 / np.prod(shape[:-1])))
    if leaf == "gamma":
        return 1 + np.float32(0.1) * x
    if leaf == "moving_variance":
        return np.exp(np.float32(0.1) * x)
    return np.float32(0.1) * x


def build_model(config, classes=10):
    """Returns a model with weights from `computed_weight`, and a dict mapping keys to its variables."""
    model = model_lib.build_model(config, classes)
    variables = loading.variables_by_key(model=model)
    for key, variable in variables.items():
        variable.assign(computed_weight(key, tuple(variable.shape)))
    return model, variables


def tf1_name(key):
    """Returns the name of a ResNet-10 variable in the original's TF1 checkpoints."""
    names = tf1_names.names_by_key(architecture.encoder_shapes(*resnet.DEPTHS[10], 1, True))
    name = key.replace("model/_projection_head/linear_layers/", "head_contrastive/nl_")
    name = name.replace("model/supervised_head", "head_supervised")
    name = name.replace("bn_relu/bn", "batch_normalization")
    return names.get(key, name)


def save_tensors(path, tensors):
    """Writes a checkpoint without an object graph, given a dict of names and tensors. Returns its prefix."""
    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    return str(path)


def views_of(arrays, case, size):
    """Returns the input of a recorded case, float32, with all first views before all second views."""
    random = np.random.default_rng(int(arrays[f"{case}/views_seed"]))
    pairs = random.uniform(0, 1, (4, size, size, 6)).astype(np.float32)
    return np.concatenate(np.split(pairs, 2, -1))


def assert_outputs_match(outputs, arrays, prefix, bound, *endpoints):
    """Asserts that the outputs of the heads, and the given endpoints, match the arrays recorded with `prefix`."""
    names = dict(proj_head_output="proj", logits_sup="logits", final_avg_pool="hidden")
    for name in ("proj_head_output", "logits_sup", *endpoints):
        assert relative_error(outputs[name], arrays[f"{prefix}/{names[name]}"]) < bound, name


def assert_blur_matches(image, atol):
    """Asserts that the blur of a recorded image matches for three values of sigma in one batch."""
    arrays, sigmas = load("images"), ("0.3", "1.0", "2.0")
    batch = tf.stack([arrays[f"{image}/blur_in"]] * 3)
    blurred = data_util.gaussian_blur(batch, 6, tf.constant([*map(float, sigmas)]))
    for row, sigma in zip(blurred, sigmas):
        np.testing.assert_allclose(row, arrays[f"{image}/blur_k6_sigma{sigma}"], atol=atol)


def contrastive_settings(case):
    """Returns the settings of a recorded contrastive loss."""
    return dict(hidden_norm=case.endswith("norm1"), temperature=float(case.split("_")[2][3:]))


def relative_error(actual, expected):
    """Returns |actual - expected| / |expected| in the L2 norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)
