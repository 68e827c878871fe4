"""Saves and restores the training state: model, optimizer, step and whatever else a method trains."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf
import tf_keras as keras

from checkpoints import checkpoint_files, loading, weight_files
from checkpoints.weight_files import SLOT, SUFFIX
from runtime import console, workers
from runtime.errors import UserError, first_line

# Errors while restoring that the files do not cause: another worker was lost, or memory is exhausted.
_OTHER_CAUSES = (
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.ResourceExhaustedError,
)

# Keys of the optimizer and the counters, which `tf.train.Checkpoint` compares.
_OTHER_KEYS = ("optimizer/", "global_step/", "save_counter/")


@dataclasses.dataclass
class TrainingState:
    """Objects that a run saves and restores.

    Attributes:
      model: the model, which may contain any layers.
      optimizer: the optimizer, whose `iterations` variable is the step.
      directory: directory of the checkpoints.
      keep: number of checkpoints to keep.
      initial_weights: path and digest of the weights in `--checkpoint`, if any.
      trackables: further objects, such as a moving average of the encoder. Their names are the
        first parts of their checkpoint keys.
    """

    model: keras.Model
    optimizer: keras.optimizers.legacy.Optimizer
    directory: str
    keep: int
    initial_weights: dict | None = None
    trackables: dict[str, tf.Module] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            global_step=self.optimizer.iterations,
            **self.trackables,
        )

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.optimizer.iterations.numpy())

    def save(self) -> str:
        """Writes ckpt-<step>, and returns its prefix."""
        return checkpoint_files.save(self._checkpoint, self.directory, self.step)

    def prune(self) -> None:
        """Deletes all but the newest `keep` checkpoints. If this fails, logs a warning."""
        try:
            checkpoint_files.prune(self.directory, self.step, self.keep)
        except (tf.errors.OpError, OSError) as error:
            console.log(
                f"warning: old checkpoints in {self.directory} could not be deleted"
                f" ({first_line(error)})"
            )

    def restore_newest(self, directory: str, strategy: tf.distribute.Strategy) -> str | None:
        """Restores the newest checkpoint in `directory` that can be restored, on all workers.

        Incomplete and corrupt checkpoints are logged, and remain unchanged. A checkpoint is incomplete
        if the process was killed while it was written.

        Returns:
          The prefix of the restored checkpoint, or None if `directory` contains no complete
          checkpoints.

        Raises:
          UserError: a file is missing or unreadable, the checkpoint does not match the model, none
            of the checkpoints can be restored, or the workers restored different checkpoints.
        """
        missing, restored, problems = checkpoint_files.missing_files(directory), -1, []
        for step in sorted(missing, reverse=True):
            name = f"ckpt-{step}"
            problem = f"{name} is incomplete ({missing[step]} is missing)"
            try:
                if missing[step] != f"{name}.index":
                    self.resume(f"{directory}/{name}")
                    restored = step
                    break
            except _OTHER_CAUSES:
                raise
            except (weight_files.UnreadableWeights, *checkpoint_files.READ_ERRORS) as error:
                reason = first_line(error.__cause__ or error)
                if not checkpoint_files.is_readable(f"{directory}/{name}"):
                    raise UserError(
                        f"--model_dir={directory}: a file of {name} is missing, empty or unreadable"
                        f" ({reason}). Restore it, or move {name}.* to another directory to resume"
                        " from an earlier checkpoint."
                    ) from error
                problems.append(problem := f"{name} is corrupt ({reason})")
            console.log(f"warning: {problem} and is not used; its files in {directory} are kept")
        if problems and restored < 0:
            raise UserError(
                f"--model_dir={directory}: no checkpoint can be restored: {problems[0]}. Restore"
                " its files from a copy, or choose another directory to train from scratch."
            )
        steps = set(workers.gather_integers([restored], strategy).flat)
        if len(steps) > 1:
            raise UserError(
                f"--model_dir={directory}: the workers restored different checkpoints (steps:"
                f" {', '.join(map(str, sorted(steps))).replace('-1', 'none')}). Use a directory on"
                " storage that all workers share."
            )
        return None if restored < 0 else checkpoint_files.checkpoint_prefix(directory, restored)

    def resume(self, path: str) -> None:
        """Restores all objects from the checkpoint with prefix `path`.

        Loss-scaling state (float16) may be missing from either the checkpoint or the optimizer.

        Raises:
          UserError: the checkpoint does not match the objects, or (`UnreadableWeights`, or one of
            `READ_ERRORS`) cannot be read.
        """
        flag, name = f"--model_dir={os.path.dirname(path)}", os.path.basename(path)
        file = weight_files.open_weights(path, flag)
        variables = loading.variables_by_key(model=self.model, **self.trackables)
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        held = {
            key.removesuffix(SUFFIX): tuple(shape)
            for key, shape in shapes.items()
            if key.endswith(SUFFIX) and SLOT not in key and not key.startswith(_OTHER_KEYS)
        }
        loading.raise_on_mismatches(flag, file, loading.find_mismatches(variables, held))
        mismatch = UserError(
            f"{flag}: {name} was written with a different optimizer or different frozen blocks."
            " Pass the flags of the run that wrote it, or choose another directory."
        )
        key_of = {variable.ref(): key for key, variable in variables.items()}
        slot_keys = {
            f"{key_of[variable.ref()]}{SLOT}optimizer/{slot}{SUFFIX}"
            for variable in self.model.trainable_variables
            for slot in self.optimizer.get_slot_names()
        }
        if slot_keys != {key for key in shapes if SLOT in key}:
            raise mismatch
        status = self._checkpoint.restore(path)
        has_loss_scale = any(key.startswith("optimizer/loss_scale/") for key in shapes)
        if hasattr(self.optimizer, "loss_scale") != has_loss_scale:
            # Either the checkpoint or the optimizer lacks loss-scaling state.
            status.expect_partial()
            return
        try:
            status.assert_consumed()
        except AssertionError as error:
            raise mismatch from error
