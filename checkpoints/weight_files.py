"""Reading of SimCLR weights from files of any origin, under one set of keys.

What is read: TF2 checkpoints (ours and the original's), SavedModels (ours, the original's, and those converted from
TF1), and the original's TF1 checkpoints. Files are read as data: nothing of a SavedModel is run.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from checkpoints import checkpoint_files, tf1_names
from runtime import storage
from runtime.errors import UserError, first_line
from runtime.paths import check_path

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOT = "/.OPTIMIZER_SLOT/"
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_GRAPH_NODES, _GRAPH_DEPTH = 100_000, 10  # limits; a ResNet-200 with SK and SE has 3,261 paths
# Where runs and SavedModels of this program record the names of their classes, see `run_directory` and `descriptions`.
CLASSES_FILE, DESCRIPTION_FILE = "classes.json", "assets.extra/simclr.json"
_LEAVES = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
# What a key of ours is made of, below `model`. An object graph has many other ways to every variable.
_KEY = re.compile(
    r"(?:resnet_model/(?:initial_conv_relu_max_pool/\d+|block_groups/\d+/layers/\d+/"
    r"(?:(?:projection_layers|shortcut_layers|conv_relu_dropblock_layers|conv2d_bn_layers)/\d+|se_layer))"
    r"(?:/(?:conv2d_fixed_padding|conv2d|conv2d_0|conv2d_1|batch_norm_relu|batch_norm_relu_1|bn|se_reduce|se_expand))*"
    r"|_projection_head/linear_layers/\d+/(?:dense|bn_relu/bn)|supervised_head/linear_layer/dense)"
    rf"/(?:{'|'.join(_LEAVES)})")
_PARTS = re.compile(  # Names that a way may take to such a key.
    r"\d+|resnet_model|initial_conv_relu_max_pool|block_groups|layers|projection_layers|shortcut_layers|"
    r"conv_relu_dropblock_layers|conv2d_bn_layers|se_layer|se_reduce|se_expand|conv2d_fixed_padding|conv2d|conv2d_0|"
    r"conv2d_1|batch_norm_relu|batch_norm_relu_1|bn|bn_relu|_projection_head|linear_layers|dense|supervised_head|"
    rf"linear_layer|{'|'.join(_LEAVES)}")
_TF1_NAME = re.compile(
    rf"(base_model/(?:conv2d|batch_normalization)(?:_\d+)?/(?:{'|'.join(_LEAVES)})"
    rf"|head_contrastive/n?l_\d+/(?:dense|batch_normalization)/(?:{'|'.join(_LEAVES)})"
    r"|head_supervised/linear_layer/dense/(?:kernel|bias))(?::0)?$")


@dataclasses.dataclass(frozen=True)
class WeightFile:
    """A file with the weights of a SimCLR network."""

    path: str  # prefix of the checkpoint or of a SavedModel's variables
    format: str  # for messages
    is_tf1: bool  # whether `tensors` has the names of TF1
    tensors: dict  # name (a key of ours without suffix, or TF1's name) -> key in the file
    shapes: dict  # the same names -> shape, a tuple
    num_other_tensors: int  # tensors that are no weights: slots of optimizers, counters
    step: int | None  # steps taken, if it says so
    class_names: list[str] | None = None  # of the linear head, in the order of its columns, if they are recorded

    def names_by_key(self, keys: Iterable[str]) -> dict[str, str]:
        """How the variables with the given checkpoint keys (all of a model's encoder) are called here: key -> name."""
        return tf1_names.tf1_names(keys) if self.is_tf1 else {key: key for key in keys}

    def reader(self) -> Callable[[str], np.ndarray]:
        """A function from a name to its array. It raises `UserError` where the file is damaged."""
        reader = tf.train.load_checkpoint(self.path)

        def read(name):
            try:
                return reader.get_tensor(self.tensors[name])
            except checkpoint_files.READ_ERRORS as error:
                raise UserError(f"{self.path} is damaged ({name}: {first_line(error)}): name another, or copy it anew"
                                ) from error

        return read


# ------------------------------------------------------------------------------------------------------- finding


def locate(path: str, flag: str = "--checkpoint") -> tuple[str, bool]:
    """The prefix of the tensors that `path` means, and whether they are a SavedModel's.

    Args:
      path: a directory (its latest checkpoint, a SavedModel, or SavedModels by step), a prefix, or a TF Hub handle
        (https://...), which is downloaded. Any file system that TensorFlow knows, such as gs://.
      flag: for errors.

    Raises:
      UserError: there is nothing.
    """
    if path.startswith(("http://", "https://")):
        path = _download(path, flag)
    try:
        return _locate(path, flag)
    except (tf.errors.OpError, ValueError) as error:  # ValueError: a list of checkpoints that is empty.
        raise UserError(f"{flag}={path} cannot be read ({first_line(error)}): check the path, or name a local copy"
                        ) from error


def _locate(path, flag):
    if tf.io.gfile.isdir(path):
        steps = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
        saved_models = [path, *(tf.io.gfile.join(path, step) for step in sorted(
            (step for step in steps if step.isdecimal()), key=int, reverse=True))]  # A run has saved_model/<step>/.
        for directory in saved_models:
            if any(tf.io.gfile.exists(tf.io.gfile.join(directory, name)) for name in _SAVED_MODEL_FILES):
                return tf.io.gfile.join(directory, "variables", "variables"), True
        prefix = _newest(path)
        if prefix is None:
            raise UserError(f"{flag}={path}: no checkpoint and no SavedModel in this directory; {_inside(path)}")
        return prefix, False
    prefix = path[:-len(".index")] if path.endswith(".index") else path
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(f"{flag}={path}: no such checkpoint; name a directory, a SavedModel or a prefix such as "
                        "DIR/ckpt-100")
    return prefix, False


def _newest(directory):
    """Returns the prefix that the file `checkpoint` names, else that of the newest checkpoint, or None."""
    try:
        state = tf.train.get_checkpoint_state(directory)
    except ValueError:  # The file is empty or not text.
        state = None
    if state is not None:
        # Checkpoints that were moved may still be listed with the directory in which they were written.
        for prefix in (state.model_checkpoint_path,
                       tf.io.gfile.join(directory, os.path.basename(state.model_checkpoint_path))):
            if storage.is_file(f"{prefix}.index"):
                return check_path("checkpoint", prefix)
    return checkpoint_files.latest_checkpoint(directory)


def _inside(path):
    """Returns what to pass instead of a directory."""
    names = sorted(name[:-len(".index")] for name in tf.io.gfile.listdir(path) if name.endswith(".index"))
    if names:
        return f"pass one of its prefixes, such as {path.rstrip('/')}/{names[-1]}"
    return "name one such as DIR/ckpt-100"


def _download(handle, flag):
    import tensorflow_hub as hub  # Here: only handles need it.

    try:
        return hub.resolve(handle)
    except Exception as error:  # Whatever network, server and archive can raise, the remedy is the same.
        raise UserError(f"{flag}={handle} could not be downloaded ({first_line(error)}): check the handle, or name a "
                        "local copy") from error


def open_weights(path: str, flag: str = "--checkpoint") -> WeightFile:
    """Finds out what `path` (see `locate`) holds. Raises `UserError`."""
    prefix, saved_model = locate(path, flag)
    directory, base = os.path.split(prefix)
    try:
        for name in tf.io.gfile.listdir(directory or "."):
            is_part = name.startswith((f"{base}.index", f"{base}.data-"))
            if is_part and not storage.is_file(os.path.join(directory, name)):
                raise ValueError(f"{name} is not a regular file")
        reader = tf.train.load_checkpoint(prefix)
        shapes = {key: tuple(shape) for key, shape in reader.get_variable_to_shape_map().items()}
        dtypes = reader.get_variable_to_dtype_map()
        version, tensors = _find_tensors(reader, shapes)
        step = _step(reader, shapes, dtypes)
    except checkpoint_files.READ_ERRORS as error:
        raise UserError(f"{flag}={path}: {prefix} cannot be read ({first_line(error)}): is it complete?") from error
    if tensors is None:
        raise UserError(f"{flag}={path}: {prefix} holds no SimCLR network (neither model/resnet_model/... nor "
                        f"base_model/...; its first keys: {', '.join(sorted(shapes)[:3])})")
    for name, key in tensors.items():
        if not dtypes[key].is_floating:
            raise UserError(f"{flag}={path}: {name} in {prefix} has type {dtypes[key].name}, not a floating-point "
                            "type. Use the checkpoint of a SimCLR network.")
    kind = f"SavedModel{' (TF1 names)' if version == 'TF1' else ''}" if saved_model else f"{version} checkpoint"
    file = WeightFile(prefix, kind, version == "TF1", tensors, {name: shapes[key] for name, key in tensors.items()},
                      len(shapes.keys() - set(tensors.values()) - {_GRAPH}), step)
    return dataclasses.replace(file, class_names=_read_class_names(file))


def head_size(file: WeightFile) -> int | None:
    """Returns the number of classes of the linear head in a file, or None without one."""
    part = "head_supervised" if file.is_tf1 else "model/supervised_head"
    kernel = file.shapes.get(f"{part}/linear_layer/dense/kernel")
    return None if kernel is None else kernel[-1]


def _read_class_names(file):
    """Returns the names that a run or a SavedModel records for the classes of its linear head, or None."""
    directory = os.path.dirname(file.path)
    if file.format.startswith("SavedModel"):
        description = storage.read_json(os.path.join(os.path.dirname(directory), DESCRIPTION_FILE)) or {}
        names = description.get("class_names")
    else:
        names, _ = read_classes(directory)
    return names if storage.is_list_of_strings(names) and len(names) == head_size(file) else None


def read_classes(directory: str) -> tuple[list[str] | None, bool]:
    """Returns the names in classes.json of a run, and whether an example may show several classes.

    The names are None if there is no such file, or if the run has no classes.

    Raises:
      UserError: the file is corrupt.
    """
    path = os.path.join(directory, CLASSES_FILE)
    if not tf.io.gfile.exists(path):
        return None, False
    content = storage.read_json(path, (dict, list, type(None)), default="corrupt")
    names = content.get("names") if isinstance(content, dict) else content
    if names is not None and not storage.is_list_of_strings(names):
        raise UserError(f"{path}: the file is corrupt. Restore it, or remove it if the classes did not change.")
    return names, isinstance(content, dict)


def _find_tensors(reader, shapes):
    """Version of the names, and name -> key; (None, None) if there is no SimCLR network."""
    tensors = {key: key for key in shapes}
    candidates = [("TF2", _flat_keys(tensors)), ("TF1", _tf1_keys(tensors))]
    if shapes.get(_GRAPH) == ():
        walked, named = _graph_keys(reader.get_tensor(_GRAPH))
        candidates += [("TF2", walked), ("TF1", _tf1_keys(named))]
    return next(((version, found) for version, found in candidates if found), (None, None))


def _step(reader, shapes, dtypes):
    for key in ("global_step", f"global_step{SUFFIX}", f"optimizer/iter{SUFFIX}"):
        if shapes.get(key) == () and dtypes[key].is_integer:
            return int(reader.get_tensor(key))
    return None


def _flat_keys(tensors):
    """Keys that say `model/...` themselves, without suffix."""
    names = {key[:-len(SUFFIX)]: key for key in tensors if key.endswith(SUFFIX) and SLOT not in key}
    return {name: key for name, key in names.items() if _KEY.fullmatch(name.removeprefix("model/"))
            and name.startswith("model/")}


def _tf1_keys(tensors):
    """TF1's names in a dict from names to keys; a Hub module may have a scope before them."""
    found = {}
    for name, key in tensors.items():
        match = _TF1_NAME.search(name)
        if match:
            found[match[1]] = key
    return found


def _graph_keys(serialized):
    """The tensors that a file's object graph leads to.

    Returns:
      walked: key of ours -> key in the file, below the first object that has a `resnet_model`.
      named: name that the variable had when it was made -> key in the file.
    """
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(serialized).nodes
    values = {number: attribute for number, node in enumerate(nodes) for attribute in node.attributes
              if attribute.name == "VARIABLE_VALUE"}
    named = {attribute.full_name: attribute.checkpoint_key for attribute in values.values()}
    roots = [node for node in nodes if any(child.local_name == "resnet_model" for child in node.children)]
    walked, queue, visited = {}, collections.deque([(roots[0], "model", 0)] if roots else []), 0
    while queue:
        node, path, depth = queue.popleft()
        for child in node.children:
            if not _PARTS.fullmatch(child.local_name) or depth > _GRAPH_DEPTH:
                continue
            visited += 1
            if visited > _GRAPH_NODES:  # The number of ways through a small graph can be exponential in its size.
                raise ValueError(f"its object graph has more than {_GRAPH_NODES} paths")
            name = f"{path}/{child.local_name}"
            if child.node_id in values and _KEY.fullmatch(name.removeprefix("model/")):
                walked[name] = values[child.node_id].checkpoint_key
            else:
                queue.append((nodes[child.node_id], name, depth + 1))
    return walked, named
