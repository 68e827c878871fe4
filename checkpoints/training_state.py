"""Saving and resuming of a training: model, optimizer, step."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from checkpoints import checkpoint_files, restoring, weight_files
from checkpoints.weight_files import SLOT, SUFFIX
from runtime.errors import UserError


def slot_keys_in_file(path: str) -> set[str]:
    """Checkpoint keys (without suffix) of the optimizer's slots in the checkpoint `path`."""
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return {key[:-len(SUFFIX)] for key in keys if SLOT in key}


def _has_loss_scale(path):
    return any(key.startswith("optimizer/loss_scale/") for key, _ in tf.train.list_variables(path))


@dataclasses.dataclass
class TrainingState:
    """Model, optimizer and step of a training, and where its checkpoints lie."""

    model: object
    optimizer: object
    directory: str
    keep: int

    def __post_init__(self):
        self._checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, global_step=self.optimizer.iterations)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return int(self.optimizer.iterations.numpy())

    def save(self) -> str:
        """Writes ckpt-<step>, deletes all but the newest `keep` checkpoints, and returns the prefix."""
        return checkpoint_files.save(self._checkpoint, self.directory, self.step, self.keep)

    def resume(self, path: str) -> None:
        """Restores everything from `path`, or raises `UserError`. The state of loss scaling (float16) may be absent."""
        flag, name = f"--model_dir={os.path.dirname(path)}", os.path.basename(path)
        file, variables = weight_files.open_weights(path, flag), restoring.variables_by_key(model=self.model)
        shapes = restoring.shapes_by_name(variables, file.names_by_key(variables))
        restoring.raise_on_mismatches(flag, file, restoring.find_mismatches(shapes, file.shapes))
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
        key_of = {variable.ref(): key for key, variable in restoring.variables_by_key(model=self.model).items()}
        return {f"{key_of[variable.ref()]}{SLOT}optimizer/{slot}"
                for variable in self.model.trainable_variables for slot in self.optimizer.get_slot_names()}
