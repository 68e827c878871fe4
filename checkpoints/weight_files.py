"""Reads SimCLR weights from checkpoints and SavedModels. The weights have the same keys in all formats.

Supported formats: TF2 checkpoints and SavedModels from this program or the original, SavedModels
converted from TF1, TF1 checkpoints from the original, and PyTorch ResNets in safetensors files.
SavedModel graphs are never executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from checkpoints import (
    architecture,
    checkpoint_files,
    saved_graphs,
    tf1_names,
    torch_files,
    torch_names,
)
from runtime import storage
from runtime.errors import UserError, first_line
from runtime.paths import check_path

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOT = "/.OPTIMIZER_SLOT/"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# Names under which Keras lists the layers and variables of an object a second time.
_ALIAS = re.compile(
    r"layer(_with_weights)?-\d+|(non_)?(trainable_)?variables|regularization_losses|keras_api"
    "|signatures"
)
_PUBLISHED = "gs://simclr-checkpoints-tf2"  # the authors' networks
# Files in which runs (`run_directory`) and SavedModels record class names, among other things.
CLASSES_FILE, DESCRIPTION_FILE = "classes.json", "assets.extra/simclr.json"


class UnreadableWeights(UserError):
    """Raised if the files of a checkpoint are missing, unreadable or corrupt."""


@dataclasses.dataclass(frozen=True)
class WeightFile:
    """A file with the weights of a SimCLR network."""

    path: str  # Prefix of a checkpoint or of a SavedModel's variables, or path of a PyTorch file.
    format: str  # Name of the format for messages, such as "TF2 checkpoint".
    tensors: dict  # Maps checkpoint keys (without suffix) to keys in the file.
    shapes: dict  # Maps checkpoint keys to shapes (tuples).
    step: int | None  # Training step, if the file records it.
    class_names: list[str] | None = None  # Class names in the order of the linear head's columns.
    image_size: int | None = None  # Image size recorded in a PyTorch file.
    notes: list[str] = dataclasses.field(default_factory=list)  # Messages for the user.
    keys_with_slots: frozenset[str] = frozenset()  # Weights for which the file has optimizer slots.

    @property
    def is_torch(self) -> bool:
        """Returns whether this is a PyTorch file."""
        return self.format == torch_files.FORMAT

    @property
    def is_saved_model(self) -> bool:
        """Returns whether the weights are in a SavedModel."""
        return self.format.startswith("SavedModel")

    @property
    def num_classes(self) -> int | None:
        """Returns the number of classes of the linear head, or None if there is no linear head."""
        return self.shapes.get(f"{architecture.LINEAR_HEAD}kernel", (None,))[-1]

    def reader(self) -> Callable[[str], np.ndarray]:
        """Returns a function that maps a checkpoint key to its array. It may raise `UnreadableWeights`."""
        read_key = (
            torch_files.reader(self.path)
            if self.is_torch
            else tf.train.load_checkpoint(self.path).get_tensor
        )

        def read(key):
            try:
                return read_key(self.tensors[key])
            except checkpoint_files.READ_ERRORS as error:
                raise UnreadableWeights(
                    f"{self.path}: the file is corrupt ({key}: {first_line(error)}). Copy it"
                    " again, or use another checkpoint."
                ) from error

        return read

    @property
    def location(self) -> str:
        """Path that `open_weights` accepts: the directory of a SavedModel, and otherwise `path`."""
        return os.path.dirname(os.path.dirname(self.path)) if self.is_saved_model else self.path

    def head_input(self) -> int | None:
        """Returns the number of projection head layers in front of the classifier, or None if it is unknown.

        Without a projection head or a classifier, returns 0. In the original, the layers behind the
        one that feeds the classifier receive no gradients in fine-tuning, and thus have no slots.
        The graph of a SavedModel and the names of published networks also show the layer.
        """
        classifier, head = f"{architecture.LINEAR_HEAD}kernel", architecture.PROJECTION_HEAD
        layers = [key for key in self.tensors if key.startswith(head) and key.endswith("/kernel")]
        if classifier not in self.tensors or not layers:
            return 0
        if self.shapes[classifier][0] != self.shapes[f"{head}0/dense/kernel"][0]:
            return len(layers)  # Only the last layer has another width than h.
        trained = len(self.keys_with_slots.intersection(layers))
        if classifier in self.keys_with_slots and trained < len(layers):
            return trained
        found = saved_graphs.head_input(self.location) if self.is_saved_model else None
        if found is None and re.search(r"finetuned_(1|10)pct", self.path):
            return 1
        return found

    def digest(self) -> str:
        """Returns the `digest` of all weights in the file. May raise `UnreadableWeights`."""
        return digest(self.reader(), self.tensors)


def digest(read: Callable[[str], np.ndarray], keys: Iterable[str]) -> str:
    """Returns the SHA-256 of checkpoint keys and the float32 values that `read` returns for them.

    The digest depends only on the weights, so it is the same for all formats.
    """
    sha = hashlib.sha256()
    for key in sorted(keys):
        sha.update(key.encode() + read(key).astype(np.float32).tobytes())
    return sha.hexdigest()


# ------------------------------------------------------------------------------------------------------ locating


def locate(path: str, flag: str = "--checkpoint") -> tuple[str, bool]:
    """Finds the weights at `path`.

    Args:
      path: a SavedModel, a checkpoint prefix, a PyTorch file (FILE.safetensors), a TF Hub handle
        (https://...) to download, a directory of checkpoints or numbered SavedModels, of which the
        latest is used, or the name of a published network, such as
        simclrv2/pretrained/r50_1x_sk0, unless there is a local path of this name. PyTorch files
        must be on a local disk. All other files may be on any of TensorFlow's file systems, such as
        gs://.
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
        if re.match("simclrv[12]/", path) and not tf.io.gfile.exists(path):
            path = f"{_PUBLISHED}/{path.rstrip('/')}/saved_model"
        return _locate(path, flag)
    except (tf.errors.OpError, ValueError) as error:
        # ValueError: the `checkpoint` file is empty or malformed.
        raise UserError(
            f"{flag}={path}: the path cannot be read ({first_line(error)}). Check the path, or use"
            " a local copy."
        ) from error


def _locate(path: str, flag: str) -> tuple[str, bool]:
    if tf.io.gfile.isdir(path):
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
        steps = sorted(filter(str.isdecimal, names), key=int, reverse=True)
        for step in ("", *steps):  # Runs write saved_model/<step>/.
            if tf.saved_model.contains_saved_model(tf.io.gfile.join(path, step)):
                return tf.io.gfile.join(path, step, "variables", "variables"), True
        prefix = _newest(path)
        if prefix is None:
            prefixes = sorted(
                name.removesuffix(".index") for name in names if name.endswith(".index")
            )
            remedy = (
                f"Pass a checkpoint prefix, such as {path.rstrip('/')}/{prefixes[-1]}."
                if prefixes
                else "Pass a directory of checkpoints, or a prefix such as DIR/ckpt-100."
            )
            raise UserError(
                f"{flag}={path}: this directory contains neither a checkpoint nor a SavedModel. "
                f"{remedy}"
            )
        return prefix, False
    if path.endswith(torch_names.SUFFIX) and storage.is_file(path):
        return path, False
    prefix = path.removesuffix(".index")
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(
            f"{flag}={path}: no such checkpoint. Pass a directory, a SavedModel, a prefix such as "
            f"DIR/ckpt-100, or a PyTorch file FILE{torch_names.SUFFIX}."
        )
    return prefix, False


def _newest(directory: str) -> str | None:
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


def _download(handle: str, flag: str) -> str:
    import tensorflow_hub as hub  # Imported here because only TF Hub handles require it.

    # TF Hub's default is in the temporary directory, where other users could prepare files.
    cache = os.environ.setdefault("TFHUB_CACHE_DIR", os.path.expanduser("~/.cache/tfhub_modules"))
    try:
        if "://" not in cache:
            os.makedirs(cache, mode=0o700, exist_ok=True)
        return hub.resolve(handle)
    except Exception as error:  # Network, server and archive errors have the same remedy.
        raise UserError(
            f"{flag}={handle}: the download failed ({first_line(error)}). Check the handle, or use"
            " a local copy."
        ) from error


def open_weights(path: str, flag: str = "--checkpoint") -> WeightFile:
    """Reads the names, shapes and step of the weights at `path` (see `locate`).

    Raises:
      UserError: there is no network at `path`, or (`UnreadableWeights`) it cannot be read.
    """
    prefix, saved_model = locate(path, flag)
    if prefix.endswith(torch_names.SUFFIX) and not saved_model:
        return WeightFile(
            prefix, torch_files.FORMAT, **vars(torch_files.read_contents(prefix, flag))
        )
    try:
        size = _size(prefix)
        reader = tf.train.load_checkpoint(prefix)
        shapes = {key: tuple(shape) for key, shape in reader.get_variable_to_shape_map().items()}
        dtypes = reader.get_variable_to_dtype_map()
        version, tensors = _find_tensors(reader, shapes)
        # Slots are named VARIABLE/.OPTIMIZER_SLOT/... in TF2, and VARIABLE/Momentum in TF1.
        owners = {
            key.partition(SLOT)[0] if SLOT in key else key.rpartition("/")[0] for key in shapes
        }
        claimed = sum(math.prod(shapes[key]) * dtypes[key].size for key in tensors.values())
        if claimed > size:
            raise ValueError(f"the index describes {claimed} bytes, but the files have {size}")
        step = _step(reader, shapes, dtypes)
    except checkpoint_files.READ_ERRORS as error:
        raise UnreadableWeights(
            f"{flag}={path}: {prefix} cannot be read ({first_line(error)}). Check that it is"
            " complete, or use another checkpoint."
        ) from error
    if not tensors:
        raise UserError(
            f"{flag}={path}: {prefix} does not contain a SimCLR network (no keys"
            " model/resnet_model/... or base_model/...; first keys:"
            f" {', '.join(sorted(shapes)[:3])}). Use the checkpoint of a SimCLR network."
        )
    parts = (architecture.ENCODER, architecture.PROJECTION_HEAD, architecture.LINEAR_HEAD)
    for name, key in tensors.items():
        if name.startswith(parts) and not dtypes[key].is_floating:
            raise UserError(
                f"{flag}={path}: {name} in {prefix} has type {dtypes[key].name}, not a"
                " floating-point type. Use the checkpoint of a SimCLR network."
            )
    file_format = f"{version} checkpoint"
    if saved_model:
        file_format = "SavedModel (TF1 names)" if version == "TF1" else "SavedModel"
    file = WeightFile(
        prefix,
        file_format,
        tensors,
        {name: shapes[key] for name, key in tensors.items()},
        step,
        keys_with_slots=frozenset(
            name for name, key in tensors.items() if key.removesuffix(SUFFIX) in owners
        ),
    )
    return dataclasses.replace(file, class_names=_read_class_names(file))


def _size(prefix: str) -> int:
    """Returns the number of bytes of a checkpoint's files. Raises ValueError if one is not a regular file."""
    size, (directory, base) = 0, os.path.split(prefix)
    for name in tf.io.gfile.listdir(directory or "."):
        path = os.path.join(directory, name)
        if name.startswith((f"{base}.index", f"{base}.data-")):
            if not storage.is_file(path):
                raise ValueError(f"{name} is not a regular file")
            size += tf.io.gfile.stat(path).length
    return size


def _read_class_names(file: WeightFile) -> list[str] | None:
    """Returns the class names recorded in the run or SavedModel that contains a weight file, or None if unknown."""
    if file.is_saved_model:
        names = read_description(file.location).get("class_names")
    else:
        names, _ = read_classes(os.path.dirname(file.path))
    return names if storage.is_list_of_strings(names) and len(names) == file.num_classes else None


def read_description(saved_model: str) -> dict:
    """Returns the description in a SavedModel, or an empty dict if another program exported the SavedModel.

    The keys are those that `export.saving` writes.

    Raises:
      UserError: the file is corrupt.
    """
    path = os.path.join(saved_model, DESCRIPTION_FILE)
    return storage.without_none(storage.read_own_json(path) or {})


def read_classes(directory: str) -> tuple[list[str] | None, bool]:
    """Reads a run's classes.json.

    Returns:
      A tuple of the class names (None if the file is missing or empty, or the run has no classes) and
      whether the task is multi-label.

    Raises:
      UserError: the file is corrupt.
    """
    path = os.path.join(directory, CLASSES_FILE)
    content = storage.read_own_json(path, (dict, list, type(None)))
    if not isinstance(content, dict):
        content = dict(names=content)
    names = content.get("names")
    if storage.is_list_of_strings(names) and len(set(names)) < len(names):
        raise UserError(f"{path}: a class name occurs twice. Restore the file.")
    return names, content.get("multi_label", False)


def _find_tensors(reader: Any, shapes: dict[str, tuple]) -> tuple[str, dict[str, str]]:
    """Returns the format ("TF1" or "TF2") and a dict mapping checkpoint keys to keys in the file.

    If no network is found, the dict is empty.
    """
    flat = {
        key.removesuffix(SUFFIX): key
        for key in shapes
        if key.startswith("model/") and key.endswith(SUFFIX) and SLOT not in key
    }
    keys_by_path, keys_by_name = {}, {key: key for key in shapes}
    if shapes.get(_GRAPH) == ():
        keys_by_path, names_in_graph = _graph_keys(reader.get_tensor(_GRAPH))
        keys_by_name.update(names_in_graph)
    tf2 = flat or keys_by_path
    if any(key.startswith(architecture.ENCODER) for key in tf2):
        return "TF2", tf2
    return "TF1", tf1_names.find_tensors(shapes, keys_by_name)


def _step(reader: Any, shapes: dict[str, tuple], dtypes: dict[str, tf.DType]) -> int | None:
    for key in ("global_step", f"global_step{SUFFIX}", f"optimizer/iter{SUFFIX}"):
        if shapes.get(key) == () and dtypes[key].is_integer:
            return int(reader.get_tensor(key))
    return None


def _graph_keys(serialized: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Finds the variables in a serialized object graph.

    Returns:
      keys_by_path: checkpoint key -> key in the file, for variables under the first object that has
        a `resnet_model` attribute.
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
    children = [{child.local_name: child.node_id for child in node.children} for node in nodes]
    root = next(
        (node_id for node_id, names in enumerate(children) if "resnet_model" in names), None
    )
    keys_by_path, seen = {}, {root}
    queue = [] if root is None else [(root, "model")]
    # As in `tf.train.Checkpoint`, the key of a variable is its shortest path.
    for node_id, path in queue:  # The loop also visits the children that it appends.
        if node_id in values:
            keys_by_path[path] = values[node_id].checkpoint_key
        for name, child in children[node_id].items():
            if child not in seen and not _ALIAS.fullmatch(name):
                seen.add(child)
                queue.append((child, f"{path}/{name}"))
    return keys_by_path, keys_by_name
