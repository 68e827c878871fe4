"""Non-finite losses, gradients and weights, and collapsed encoders."""

import numpy as np
import pytest
import tensorflow as tf

import metrics
import objective
import train
from runtime.errors import TrainingDiverged
from support import processes, runs
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("stem_only_resnet")

SETTINGS = dict(train_steps=6, checkpoint_steps=3)


def make_gradients_infinite(patch, also_loss):
    """Patches training so that the gradients, and possibly the loss, are infinite at the fifth step."""
    update = train.TrainStep.update

    def patched(self, gradients, terms, *arguments):
        factor = tf.where(self.optimizer.iterations == 4, np.inf, 1.0)
        gradients = [gradient * factor for gradient in gradients]
        if also_loss:
            terms = {name: term * factor for name, term in terms.items()}
        return update(self, gradients, terms, *arguments)

    patch.setattr(train.TrainStep, "update", patched)


@pytest.fixture(scope="module")
def finite_run(stem_only_resnet, tmp_path_factory):
    """Returns the directory of a run in which all values are finite."""
    directory = tmp_path_factory.mktemp("finite")
    runs.run(directory, **SETTINGS)
    return directory


@pytest.mark.parametrize("also_loss", [True, False])
def test_diverged_training_stops_and_keeps_the_last_checkpoint(also_loss, finite_run, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        make_gradients_infinite(patch, also_loss)
        with rejects(
            r"--learning_rate=0.02: training diverged at step 5 .loss.*ckpt-3\. Use a lower"
            f" --learning_rate or more --warmup_epochs, and resume with --model_dir={tmp_path}"
        ):
            runs.run(tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run" / "ckpt-6.index").exists()
    runs.run(tmp_path / "run", **SETTINGS)
    np.testing.assert_equal(
        processes.tensors(tmp_path / "run", 6), processes.tensors(finite_run, 6)
    )


def test_non_finite_weights_are_not_saved(tmp_path):
    """Makes a weight infinite in the last step before a checkpoint, while the loss and gradients remain finite."""
    runs.run(tmp_path / "run", train_steps=3, checkpoint_steps=3)
    update = train.TrainStep.update

    def patched(self, *arguments):
        results, variable = update(self, *arguments), self.model.trainable_variables[0]
        variable.assign(tf.where(self.optimizer.iterations == 6, np.inf, variable))
        return results

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TrainingDiverged, match="at step 6 .*ckpt-3. Use a"),
    ):
        patch.setattr(train.TrainStep, "update", patched)
        runs.run(tmp_path / "run", train_steps=6, checkpoint_steps=3)
    assert not (tmp_path / "run" / "ckpt-6.index").exists()


def test_divergence_from_an_excessive_learning_rate_is_reported(tmp_path):
    with pytest.raises(
        TrainingDiverged, match="training diverged at step [1-9] .*no checkpoint was written"
    ):
        runs.run(
            tmp_path / "run",
            train_steps=9,
            learning_rate=1e30,
            warmup_epochs=0,
            optimizer="momentum",
        )
    assert not list((tmp_path / "run").glob("ckpt-*"))


@pytest.mark.parametrize(
    "rows, expected",
    [(np.ones([8, 4]), 0.0), (np.eye(4)[[0, 0, 1, 1, 2, 2, 3, 3]], 4 * np.sqrt(3 / 16) / 2)],
)
def test_embedding_std_matches_hand_computed_values(rows, expected):
    assert metrics.embedding_std(tf.constant(rows * 5)).numpy() == pytest.approx(expected, abs=1e-6)


def test_collapsed_encoder_is_reported(tmp_path, monkeypatch):
    assert "has collapsed" not in runs.run(tmp_path / "healthy", train_steps=2)
    loss = objective.add_contrastive_loss
    monkeypatch.setattr(
        objective,
        "add_contrastive_loss",
        lambda hidden, *_: (tf.reduce_mean(hidden**2), *loss(hidden)[1:]),
    )
    monkeypatch.setattr(metrics, "embedding_std", lambda *_: tf.constant(0.001))
    log = runs.run(tmp_path / "run", train_steps=2, checkpoint_steps=1)
    assert log.count("collapsed. At step 1, all images") == log.count("0.0010") == 1
