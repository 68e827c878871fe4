"""history.csv, curves.png and TensorBoard events of a training run."""

from unittest import mock

import tensorflow as tf
from matplotlib import figure

from checkpoints import training_log
from config import Config
from support import runs

TRAINING = {"train/contrast_loss": 2.5, "train/contrast_acc": 0.25, "learning_rate": 0.125}


def write_log(directory, step, steps):
    log = training_log.TrainingLog(str(directory), step, Config())
    for new_step in steps:
        log.add(new_step, {**TRAINING, "train/contrast_loss": 10.0 - new_step})
    log.write(is_last=True)
    return log


def test_history_has_one_row_per_entry_and_evaluation_and_a_column_for_every_scalar(tmp_path):
    write_log(tmp_path, 0, [1, 2])
    for accuracy in (0.5, 0.75):  # The second evaluation replaces the first one.
        log = training_log.TrainingLog(str(tmp_path), 2, Config())
        log.add_results(2, {"global_step": 2, "eval/knn_top_1_accuracy": accuracy})
    assert (tmp_path / "history.csv").read_text().splitlines() == [
        "step,train/contrast_loss,train/contrast_acc,learning_rate,eval/knn_top_1_accuracy",
        "1,9.0,0.25,0.125,",
        "2,8.0,0.25,0.125,",
        "2,,,,0.75",
    ]


def test_a_resumed_run_continues_the_history_from_its_checkpoint_if_it_can_be_parsed(tmp_path):
    write_log(tmp_path, 0, [1, 2, 3])
    write_log(tmp_path, 2, [3, 4])
    assert [row["step"] for row in training_log.read_history(str(tmp_path))] == [1, 2, 3, 4]
    for content in (b"", b"\xff\xfe\n", b"step\n", b"step,a\n1\n2,x\n3,4,5\n"):
        (tmp_path / "history.csv").write_bytes(content)
        write_log(tmp_path, 5, [6])
        assert [row["step"] for row in training_log.read_history(str(tmp_path))] == [6]


def test_rows_contain_the_means_since_the_previous_row(tmp_path):
    log = training_log.TrainingLog(str(tmp_path), 0, Config(train_batch_size=8), 4, 16)
    log.update(1, {"new": 2.0}, 9.0, timed=False)
    log.update(3, {"new": 5.0}, 4.0, timed=True)
    log.write_row(is_saved=False, is_last=False)  # The previous row is less than 10 seconds old.
    log.write_row(is_saved=True, is_last=False)
    log.update(4, {"new": 1.0, "train/skipped_steps": 1.0}, 1.0, timed=True)
    log.write_row(is_saved=True, is_last=True)
    assert training_log.read_history(str(tmp_path)) == [
        {"step": 3, "new": 4.0, "epoch": 1.5, "images_per_second": 4.0},
        {"step": 4, "new": 1.0, "train/skipped_steps": 1.0, "epoch": 2.0, "images_per_second": 8.0},
    ]
    assert log.skipped_steps == 1 and log.images_per_second == 4.8


def test_tensorboard_events_contain_the_settings_and_the_scalars(tmp_path):
    log = training_log.TrainingLog(str(tmp_path), 0, Config(dataset="digits"))
    log.add(3, TRAINING)
    values = {value.tag: value.tensor for _, value in runs.read_events(tmp_path / "train")}
    assert TRAINING.keys() < values.keys()
    assert b'| dataset | "digits" |' in tf.make_ndarray(values["flags"]).item()
    assert tf.make_ndarray(values["learning_rate"]) == 0.125


def test_a_history_that_cannot_be_written_causes_a_warning(tmp_path, logged):
    log = write_log(tmp_path, 0, [1])
    (tmp_path / "history.csv").unlink()
    (tmp_path / "history.csv").mkdir()
    log.write(is_last=True)
    assert logged[0].startswith("warning: ") and "history.csv" in logged[0]


def test_curves_are_drawn_at_most_once_a_minute_and_at_the_end(tmp_path, monkeypatch):
    drawn, now = [], [100.0]
    monkeypatch.setattr(training_log.progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        training_log, "draw_curves", lambda rows, *_: drawn.append(len(rows)) or b""
    )
    log = training_log.TrainingLog(str(tmp_path), 0, Config())
    for step, seconds in enumerate((30, 31, 29, 31)):
        now[0] += seconds
        log.add(step, TRAINING)
        log.write(is_last=False)
    assert drawn == [2, 4]
    log.write(is_last=True)
    assert drawn == [2, 4, 4]


def draw_and_record(draw_curves, rows, chance_levels):
    """Draws curves. Returns a nested dict: title of the panel -> label of the line -> list of points."""
    save = figure.Figure.savefig
    with mock.patch.object(figure.Figure, "savefig", autospec=True, side_effect=save) as saves:
        tf.io.decode_png(draw_curves(rows, chance_levels, "classifier"))
    return {
        axes.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for axes in saves.call_args.args[0].axes
    }


def test_curves_show_each_metric_and_its_chance_levels_in_its_panel(draw_curves):
    rows = [
        {"step": step, "train/contrast_loss": 5.0 - step, "learning_rate": 0.1} for step in (0, 1)
    ]
    results = {"eval/knn_top_1_accuracy": 0.5, "eval/label_top_1_accuracy": 0.4}
    losses = {"eval/contrast_loss": 4.0, "eval/contrast_loss/chance_level": 6.0}
    rows.append({"step": 3, **results, **losses})
    assert draw_and_record(draw_curves, rows, {"train/contrast_loss": 7.0}) == {
        "contrastive loss": {
            "training": [[0, 5], [1, 4]],
            "chance level (training)": [[0, 7], [1, 7]],
            "evaluation": [[3, 4]],
            "chance level (evaluation)": [[0, 6], [1, 6]],
        },
        "accuracy of the classifier": {"classifier, top-1": [[3, 0.4]]},
        "accuracy of the nearest neighbors": {"10 nearest neighbors": [[3, 0.5]]},
        "learning rate": {"training": [[0, 0.1], [1, 0.1]]},
    }
    assert draw_and_record(draw_curves, [], {}) == {}
