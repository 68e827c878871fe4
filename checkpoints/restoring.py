"""Loading of weights into a model, strictly by part, with errors that name the first differences."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from checkpoints import architecture, weight_files
from checkpoints.weight_files import WeightFile
from runtime.errors import UserError
from sources import classes

_SHOWN = 3  # mismatches that an error lists
# Parts of a model: what keys begin with, ours and TF1's.
PARTS = {"encoder": ("model/resnet_model/", "base_model/"),
         "projection head": ("model/_projection_head/", "head_contrastive/"),
         "linear head": ("model/supervised_head/", "head_supervised/")}


def variables_by_key(**trackables: Any) -> dict[str, tf.Variable]:
    """Checkpoint key (without suffix) -> variable, for all variables below the given objects."""
    root = tf.train.Checkpoint(**trackables)  # Held here: the view holds it weakly.
    view = tf.train.TrackableView(root)
    found, seen = {}, set()
    queue = collections.deque([(root, "")])
    while queue:
        node, path = queue.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tf.Variable):
            found[path] = node
        else:
            queue.extend((child, f"{path}/{name}" if path else name) for name, child in view.children(node).items())
    found.pop("save_counter", None)
    return found


def find_mismatches(here: dict[str, tuple], there: dict[str, tuple]) -> list[str]:
    """How a file differs from a model: lines of text, none if they agree. Both are dicts from names to shapes."""
    lines = [f"{name} is missing there" for name in here if name not in there]
    lines += [f"{name} is only there" for name in there if name not in here]
    return lines + [f"{name} is {list(there[name])} there, {list(shape)} here"
                    for name, shape in here.items() if name in there and tuple(there[name]) != tuple(shape)]


def shapes_by_name(variables: dict[str, tf.Variable], names: dict[str, str]) -> dict[str, tuple]:
    """The shapes of `variables` (key -> variable) under other names (key -> name)."""
    return {names[key]: tuple(variable.shape) for key, variable in variables.items()}


def filter_by_prefix(prefixes: str | tuple[str, ...], entries: dict) -> dict:
    """Returns the entries of a dict whose keys start with one of the prefixes."""
    return {key: value for key, value in entries.items() if key.startswith(prefixes)}


def raise_on_mismatches(flag: str, file: WeightFile, lines: list[str]) -> None:
    """Ends with an error if there are mismatches."""
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(f"{flag}: {file.path} holds another network ({'; '.join(lines[:_SHOWN])}{more}); "
                        f"{_remedy(architecture.infer_flags(file))}")


def _remedy(flags):
    if flags is None:
        return "it is none that these flags can describe: name another"
    return f"it was written with {format_flags(flags)}: give these flags, or name another"


def format_flags(flags: dict) -> str:
    """Settings as one would type them; `num_classes`, which the data set decides, is left out."""
    return " ".join(f"--{name}={value}" for name, value in flags.items() if name != "num_classes")


def _assign(variables, names, file, columns=None):
    """Assigns the tensors of a file; `columns`: those of its linear head for the model's classes, if they differ."""
    read = file.reader()
    arrays = {key: read(names[key]) for key in variables}  # All of them, before any is assigned.
    for key, array in arrays.items():
        if not np.isfinite(array).all():
            raise UserError(f"{file.path}: {names[key]} contains NaN or Inf. Use a checkpoint from before the training "
                            "diverged.")
    for key, variable in variables.items():
        array = tf.cast(arrays[key], variable.dtype)
        if columns is not None and key.startswith(PARTS["linear head"]):
            # Column -1, that of classes that the file lacks, is replaced by the values that the variable has.
            array = tf.where(tf.constant(columns) >= 0, tf.gather(array, tf.maximum(columns, 0), axis=-1), variable)
        variable.assign(array)


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """What `load_parts` did."""

    file: weight_files.WeightFile
    not_loaded: dict  # part of the model that did not fit -> why
    lines: list  # messages for the user


def load_parts(model: keras.Model, path: str, required: Iterable[str], flag: str = "--checkpoint",
               class_names: list[str] | None = None) -> LoadResult:
    """Loads those parts of `model` that what `path` names (see `weight_files.locate`) has.

    Args:
      model: a built `model_lib.Model`.
      path: what the flag says.
      required: names in `PARTS` that must fit.
      flag: for errors.
      class_names: names of the classes of the model's linear head. If the file records other names, its head is mapped
        by name, or left out if neither set of names contains the other. None: the columns are taken as they are.

    Returns:
      `LoadResult`.

    Raises:
      UserError: a required part does not fit; the first differences, and the flags that would do.
    """
    file = weight_files.open_weights(path, flag)
    variables = variables_by_key(model=model)
    names, chosen, not_loaded, columns = file.names_by_key(variables), {}, {}, None
    for part, prefixes in PARTS.items():
        here, there = filter_by_prefix(prefixes, variables), filter_by_prefix(prefixes, file.shapes)
        differences = []
        if part == "linear head" and here and class_names and file.class_names not in (None, class_names):
            columns = classes.match_columns(class_names, file.class_names)
            there = {name: (*shape[:-1], len(class_names)) for name, shape in there.items()}
            if columns is None:
                text = classes.differences(class_names, file.class_names, "the data set", "the checkpoint")
                differences = [f"other classes, {text}"]
        differences += find_mismatches(shapes_by_name(here, names), there)
        if not differences:
            chosen.update(here)
            continue
        if part in required and part == "linear head":
            raise UserError(f"{flag}: {file.path} has another linear head ({differences[0]}): evaluate without it, by "
                            "--eval_protocol=lbfgs or knn, or name a checkpoint and a data set of the same classes")
        if part in required:
            raise_on_mismatches(flag, file, differences)
        not_loaded[part] = differences[0] if here else "this run has none"
    _assign(chosen, names, file, columns)
    lines = [f"loaded {len(chosen)} of {len(variables)} variables from {file.path} ({file.format})",
             *(f"left out: {part} ({reason})" for part, reason in not_loaded.items())]
    if columns is not None:
        lines.append(f"linear head: {sum(column >= 0 for column in columns)} of {len(columns)} classes were taken from "
                     f"the checkpoint's {len(file.class_names)}, by name")
    if file.num_other_tensors:
        lines.append(f"left out: {file.num_other_tensors} tensors of the optimizer and counters; only resuming loads "
                     "them")
    return LoadResult(file, not_loaded, lines)


def load_model(model: keras.Model, path: str, flag: str = "--model_dir") -> WeightFile:
    """Loads all of `model`, strictly; see `load_parts`. Returns the `weight_files.WeightFile`."""
    return load_parts(model, path, PARTS, flag).file


def warm_start(model: keras.Model, path: str, required: Iterable[str] = ("encoder",),
               class_names: list[str] | None = None) -> LoadResult:
    """Loads what is `required` strictly, and the rest where it fits; see `load_parts`. Returns `LoadResult`."""
    loaded = load_parts(model, path, required, class_names=class_names)
    if "projection head" in loaded.not_loaded and model.num_proj_layers:
        loaded.lines.append("the projection head begins at random; --proj_head_mode=none leaves it out")
    return loaded
