"""Reads SimCLR weights from checkpoints and SavedModels. The weights have the same keys in all formats.

Supported formats: TF2 checkpoints and SavedModels from this program or the original, SavedModels
converted from TF1, TF1 checkpoints from the original, and PyTorch ResNets in safetensors files.
SavedModel graphs are never executed.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from checkpoints import checkpoint_files, tf1_names, torch_files, torch_names
from runtime import storage
from runtime.errors import UserError, first_line
from runtime.paths import check_path

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOT = "/.OPTIMIZER_SLOT/"
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# Limits for object graphs. The graph of a ResNet-200 with SK and SE has 3,261 paths.
_GRAPH_NODES, _GRAPH_DEPTH = 100_000, 10
# Files in which runs (`run_directory`) and SavedModels (`descriptions`) record class names.
CLASSES_FILE, DESCRIPTION_FILE = "classes.json", "assets.extra/simclr.json"
_VARIABLE_NAMES = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
# This program's checkpoint keys below `model`. Object graphs contain many other paths to the same
# variables.
_KEY = re.compile(
    r"(?:resnet_model/(?:initial_conv_relu_max_pool/\d+|block_groups/\d+/layers/\d+/"
    r"(?:(?:projection_layers|shortcut_layers|conv_relu_dropblock_layers|conv2d_bn_layers)/\d+|se_layer))"
    r"(?:/(?:conv2d_fixed_padding|conv2d|conv2d_0|conv2d_1|batch_norm_relu|batch_norm_relu_1|bn|se_reduce|se_expand))*"
    r"|_projection_head/linear_layers/\d+/(?:dense|bn_relu/bn)|supervised_head/linear_layer/dense)"
    rf"/(?:{'|'.join(_VARIABLE_NAMES)})"
)
_KEY_COMPONENT = re.compile(  # For each key that matches `_KEY`, its path components.
    r"\d+|resnet_model|initial_conv_relu_max_pool|block_groups|layers|projection_layers|shortcut_layers|"
    r"conv_relu_dropblock_layers|conv2d_bn_layers|se_layer|se_reduce|se_expand|conv2d_fixed_padding|conv2d|conv2d_0|"
    r"conv2d_1|batch_norm_relu|batch_norm_relu_1|bn|bn_relu|_projection_head|linear_layers|dense|supervised_head|"
    rf"linear_layer|{'|'.join(_VARIABLE_NAMES)}"
)
_TF1_NAME = re.compile(
    rf"(base_model/(?:conv2d|batch_normalization)(?:_\d+)?/(?:{'|'.join(_VARIABLE_NAMES)})"
    rf"|head_contrastive/n?l_\d+/(?:dense|batch_normalization)/(?:{'|'.join(_VARIABLE_NAMES)})"
    r"|head_supervised/linear_layer/dense/(?:kernel|bias))(?::0)?$"
)


@dataclasses.dataclass(frozen=True)
class WeightFile:
    """A file with the weights of a SimCLR network."""

    path: str  # Prefix of a checkpoint or of a SavedModel's variables, or path of a PyTorch file.
    format: str  # Name of the format for messages, such as "TF2 checkpoint".
    is_tf1: bool  # True if `tensors` contains TF1 names.
    tensors: dict  # Maps names (TF1 names, or checkpoint keys without suffix) to keys in the file.
    shapes: dict  # Maps names to shapes (tuples).
    num_other_tensors: int  # Number of tensors that are not weights, such as optimizer slots.
    step: int | None  # Training step, if the file records it.
    class_names: list[str] | None = None  # Class names in the order of the linear head's columns.
    image_size: int | None = None  # Image size recorded in a PyTorch file.
    notes: list[str] = dataclasses.field(default_factory=list)  # Messages for the user.

    @property
    def is_torch(self) -> bool:
        """Returns whether this is a PyTorch file."""
        return self.format == torch_files.FORMAT

    def names_by_key(self, keys: Iterable[str]) -> dict[str, str]:
        """Maps checkpoint keys to names in this file. `keys` must include all keys of the encoder."""
        return tf1_names.tf1_names(keys) if self.is_tf1 else {key: key for key in keys}

    def reader(self) -> Callable[[str], np.ndarray]:
        """Returns a function that maps a name to its array and raises `UserError` if the file is corrupt."""
        read_key = (
            torch_files.reader(self.path)
            if self.is_torch
            else tf.train.load_checkpoint(self.path).get_tensor
        )

        def read(name):
            try:
                return read_key(self.tensors[name])
            except checkpoint_files.READ_ERRORS as error:
                raise UserError(
                    f"{self.path}: the file is corrupt ({name}: {first_line(error)}). Copy it"
                    " again, or use another checkpoint."
                ) from error

        return read


# ------------------------------------------------------------------------------------------------------ locating


def locate(path: str, flag: str = "--checkpoint") -> tuple[str, bool]:
    """Finds the weights at `path`.

    Args:
      path: a SavedModel, a checkpoint prefix, a PyTorch file (FILE.safetensors), a TF Hub handle
        (https://...) to download, or a directory of checkpoints or numbered SavedModels, of which
        the latest is used. PyTorch files must be on a local disk. All other files may be on any of
        TensorFlow's file systems, such as gs://.
      flag: the flag whose value is `path`, for error messages.

    Returns:
      A tuple of the path and a boolean. The path is a checkpoint prefix, or the path of a PyTorch
      file. The boolean is True if the path belongs to a SavedModel.

    Raises:
      UserError: `path` contains no weights.
    """
    if path.startswith(("http://", "https://")):
        path = _download(path, flag)
    try:
        return _locate(path, flag)
    except (tf.errors.OpError, ValueError) as error:
        # ValueError: the `checkpoint` file is empty or malformed.
        raise UserError(
            f"{flag}={path}: the path cannot be read ({first_line(error)}). Check the path, or use"
            " a local copy."
        ) from error


def _locate(path, flag):
    if tf.io.gfile.isdir(path):
        steps = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
        saved_models = [
            path,
            *(
                tf.io.gfile.join(path, step)
                for step in sorted(
                    # Runs write saved_model/<step>/.
                    (step for step in steps if step.isdecimal()),
                    key=int,
                    reverse=True,
                )
            ),
        ]
        for directory in saved_models:
            if any(
                tf.io.gfile.exists(tf.io.gfile.join(directory, name)) for name in _SAVED_MODEL_FILES
            ):
                return tf.io.gfile.join(directory, "variables", "variables"), True
        prefix = _newest(path)
        if prefix is None:
            raise UserError(
                f"{flag}={path}: this directory contains neither a checkpoint nor a SavedModel. "
                f"{_remedy(path)}"
            )
        return prefix, False
    if path.endswith(torch_names.SUFFIX) and storage.is_file(path):
        return path, False
    prefix = path[: -len(".index")] if path.endswith(".index") else path
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(
            f"{flag}={path}: no such checkpoint. Pass a directory, a SavedModel, a prefix such as "
            f"DIR/ckpt-100, or a PyTorch file FILE{torch_names.SUFFIX}."
        )
    return prefix, False


def _newest(directory):
    """Returns the prefix of the checkpoint that the `checkpoint` file lists.

    If that checkpoint does not exist, returns the prefix of the newest checkpoint in the directory,
    or None if there are no checkpoints.
    """
    try:
        state = tf.train.get_checkpoint_state(directory)
    except ValueError:  # The `checkpoint` file is empty or not text.
        state = None
    if state is not None:
        # If the checkpoints were moved, the `checkpoint` file may still contain their old
        # directory.
        for prefix in (
            state.model_checkpoint_path,
            tf.io.gfile.join(directory, os.path.basename(state.model_checkpoint_path)),
        ):
            if storage.is_file(f"{prefix}.index"):
                return check_path("checkpoint", prefix)
    return checkpoint_files.latest_checkpoint(directory)


def _remedy(path):
    """Returns the remedy for an error about a directory in which no checkpoint was found.

    If the directory contains index files, the remedy suggests a checkpoint prefix.
    """
    names = sorted(
        name[: -len(".index")] for name in tf.io.gfile.listdir(path) if name.endswith(".index")
    )
    if names:
        return f"Pass a checkpoint prefix, such as {path.rstrip('/')}/{names[-1]}."
    return "Pass a directory of checkpoints, or a prefix such as DIR/ckpt-100."


def _download(handle, flag):
    import tensorflow_hub as hub  # Imported here because only TF Hub handles require it.

    try:
        return hub.resolve(handle)
    except Exception as error:  # Network, server and archive errors have the same remedy.
        raise UserError(
            f"{flag}={handle}: the download failed ({first_line(error)}). Check the handle, or use"
            " a local copy."
        ) from error


def open_weights(path: str, flag: str = "--checkpoint") -> WeightFile:
    """Reads the names, shapes and step of the weights at `path` (see `locate`).

    Raises `UserError` if they cannot be read.
    """
    prefix, saved_model = locate(path, flag)
    if prefix.endswith(torch_names.SUFFIX) and not saved_model:
        contents = torch_files.read_contents(prefix, flag)
        return WeightFile(
            prefix,
            torch_files.FORMAT,
            False,
            contents.tensors,
            contents.shapes,
            contents.num_other_tensors,
            contents.step,
            None,
            contents.image_size,
            contents.notes,
        )
    directory, base = os.path.split(prefix)
    try:
        for name in tf.io.gfile.listdir(directory or "."):
            is_checkpoint_file = name.startswith((f"{base}.index", f"{base}.data-"))
            if is_checkpoint_file and not storage.is_file(os.path.join(directory, name)):
                raise ValueError(f"{name} is not a regular file")
        reader = tf.train.load_checkpoint(prefix)
        shapes = {key: tuple(shape) for key, shape in reader.get_variable_to_shape_map().items()}
        dtypes = reader.get_variable_to_dtype_map()
        version, tensors = _find_tensors(reader, shapes)
        step = _step(reader, shapes, dtypes)
    except checkpoint_files.READ_ERRORS as error:
        raise UserError(
            f"{flag}={path}: {prefix} cannot be read ({first_line(error)}). Check that it is"
            " complete, or use another checkpoint."
        ) from error
    if tensors is None:
        raise UserError(
            f"{flag}={path}: {prefix} does not contain a SimCLR network (no keys"
            " model/resnet_model/... or base_model/...; first keys:"
            f" {', '.join(sorted(shapes)[:3])}). Use the checkpoint of a SimCLR network."
        )
    for name, key in tensors.items():
        if not dtypes[key].is_floating:
            raise UserError(
                f"{flag}={path}: {name} in {prefix} has type {dtypes[key].name}, not a"
                " floating-point type. Use the checkpoint of a SimCLR network."
            )
    file_format = (
        f"SavedModel{' (TF1 names)' if version == 'TF1' else ''}"
        if saved_model
        else f"{version} checkpoint"
    )
    file = WeightFile(
        prefix,
        file_format,
        version == "TF1",
        tensors,
        {name: shapes[key] for name, key in tensors.items()},
        len(shapes.keys() - set(tensors.values()) - {_GRAPH}),
        step,
    )
    return dataclasses.replace(file, class_names=_read_class_names(file))


def head_size(file: WeightFile) -> int | None:
    """Returns the number of classes of a file's linear head, or None if the file has no linear head."""
    head = "head_supervised" if file.is_tf1 else "model/supervised_head"
    kernel = file.shapes.get(f"{head}/linear_layer/dense/kernel")
    return None if kernel is None else kernel[-1]


def _read_class_names(file):
    """Returns the class names recorded in the run or SavedModel that contains a weight file, or None if unknown."""
    directory = os.path.dirname(file.path)
    if file.format.startswith("SavedModel"):
        description = (
            storage.read_json(os.path.join(os.path.dirname(directory), DESCRIPTION_FILE)) or {}
        )
        names = description.get("class_names")
    else:
        names, _ = read_classes(directory)
    return names if storage.is_list_of_strings(names) and len(names) == head_size(file) else None


def read_classes(directory: str) -> tuple[list[str] | None, bool]:
    """Reads a run's classes.json.

    Returns:
      A tuple of the class names (None if the file is missing or the run has no classes) and whether
      the task is multi-label.

    Raises:
      UserError: the file is corrupt.
    """
    path = os.path.join(directory, CLASSES_FILE)
    if not tf.io.gfile.exists(path):
        return None, False
    content = storage.read_json(path, (dict, list, type(None)), default="corrupt")
    names = content.get("names") if isinstance(content, dict) else content
    if names is not None and not storage.is_list_of_strings(names):
        raise UserError(
            f"{path}: the file is corrupt. Restore it, or delete it if the classes have not"
            " changed."
        )
    return names, isinstance(content, dict)


def _find_tensors(reader, shapes):
    """Returns the format ("TF1" or "TF2") and a dict mapping names to keys, or (None, None) if no network is found."""
    tensors = {key: key for key in shapes}
    candidates = [("TF2", _flat_keys(tensors)), ("TF1", _tf1_keys(tensors))]
    if shapes.get(_GRAPH) == ():
        keys_by_path, keys_by_name = _graph_keys(reader.get_tensor(_GRAPH))
        candidates += [("TF2", keys_by_path), ("TF1", _tf1_keys(keys_by_name))]
    return next(((version, keys) for version, keys in candidates if keys), (None, None))


def _step(reader, shapes, dtypes):
    for key in ("global_step", f"global_step{SUFFIX}", f"optimizer/iter{SUFFIX}"):
        if shapes.get(key) == () and dtypes[key].is_integer:
            return int(reader.get_tensor(key))
    return None


def _flat_keys(tensors):
    """Returns a dict mapping names (keys without suffix) to keys, for tensors whose keys start with `model/`."""
    names = {
        key[: -len(SUFFIX)]: key for key in tensors if key.endswith(SUFFIX) and SLOT not in key
    }
    return {
        name: key
        for name, key in names.items()
        if _KEY.fullmatch(name.removeprefix("model/")) and name.startswith("model/")
    }


def _tf1_keys(tensors):
    """Returns a dict mapping TF1 names to keys. Removes the scope prefixes that TF Hub modules may add to names."""
    keys = {}
    for name, key in tensors.items():
        match = _TF1_NAME.search(name)
        if match:
            keys[match[1]] = key
    return keys


def _graph_keys(serialized):
    """Finds the variables in a serialized object graph.

    Returns:
      keys_by_path: this program's checkpoint key -> key in the file, for variables under the first
        object that has a `resnet_model` attribute.
      keys_by_name: `tf.Variable.name` at creation -> key in the file.
    """
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(serialized).nodes
    values = {
        node_id: attribute
        for node_id, node in enumerate(nodes)
        for attribute in node.attributes
        if attribute.name == "VARIABLE_VALUE"
    }
    keys_by_name = {attribute.full_name: attribute.checkpoint_key for attribute in values.values()}
    roots = [
        node for node in nodes if any(child.local_name == "resnet_model" for child in node.children)
    ]
    keys_by_path, queue, visited = (
        {},
        collections.deque([(roots[0], "model", 0)] if roots else []),
        0,
    )
    while queue:
        node, path, depth = queue.popleft()
        for child in node.children:
            if not _KEY_COMPONENT.fullmatch(child.local_name) or depth > _GRAPH_DEPTH:
                continue
            visited += 1
            if visited > _GRAPH_NODES:
                # The number of paths can be exponential in the number of nodes.
                raise ValueError(f"the object graph has more than {_GRAPH_NODES} paths")
            name = f"{path}/{child.local_name}"
            if child.node_id in values and _KEY.fullmatch(name.removeprefix("model/")):
                keys_by_path[name] = values[child.node_id].checkpoint_key
            else:
                queue.append((nodes[child.node_id], name, depth + 1))
    return keys_by_path, keys_by_name
