"""Loads weights into a model, part by part. A part is loaded only if the names and shapes of all its tensors match."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

import model as model_lib
from checkpoints import architecture, inspection, weight_files
from config import as_flags
from runtime import console
from runtime.errors import UserError
from sources import classes

_MAX_LISTED = 3  # maximum number of mismatches in an error message
# Model part -> prefix of its checkpoint keys, except for those of earlier parts.
PARTS = {
    "encoder": architecture.ENCODER,
    "projection head": architecture.PROJECTION_HEAD,
    "linear head": architecture.LINEAR_HEAD,
    "other layers": "",
}


def variables_by_key(**trackables: tf.Module) -> dict[str, tf.Variable]:
    """Returns a dict mapping checkpoint keys (without suffix) to the variables of the given objects."""
    # Keep a reference, because `TrackableView` holds only a weak one.
    root = tf.train.Checkpoint(**trackables)
    view = tf.train.TrackableView(root)
    variables, seen = {}, set()
    queue = [(root, "")]
    for node, path in queue:  # The loop also visits the children that it appends.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tf.Variable):
            variables[path.removeprefix("/")] = node
        else:
            queue.extend((child, f"{path}/{name}") for name, child in view.children(node).items())
    return variables


def find_mismatches(variables: dict[str, tf.Variable], shapes: dict[str, tuple]) -> list[str]:
    """Compares a model's variables with shapes in a file. Returns one line of text for each difference."""
    lines = [f"missing: {key}" for key in variables if key not in shapes]
    lines += [f"unexpected: {key}" for key in shapes if key not in variables]
    return lines + [
        f"{key} has shape {list(shapes[key])} instead of {list(variable.shape)}"
        for key, variable in variables.items()
        if key in shapes and shapes[key] != tuple(variable.shape)
    ]


def split_by_part(entries: dict) -> dict[str, dict]:
    """Splits a dict whose keys are checkpoint keys into one dict for each of `PARTS`."""
    parts: dict[str, dict] = {part: {} for part in PARTS}
    for key, value in entries.items():
        parts[next(part for part in PARTS if key.startswith(PARTS[part]))][key] = value
    return parts


def raise_on_mismatches(flag: str, file: weight_files.WeightFile, lines: list[str]) -> None:
    """If `lines` is not empty, raises a `UserError` that lists the first mismatches."""
    if lines:
        rest = f"; and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
        remedy = "Use another checkpoint; no flags match this network."
        if flags := architecture.infer_flags(file.shapes):
            remedy = f"Pass {' '.join(as_flags(flags))}, or use another checkpoint."
        raise UserError(
            f"{flag}: {file.path} contains a different network"
            f" ({'; '.join(lines[:_MAX_LISTED])}{rest}). {remedy}"
        )


def _assign(
    variables: dict[str, tf.Variable], file: weight_files.WeightFile, columns: list[int] | None
) -> None:
    """Assigns the tensors in a file to variables.

    Args:
      variables: dict mapping keys to variables.
      file: the `WeightFile`.
      columns: None if the classes match. Otherwise, for each of the model's classes, its column in
        the file's linear head, or -1 if the file does not contain the class.
    """
    read = file.reader()
    arrays = {key: read(key) for key in variables}  # Read all arrays before assigning any.
    for key, array in arrays.items():
        if not np.isfinite(array).all():
            raise UserError(
                f"{file.path}: {key} contains NaN or Inf. Use a checkpoint from before"
                " training diverged."
            )
    for key, variable in variables.items():
        array = tf.cast(arrays[key], variable.dtype)
        if columns is not None and key.startswith(PARTS["linear head"]):
            # Weights for classes that are missing from the file (column -1) remain unchanged.
            array = tf.where(
                tf.constant(columns) >= 0,
                tf.gather(array, tf.maximum(columns, 0), axis=-1),
                variable,
            )
        variable.assign(array)


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """The result of loading weights."""

    file: weight_files.WeightFile
    not_loaded: dict  # part of the model -> reason why it was not loaded
    lines: list  # messages for the user


