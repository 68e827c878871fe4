"""Saves and restores the training state: model, optimizer and step."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from checkpoints import checkpoint_files, restoring, weight_files
from checkpoints.weight_files import SLOT, SUFFIX
from runtime.errors import UserError


def slot_keys_in_file(path: str) -> set[str]:
    """Returns the keys (without suffix) of a checkpoint's optimizer slots."""
    keys = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return {key[: -len(SUFFIX)] for key in keys if SLOT in key}


def _has_loss_scale(path):
    return any(key.startswith("optimizer/loss_scale/") for key, _ in tf.train.list_variables(path))


@dataclasses.dataclass
class TrainingState:
    """A run's model, optimizer and step, and its checkpoint directory."""

    model: object
    optimizer: object
    directory: str
    keep: int

    def __post_init__(self):
        self._checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, global_step=self.optimizer.iterations
        )

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.optimizer.iterations.numpy())

    def save(self) -> str:
        """Writes ckpt-<step>, deletes all but the newest `keep` checkpoints, and returns the new prefix."""
        return checkpoint_files.save(self._checkpoint, self.directory, self.step, self.keep)

    def resume(self, path: str) -> None:
        """Restores the model, optimizer and step from the checkpoint with prefix `path`.

        Loss-scaling state (float16) may be missing from either the checkpoint or the optimizer.

        Raises:
          UserError: the checkpoint does not match the model or the optimizer.
        """
        flag, name = f"--model_dir={os.path.dirname(path)}", os.path.basename(path)
        file, variables = (
            weight_files.open_weights(path, flag),
            restoring.variables_by_key(model=self.model),
        )
        shapes = restoring.shapes_by_name(variables, file.names_by_key(variables))
        restoring.raise_on_mismatches(flag, file, restoring.find_mismatches(shapes, file.shapes))
        mismatch = UserError(
            f"{flag}: {name} was written with a different optimizer or different frozen blocks."
            " Pass the flags of the run that wrote it, or choose another directory."
        )
        if self._slot_keys() != slot_keys_in_file(path):
            raise mismatch
        status = self._checkpoint.restore(path)
        if hasattr(self.optimizer, "loss_scale") != _has_loss_scale(path):
            # Either the checkpoint or the optimizer lacks loss-scaling state.
            status.expect_partial()
            return
        try:
            status.assert_consumed()
        except AssertionError as error:
            raise mismatch from error

    def _slot_keys(self):
        key_of = {
            variable.ref(): key
            for key, variable in restoring.variables_by_key(model=self.model).items()
        }
        return {
            f"{key_of[variable.ref()]}{SLOT}optimizer/{slot}"
            for variable in self.model.trainable_variables
            for slot in self.optimizer.get_slot_names()
        }
