"""Tests of distillation (SimCLR v2): the loss against loops, replicas, resuming, and the teacher's classes."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_hub as hub
from numpy.testing import assert_allclose, assert_equal

import checks
import model as model_lib
import objective
import train
from checkpoints import loading, run_directory, weight_files
from checkpoints.run_directory import Recorded
from config import parse_settings
from inference import prediction
from runtime import storage
from sources import digits
from support import replica_worker
from support.errors import rejects
from support.images import write_folder
from support.processes import tensors
from support.replica_worker import trainable_model
from support.runs import run, tiny_config

pytestmark = pytest.mark.usefixtures("one_block_resnet")
CLASSES = 4
# Only the logistic regression uses the fraction of the labels.
EVALUATED = dict(mode="train_then_eval", eval_protocol="linear_head,lbfgs", label_fraction=0.5)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def loops(teacher_logits, logits, labels, temperature, alpha):
    """Returns the loss and its gradient with respect to `logits`, computed one example at a time."""
    loss, gradient = 0.0, np.zeros_like(logits)
    for row, label in enumerate(labels):
        target = softmax(teacher_logits[row] / temperature)
        predicted = softmax(logits[row] / temperature)
        loss -= alpha * sum(target * np.log(predicted))
        gradient[row] = alpha * (predicted - target) / temperature
        if label >= 0:
            predicted = softmax(logits[row])
            loss -= (1 - alpha) * np.log(predicted[label])
            gradient[row] += (1 - alpha) * (predicted - np.eye(CLASSES)[label])
    return loss / len(logits), gradient / len(logits)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("labels", [[0, 2, 1, 3, 2], [-1, 2, -1, 3, -1], [-1] * 5])
def test_the_loss_and_its_gradient_match_loops_over_examples(temperature, alpha, labels):
    teacher_logits, logits = np.random.default_rng(0).normal(0, 2, (2, 5, CLASSES))
    student, teacher = tf.constant(logits), tf.constant(teacher_logits)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([student, teacher])
        soft, hard = objective.add_distillation_loss(
            teacher, student, tf.constant(labels), temperature, alpha
        )
        loss = soft + hard
    expected, gradient = loops(teacher_logits, logits, labels, temperature, alpha)
    assert_allclose(loss, expected, rtol=1e-12)
    assert_allclose(tape.gradient(loss, student), gradient, rtol=1e-9, atol=1e-12)
    assert tape.gradient(loss, teacher) is None
    assert float(hard) == 0 if alpha == 1 or max(labels) < 0 else float(hard) > 0


def make_config(**settings):
    flags = "--train_mode=distill --teacher=unused --distill_alpha=0.3 --weight_decay=1e-3"
    defaults = dict(parse_settings(flags), linear_head_learning_rate=None)
    return replica_worker.make_config({**defaults, **settings})


def scale_classifiers(factor, *models):
    for model in models:
        for variable in model.supervised_head.variables:
            variable.assign(factor * variable)


def take_steps(strategy, frozen=-1, **settings):
    """Takes three steps. Returns the scalars of the first step, and the student's weights afterwards.

    The weights of both classifiers are multiplied by the temperature, and those of the student are
    divided by it afterwards.
    """
    config, rows = make_config(**settings), 8 // strategy.num_replicas_in_sync
    with strategy.scope():
        model, teacher = trainable_model(config), trainable_model(config, seed=4)
        scale_classifiers(config.distill_temperature, model, teacher)
        model.freeze(frozen)
        optimizer = model_lib.build_optimizer(config, model_lib.build_schedule(config, 64), model)
    before = teacher.get_weights()
    examples = tf.data.Dataset.from_tensor_slices(((IMAGES,), LABELS))
    batches = examples.repeat().batch(rows, drop_remainder=True)
    batches = iter(strategy.distribute_datasets_from_function(lambda _: batches))
    run_steps = train.make_run_steps(train.TrainStep(model, optimizer, config, strategy, teacher))
    scalars = run_steps(batches, tf.constant(1))[0]
    run_steps(batches, tf.constant(2))
    assert_equal(teacher.get_weights(), before)
    scale_classifiers(1 / config.distill_temperature, model)
    return scalars, model.get_weights()


def assert_same_steps(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for array, expected in zip(one[1], other[1], strict=True):
        assert_allclose(array, expected, rtol=1e-9, atol=1e-12)


IMAGES = np.random.default_rng(0).uniform(0, 1, (8, 8, 8, 3))
LABELS = np.array([0, -1, 2, 3, -1, -1, 1, 2])
ONE = tf.distribute.get_strategy()


def test_replicas_and_micro_batches_do_not_change_the_step(float64, two_replicas):
    scalars, weights = take_steps(ONE)
    config = make_config()
    targets = trainable_model(config, seed=4)(IMAGES, training=False)["logits_sup"].numpy()
    outputs = trainable_model(config)(IMAGES, training=True)["logits_sup"].numpy()
    expected, _ = loops(targets, outputs, LABELS, 1.0, 0.3)
    total = scalars["train/distill_loss"] + scalars["train/supervised_loss"]
    assert total == pytest.approx(expected, rel=1e-6)
    agreement = np.mean(targets.argmax(1) == outputs.argmax(1))
    assert scalars["train/teacher_agreement"] == pytest.approx(agreement)
    assert_same_steps(take_steps(two_replicas), (scalars, weights))
    # With frozen layers, micro-batches do not change the batch statistics.
    assert_same_steps(take_steps(ONE, micro_batch_size=4, frozen=4), take_steps(ONE, frozen=4))


@pytest.mark.parametrize("optimizer", ["lars", "momentum"])
def test_the_temperature_does_not_change_the_updates_of_scaled_logits(float64, optimizer):
    settings = dict(distill_alpha=1.0, weight_decay=0.0, optimizer=optimizer)
    scaled = take_steps(ONE, distill_temperature=0.1, **settings)
    assert_same_steps(scaled, take_steps(ONE, **settings))


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the directory of a supervised run on digits."""
    directory = tmp_path_factory.mktemp("teacher")
    run(directory, train_mode="supervised", train_steps=2)
    return directory