def load_parts(
    model: model_lib.Model,
    path: str,
    required: Iterable[str],
    flag: str = "--checkpoint",
    class_names: list[str] | None = None,
) -> LoadResult:
    """Loads the parts of `model` that match the checkpoint at `path`.

    Args:
      model: a built `model_lib.Model`.
      path: see `weight_files.locate`.
      required: parts that must match; keys of `PARTS`.
      flag: the flag whose value is `path`, for error messages.
      class_names: class names of the model's linear head. If the file records different names, head
        columns are mapped by class name. If neither set of names contains the other, the head is
        not loaded. None disables the mapping.

    Returns:
      A `LoadResult`.

    Raises:
      UserError: a required part does not match. The message lists the first differences and the
        flags of the checkpoint's network.
    """
    file = weight_files.open_weights(path, flag)
    variables = variables_by_key(model=model)
    matching, not_loaded, columns = {}, {}, None
    shapes_by_part = split_by_part(file.shapes)
    for part, part_variables in split_by_part(variables).items():
        file_shapes, differences = shapes_by_part[part], []
        if (
            part == "linear head"
            and part_variables
            and class_names
            and file.class_names not in (None, class_names)
        ):
            columns = classes.match_columns(class_names, file.class_names)
            file_shapes = {
                name: (*shape[:-1], len(class_names)) for name, shape in file_shapes.items()
            }
            if columns is None:
                text = classes.differences(
                    class_names, file.class_names, "the data set", "the checkpoint"
                )
                differences = [f"different classes: {text}"]
        differences += find_mismatches(part_variables, file_shapes)
        if not differences:
            matching.update(part_variables)
            continue
        if part in required and (part_variables or part != "other layers"):
            if part == "linear head":
                raise UserError(
                    f"{flag}: {file.path} contains a different linear head ({differences[0]})."
                    " Evaluate without the linear head (--eval_protocol=lbfgs or knn), or use a"
                    " checkpoint and a data set with the same classes."
                )
            raise_on_mismatches(flag, file, differences)
        not_loaded[part] = differences[0] if part_variables else "this model has none"
    _assign(matching, file, columns)
    lines = [
        f"loaded {len(matching)} of {len(variables)} variables from {file.path} ({file.format})",
        *(f"not loaded: {part} ({reason})" for part, reason in not_loaded.items()),
    ]
    if columns is not None:
        lines.append(
            f"linear head: {sum(column >= 0 for column in columns)} of {len(columns)} classes were"
            f" loaded, matched by name with the {len(file.class_names)} classes in the checkpoint"
        )
    lines += file.notes
    return LoadResult(file, not_loaded, lines)


def load_model(
    model: model_lib.Model, path: str, flag: str = "--model_dir"
) -> weight_files.WeightFile:
    """Loads all parts of `model`, and returns the `WeightFile`. All parts must match (see `load_parts`)."""
    return load_parts(model, path, PARTS, flag).file


def warm_start(
    model: model_lib.Model,
    path: str,
    required: Iterable[str] = ("encoder",),
    class_names: list[str] | None = None,
) -> LoadResult:
    """Loads the `required` parts, which must match, and any other matching parts (see `load_parts`)."""
    loaded = load_parts(model, path, required, class_names=class_names)
    if "projection head" in loaded.not_loaded and model.num_proj_layers:
        loaded.lines.append(
            "the projection head is initialized randomly; --proj_head_mode=none removes it"
        )
    return loaded


def weights_digest(model: model_lib.Model) -> str:
    """Returns the `weight_files.digest` of a model's weights."""
    variables = variables_by_key(model=model)
    return weight_files.digest(lambda key: variables[key].numpy(), variables)


def open_network(
    path: str,
    given: dict[str, int] | None = None,
    flag: str = "--checkpoint",
    precision: str = "float32",
) -> tuple[model_lib.Model, inspection.CheckpointInfo]:
    """Builds the network whose weights are at `path` (see `weight_files.locate`), and loads them.

    The network does not depend on the strategy, frozen blocks or precision used in training.

    Args:
      path: see `weight_files.locate`.
      given: see `inspection.inspect_checkpoint`.
      flag: the flag whose value is `path`, for error messages.
      precision: see `Config`.

    Raises:
      UserError: the weights or the recorded settings are unusable.
    """
    info = inspection.inspect_checkpoint(path, given, flag)
    model = model_lib.build_model(info.config.replace(precision=precision), info.file.num_classes)
    console.log_lines(load_model(model, path, flag).notes)
    return model, info
