"""Checkpoints: resume, and warm start from any other run; strict, and explained.

The keys are the original's: `tf.train.Checkpoint(model=, optimizer=, global_step=)`.
"""

from __future__ import annotations

import collections
import dataclasses
import os

import tensorflow as tf

from config import UserError

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT = "/.OPTIMIZER_SLOT/"
_SHOWN = 3  # mismatches that an error lists


def variables_by_key(**trackables):
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


def shapes_in_file(path):
    """Checkpoint key (without suffix) -> shape, for the model's variables in the checkpoint `path`."""
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return {key[:-len(_SUFFIX)]: tuple(shape) for key, shape in shapes.items()
            if key.startswith("model/") and key.endswith(_SUFFIX) and _SLOT not in key}


def slot_keys_in_file(path):
    """Checkpoint keys (without suffix) of the optimizer's slots in the checkpoint `path`."""
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return {key[:-len(_SUFFIX)] for key in keys if _SLOT in key}


def _has_loss_scale(path):
    return any(key.startswith("optimizer/loss_scale/") for key, _ in tf.train.list_variables(path))


def resolve(path):
    """The checkpoint prefix that `--checkpoint` means: a directory's latest, or the prefix itself."""
    if tf.io.gfile.isdir(path):
        prefix = tf.train.latest_checkpoint(path)
        if prefix is None:
            raise UserError(f"--checkpoint={path}: no checkpoint in this directory; name one such as DIR/ckpt-100")
        return prefix
    if not tf.io.gfile.exists(f"{path}.index"):
        raise UserError(f"--checkpoint={path}: no such checkpoint; name a directory or a prefix such as DIR/ckpt-100")
    return path


def step_of(path):
    """The step in a checkpoint's name, ckpt-<step>."""
    return int(path.rsplit("-", 1)[-1])


def mismatches(variables, shapes):
    """How a file differs from a model: lines of text, none if they agree."""
    lines = [f"{key} is missing there" for key in variables if key not in shapes]
    lines += [f"{key} is only there" for key in shapes if key not in variables]
    return lines + [f"{key} is {list(shapes[key])} there, {variable.shape.as_list()} here"
                    for key, variable in variables.items()
                    if key in shapes and shapes[key] != tuple(variable.shape)]


def _refuse(flag, path, lines):
    """Ends with an error if there are mismatches."""
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(f"{flag}: {path} holds another network ({'; '.join(lines[:_SHOWN])}{more}); give the flags of "
                        "the run that wrote it, or another directory")


def _assign(variables, path):
    reader = tf.train.load_checkpoint(path)
    for key, variable in variables.items():
        variable.assign(tf.cast(reader.get_tensor(key + _SUFFIX), variable.dtype))


def load_model(model, path, flag="--model_dir"):
    """Loads all of `model` from `path`, strictly. Raises `UserError` at the first differences."""
    variables = variables_by_key(model=model)
    _refuse(flag, path, mismatches(variables, shapes_in_file(path)))
    _assign(variables, path)


def warm_start(model, path):
    """Loads the encoder strictly, and the heads where they fit; the step and the optimizer stay as they are.

    Args:
      model: a built `model.Model`.
      path: what `--checkpoint` says.

    Returns:
      Lines that tell what was loaded and what was left out.
    """
    prefix = resolve(path)
    shapes = shapes_in_file(prefix)
    variables = variables_by_key(model=model)

    def below(part, entries):
        return {key: value for key, value in entries.items() if key.startswith(f"model/{part}/")}

    chosen, lines = below("resnet_model", variables), []
    _refuse("--checkpoint", prefix, mismatches(chosen, below("resnet_model", shapes)))
    for head, name in (("_projection_head", "projection head"), ("supervised_head", "linear head")):
        here, there = below(head, variables), below(head, shapes)
        differences = mismatches(here, there)
        if differences:
            lines.append(f"left out: {name} ({differences[0]})")
        else:
            chosen.update(here)
    _assign(chosen, prefix)
    return [f"loaded {len(chosen)} of {len(variables)} variables from {prefix}", *lines]


@dataclasses.dataclass
class TrainingState:
    """Model, optimizer and step of a training, and where its checkpoints lie."""

    model: object
    optimizer: object
    directory: str
    keep: int

    def __post_init__(self):
        # Now: slots made inside a traced loop over replicas fail, and a checkpoint without them would pass unnoticed.
        self.optimizer._create_all_weights(self.model.trainable_variables)
        self._checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, global_step=self.optimizer.iterations)
        self._manager = tf.train.CheckpointManager(self._checkpoint, self.directory, max_to_keep=self.keep)

    @property
    def step(self):
        """Steps taken so far."""
        return int(self.optimizer.iterations.numpy())

    def save(self):
        """Writes ckpt-<step>, drops the oldest, returns the prefix."""
        return self._manager.save(checkpoint_number=self.step)

    def resume(self, path):
        """Restores everything from `path`, or raises `UserError`. The state of loss scaling (float16) may be absent."""
        flag, name = f"--model_dir={os.path.dirname(path)}", os.path.basename(path)
        _refuse(flag, name, mismatches(variables_by_key(model=self.model), shapes_in_file(path)))
        other = UserError(f"{flag}: {name} was written with another optimizer or other frozen blocks; give its flags, "
                          "or another directory")
        if self._slot_keys() != slot_keys_in_file(path):
            raise other
        status = self._checkpoint.restore(path)
        if hasattr(self.optimizer, "loss_scale") != _has_loss_scale(path):
            status.expect_partial()  # One of them has state of loss scaling that the other cannot match.
            return
        try:
            status.assert_consumed()
        except AssertionError as error:
            raise other from error

    def _slot_keys(self):
        """Checkpoint keys (without suffix) of the optimizer's slots."""
        key_of = {variable.ref(): key for key, variable in variables_by_key(model=self.model).items()}
        return {f"{key_of[variable.ref()]}{_SLOT}optimizer/{slot}"
                for variable in self.model.trainable_variables for slot in self.optimizer.get_slot_names()}


def latest(model_dir):
    """The newest checkpoint of a run, or None."""
    return tf.train.latest_checkpoint(model_dir)