def distill(directory, teacher, **settings):
    settings = dict(dict(train_steps=3, checkpoint_steps=1, image_size=16), **settings)
    return run(directory, train_mode="distill", teacher=str(teacher), **settings)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """Returns the directory and the log of a student with an evaluation and an export."""
    directory = tmp_path_factory.mktemp("student") / "run"
    return directory, distill(directory, teacher, with_export=True, **EVALUATED)


def test_a_student_has_the_checkpoint_keys_of_supervised_training_and_resumes_exactly(
    student, teacher, tmp_path
):
    directory, log = student
    assert f"settings of {teacher}: --image_size=8" in log and "classifier, top-1" in log
    files = [weight_files.open_weights(str(path)) for path in (directory, teacher)]
    assert files[0].shapes == files[1].shapes
    stopped = shutil.copytree(directory, tmp_path / "stopped")
    for file in stopped.glob("ckpt-[23].*"):
        file.unlink()
    assert "resumed at step 1" in distill(stopped, teacher, **EVALUATED)
    assert_equal(tensors(stopped, 3), tensors(directory, 3))


def test_an_exported_student_has_the_classes_of_its_teacher_and_works_in_keras(student, tmp_path):
    """PyTorch is tested in export/torch_weights_test.py, for which the student is a network like any other."""
    directory, _ = student
    saved_model = str(directory / "saved_model" / "3")
    images = tf.cast(IMAGES, tf.float32)
    model, info = loading.open_network(saved_model)
    expected = model(images, training=False)["logits_sup"]
    layer = hub.KerasLayer(saved_model, output_key="logits_sup")
    assert_allclose(layer(images), expected, rtol=1e-5, atol=1e-6)
    assert info.class_names == digits.digits_source().class_names
    write_folder(tmp_path / "new", 1)
    predicted, _ = prediction.predict(str(directory), [str(tmp_path / "new")], top_k=10)
    ((_, classes),) = predicted.items()
    assert {name for name, _ in classes} == set(info.class_names)


def test_only_unfinished_students_need_their_teacher_and_another_one_is_rejected(teacher, tmp_path):
    path, directory = shutil.copytree(teacher, tmp_path / "teacher"), tmp_path / "run"
    distill(directory, path, train_steps=1)
    file = weight_files.open_weights(str(path)).path
    shutil.rmtree(path)
    assert "the run is finished" in distill(directory, path, train_steps=1)
    shutil.copytree(teacher, path)
    tf.train.Checkpoint(model=model_lib.build_model(make_config(), 10)).write(file)
    with rejects(f"--teacher={path}: the weights that the run in {directory} uses"):
        distill(directory, path)
    # If there are no checkpoints, another teacher may be used.
    recorded = run_directory.read_run(str(directory))
    for settings in (dict(teacher=str(teacher)), dict(allow_flag_changes=True)):
        config = tiny_config(**dict(dict(train_mode="distill", teacher=str(path)), **settings))
        assert train._weights_path(config, recorded) == config.teacher


def test_a_student_has_the_classes_of_its_teacher(teacher, tmp_path):
    log = distill(
        tmp_path / "run",
        teacher,
        given=("dataset", "train_split"),
        dataset=write_folder(tmp_path / "images", 4, *"abc"),
        train_split="train",
        train_batch_size=4,
    )
    assert "labels: not used" in log and "has no images of" not in log
    student = weight_files.open_weights(str(tmp_path / "run"))
    assert student.class_names == digits.digits_source().class_names


def test_teachers_that_cannot_be_used_are_rejected(teacher, tmp_path):
    source, classes = digits.digits_source(), tmp_path / "classes"
    names = source.class_names
    config = tiny_config(train_mode="distill", teacher=str(teacher), distill_alpha=0.5)
    assert checks.adopt_classes(config, source, Recorded()) == []
    source.class_names = names[:9]
    shutil.copytree(teacher, classes)
    storage.write_json(f"{classes}/classes.json", dict(names=names, multi_label=True))
    with rejects(f"--teacher={classes}: the network was trained with several labels"):
        checks.adopt_classes(config.replace(teacher=str(classes)), source, Recorded())
    (classes / "classes.json").unlink()
    # Without recorded names, the number of classes decides.
    config = config.replace(teacher=str(classes), distill_alpha=1.0)
    assert (
        "class 0" in checks.adopt_classes(config, source, Recorded())[0]
        and source.num_classes == 10
    )
    assert checks.adopt_classes(config, digits.digits_source(), Recorded()) == []
    source.drop_labels()
    assert checks.adopt_classes(config, source, Recorded()) == [] and source.num_classes == 10
