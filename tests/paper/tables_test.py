"""Tests of `python -m paper.tables`: commands, resumed runs, runs shared by processes, and reports."""

import csv
import dataclasses
import json
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

import config as config_lib
import model as model_lib
from checkpoints import records
from checkpoints.lock import InUse, Lock
from checkpoints.records import Record
from config import Config
from paper import figures, runner, schedule, studies, tables
from paper.runner import Runner
from runtime import signals
from runtime.errors import JobFailed, Stopped, TrainingDiverged, UserError
from runtime.paths import slug
from support import ROOT, hostile
from transfer import cli, tasks


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("name", studies.STUDIES)
def test_commands_of_every_study_are_valid_and_distinct(name, scale, tmp_path):
    study = studies.STUDIES[name]
    assert study.small_names is None or set(study.small_names) <= {run.name for run in study.runs}
    executor, seen = Runner("out", scale, dict(data_dir="x")), set()
    for run in study.runs_at(scale):
        executor.check(name, run)
        (program, *arguments), *_ = executor.commands(run)
        assert f"out/{scale}/resnet" in arguments[-1]
        if program == "run.py":
            seen.add((run.starts_from, runner.config_of(arguments).replace(model_dir=None)))
        else:
            options = cli._parser().parse_args(arguments[1:])  # after -m transfer
            assert tasks.task_from_arguments(options) and options.data_dir == "x"
            seen.add((run.starts_from, *arguments[:-1]))
        assert run.starts_from is None or studies.find_run(run.starts_from).transfer is None
    # All runs of a study differ.
    assert len(seen) == len({executor.directory(run) for run in study.runs_at(scale)})
    assert len(seen) == len({slug(run.name) for run in study.runs_at(scale)})


# ------------------------------------------------------------------------------------------------------------- runs


def directory_of(base, *key, **extra):
    """Returns the directory of a run at the small scale, given its study, name and seed."""
    return pathlib.Path(Runner(str(base), "small", extra).directory(studies.find_run(key)))


@pytest.fixture
def calls(monkeypatch):
    """Records commands in the returned list and writes fake results instead of executing the commands."""
    commands = []

    def call(command, directory, _):
        commands.append(command)
        directory = pathlib.Path(directory)
        if "paper.probes" in command:
            results = {"rotation": dict(majority_baseline=0.25, h=0.7, z=0.3)}
            (directory / "probes.json").write_text(json.dumps(results))
            return
        (directory / "result.json").write_text(
            json.dumps({runner.LBFGS: 0.5 + 0.01 * len(commands), "global_step": 3})
        )

    monkeypatch.setattr(runner, "_call", call)
    monkeypatch.setattr(runner, "count_parameters", lambda directory: 11_200_000)
    return commands


def test_finished_runs_are_not_repeated(calls, tmp_path, capsys):
    tables.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert len(calls) == 2 and "--data_dir=a b" in calls[0] and "--norandom_flip" in calls[1]
    name = directory_of(tmp_path, "flip", "without").name
    assert re.search(f"2/2  flip, without: 0.5200 .*, {name}", capsys.readouterr().out)
    tables.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert len(calls) == 2
    # Simulates an interrupted run.
    (directory_of(tmp_path, "flip", "without") / "record.json").unlink()
    tables.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert calls[2] == calls[1]


def test_identical_runs_are_shared_between_studies(calls, tmp_path, capsys):
    tables.main(["run", "color", f"--dir={tmp_path}"])
    assert len(calls) == 6
    # The run with flips is identical to the third run of the color study.
    tables.main(["run", "flip", f"--dir={tmp_path}"])
    assert len(calls) == 7 and "--norandom_flip" in calls[6]
    printed = capsys.readouterr().out
    assert "color, 1/2: 0.5300" in printed and "flip, with: 0.5300" in printed
    assert directory_of(tmp_path, "flip", "with") == directory_of(tmp_path, "color", "1/2")
    # Runs with different seeds are not shared.
    tables.main(["run", "temperature", f"--dir={tmp_path}", "--flags=--seed=2"])
    assert len(calls) == 13


def test_every_run_is_executed_with_each_seed_and_starts_from_the_run_with_the_same_seed(
    calls, tmp_path, capsys
):
    tables.main(["run", "few_labels", f"--dir={tmp_path}"])
    assert len(calls) == 6  # Two networks are pretrained. Each is fine-tuned twice.
    tables.main(["run", "few_labels", f"--dir={tmp_path}", "--seeds=3"])
    assert len(calls) == 18
    for index, seed in ((6, 2), (12, 3)):
        assert all(f"--seed={seed}" in call for call in calls[index : index + 6])
    starts = {
        argument for call in calls[12:] for argument in call if argument.startswith("--checkpoint=")
    }
    assert starts == {
        f"--checkpoint={directory_of(tmp_path, 'linear', f'ResNet-50 ({width}x)', 3)}"
        for width in (1, 2)
    }
    printed = capsys.readouterr().out
    assert "12/12  few_labels, ResNet-50 (2x), 10 %, seed 3: 0." in printed


def test_transfer_starts_from_weights_pretrained_with_the_same_seed(calls, tmp_path):
    tables.main(["run", "transfer", f"--dir={tmp_path}", "--seeds=2"])
    start, *transfers = calls[4:]
    assert "--seed=2" in start and len(transfers) == 3
    for call in transfers:
        assert f"--checkpoint={directory_of(tmp_path, 'color', '1/2', 2)}" in call
        assert ("--seed=2" in call) == ("linear" not in call)  # Linear evaluation has no seed.


@pytest.mark.parametrize("only, seeds", [("flip/with", {1, 2}), ("flip/with_seed_2", {2})])
def test_only_flag_selects_all_seeds_or_one_seed_of_a_run(only, seeds, calls, tmp_path):
    tables.main(["run", "flip", f"--dir={tmp_path}", "--seeds=2", f"--only={only}"])
    assert {path.parent for path in tmp_path.rglob("record.json")} == {
        directory_of(tmp_path, "flip", "with", seed) for seed in seeds
    }


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("flip", "--temprature=1", "--flags: unknown command line flag 'temprature'"),
        ("flip", "x", "--flags: x is not a flag"),
        ("flip", "--seed='1", "--flags=--seed='1: invalid quoting (No closing quotation)"),
        (
            "flip",
            "--mode=train",
            "--flags: --mode is set by paper.tables. Remove --mode from --flags.",
        ),
        ("flip", "--temperature=-1", "--temperature=-1"),
        (
            "transfer",
            "--learning_rate 1",
            "--flags: --learning_rate is set by the grid search. Remove --learning_rate",
        ),
        (
            "transfer",
            "--nozero_init_logits_layer",
            "--flags: --zero_init_logits_layer is set by the grid search",
        ),
        ("transfer", "--micro_batch_size=7", "--micro_batch_size=7"),
    ],
)
def test_invalid_flags_are_reported_before_the_first_run(
    name, flags, words, calls, tmp_path, capsys
):
    with pytest.raises(SystemExit) as error:
        tables.main(["run", name, f"--dir={tmp_path / 'out'}", f"--flags={flags}"])
    message = capsys.readouterr().err
    assert error.value.code == 2 and words in message and message.count("\n") == 1
    assert not calls and not (tmp_path / "out").exists()


def test_transfer_receives_its_own_flags_and_forwards_the_others_to_training():
    run = studies.find_run(("transfer", "finetune, SimCLR, digits"))
    extra = config_lib.parse_settings(
        "--data_dir 'a b' --corrupt_images=skip --seed=3 --precision=float32"
    )
    (arguments,) = Runner("out", "small", extra).commands(run)
    assert arguments[:3] == ["-m", "transfer", "finetune"]
    assert {
        "--data_dir=a b",
        "--corrupt_images=skip",
        "--seed=3",
        "--flags=--precision=float32",
    } < set(arguments)
    linear = studies.find_run(("transfer", "linear, SimCLR, digits"))
    ((_, *arguments),) = Runner("out", "small", extra).commands(linear)
    assert {"--data_dir=a b", "--corrupt_images=skip"} < set(arguments)
    assert not [argument for argument in arguments if argument.startswith(("--seed", "--flags"))]


def test_probes_receive_the_data_flags_of_the_training_run():
    run = studies.find_run(("probes", "rotation"))
    extra = dict(data_dir="a b", corrupt_images="skip")
    _, command = Runner("out", "small", extra).commands(run)
    assert "--flags='--data_dir=a b' --corrupt_images=skip" in command
    # The probe is part of the run, so a run without it has another directory.
    names = [
        Runner("out", "small").directory_name(other)
        for other in (run, dataclasses.replace(run, probe=None))
    ]
    assert names[0] != names[1]


def test_flags_without_effect_on_results_may_change_and_others_have_other_directories(
    calls, tmp_path
):
    for flags in ("--data_dir=a", "--data_dir=b --checkpoint_epochs=1"):
        tables.main(["run", "flip", f"--dir={tmp_path}", f"--flags={flags}"])
    assert len(calls) == 2
    tables.main(["run", "flip", f"--dir={tmp_path}", "--flags=--train_epochs=3"])
    assert len(calls) == 4
    for flags, num_rows in (("", 2), ("--train_epochs=3", 2), ("--train_epochs=2", 0)):
        tables.main(["report", "flip", f"--dir={tmp_path}", f"--flags={flags}"])
        assert (f"{num_rows} runs" in (tmp_path / "small" / "report.md").read_text()) == bool(
            num_rows
        )


def test_flags_that_a_study_compares_cannot_be_overridden(calls, tmp_path, capsys):
    for table, flags, words in (
        ("5", "--temperature=0.3", "--temperature is set to 0.05 by the run 'l2 norm, 0.05' in"),
        ("7", "--norandom_flip --train_epochs=1", "--train_epochs is set to "),
    ):
        with pytest.raises(SystemExit) as error:
            tables.main(["run", table, f"--dir={tmp_path / 'out'}", f"--flags={flags}"])
        message = capsys.readouterr().err
        assert error.value.code == 2 and f"--flags: {words}" in message and message.count("\n") == 1
    assert not calls and not (tmp_path / "out").exists()


def test_diverged_runs_are_not_retried_and_dependent_runs_are_skipped(
    calls, tmp_path, capsys, monkeypatch
):
    call = runner._call

    def diverging(command, directory, descriptors):
        call(command, directory, descriptors)
        if "--width_multiplier=2" in command:
            raise JobFailed(f"{directory}: the run exited with status 3", TrainingDiverged.status)

    monkeypatch.setattr(runner, "_call", diverging)
    tables.main(["run", "few_labels", f"--dir={tmp_path}"])
    assert len(calls) == 4  # Both networks are pretrained, and the first is fine-tuned twice.
    printed = capsys.readouterr().out
    assert (
        "few_labels, ResNet-50 (2x), 1 %: diverged" in printed
        and "few_labels, ResNet-50 (1x), 1 %: 0.5" in printed
    )
    tables.main(["run", "linear", "few_labels", f"--dir={tmp_path}"])
    assert len(calls) == 4 and "linear, ResNet-50 (2x): diverged" in capsys.readouterr().out


@pytest.mark.parametrize("status", [-9, 1, 2])
def test_only_the_exit_status_marks_a_run_as_diverged(status, calls, tmp_path, monkeypatch, capsys):
    def failing(command, directory, _):
        raise JobFailed(f"{directory}: the run failed (training diverged at step 3)", status)

    monkeypatch.setattr(runner, "_call", failing)
    with pytest.raises(SystemExit) as error:
        tables.main(["run", "flip", f"--dir={tmp_path}"])
    assert error.value.code == 2 and not list(tmp_path.rglob("record.json"))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", hostile.HOSTILE.values())
def test_corrupt_results_cause_errors(content, calls, tmp_path, monkeypatch, capsys):
    for command in ("run", "report"):
        directory = directory_of(tmp_path, "flip", "with")
        directory.mkdir(parents=True, exist_ok=True)
        name = "result.json" if command == "run" else "record.json"
        (directory / name).write_bytes(content)
        monkeypatch.setattr(runner, "_call", lambda *_: None)
        if command == "report" and not content:
            continue  # An empty record counts as missing.
        with pytest.raises(SystemExit) as error:
            tables.main([command, "flip", f"--dir={tmp_path}"])
        message = capsys.readouterr().err
        assert error.value.code == 2 and name in message and message.count("\n") == 1
        assert command == "report" or not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize(
    "value", ["x*", "[a]", "?", "a\\b", "a\nb", "\x1b[31m", "", "s3://x/y", "\udcff"]
)
def test_unsupported_directory_names_are_rejected(value, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["run", "flip"], ["commands", "flip"], ["report"]):
        with pytest.raises(SystemExit) as error:
            tables.main([*command, f"--dir={value}"])
        message = capsys.readouterr().err
        assert error.value.code == 2 and "--dir=" in message and message.count("\n") == 1
    assert not calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["a b", "-x", "\u00e9\u4e2d", "\u00e9" * 127, "trailing/", "$(touch y);'"]
)
def test_unusual_directory_names_work(name, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        tables.main(["run", "flip", f"--dir=link/{name}"])
        tables.main(["report", "flip", f"--dir=link/{name}"])
    assert len(calls) == 2 and (tmp_path / "real" / name / "small" / "flip.csv").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"real", "link"}


def test_parameters_are_counted_in_the_newest_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no checkpoint found"):
        runner.count_parameters(str(tmp_path))
    model = model_lib.build_model(
        Config(resnet_depth=10, image_size=8, num_proj_layers=1, proj_out_dim=16), None
    )
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), str(tmp_path), max_to_keep=1
    )
    manager.save(checkpoint_number=3)
    expected = sum(math.prod(variable.shape) for variable in model.resnet_model.trainable_variables)
    assert runner.count_parameters(str(tmp_path)) == expected


def test_unusable_directories_are_reported(calls, capsys):
    for command in ("run", "report"):
        with pytest.raises(SystemExit) as error:
            tables.main([command, "flip", "--dir=/proc/none"])
        message = capsys.readouterr().err
        assert error.value.code == 2 and "--dir=/proc/none: the directory cannot be used" in message
        assert message.count("\n") == 1


def test_the_version_is_unknown_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    assert records.version() == ""


def test_pretraining_runs_are_executed_once_and_shared_between_tables(calls, tmp_path, capsys):
    tables.main(["run", "color", f"--dir={tmp_path}"])
    tables.main(["run", "few_labels", f"--dir={tmp_path}"])
    fine_tuned = [
        call for call in calls[6:] if any("study_small_labels" in argument for argument in call)
    ]
    pretrained = [call for call in calls[6:] if call not in fine_tuned]
    assert len(fine_tuned) == 4 and len(pretrained) == 1 and "--width_multiplier=2" in pretrained[0]
    starts = [
        next(argument for argument in call if argument.startswith("--checkpoint="))
        for call in fine_tuned
    ]
    assert set(starts) == {
        f"--checkpoint={directory_of(tmp_path, *key)}"
        for key in (("color", "1/2"), ("linear", "ResNet-50 (2x)"))
    }


def test_reports_for_one_scale_omit_runs_at_the_other_scale(calls, tmp_path, capsys):
    tables.main(["run", "flip", f"--dir={tmp_path}"])
    capsys.readouterr()
    tables.main(["report", "flip", "--scale=paper", f"--dir={tmp_path}"])
    assert "Not run." in capsys.readouterr().out


def test_recorded_seconds_include_all_attempts(calls, tmp_path, monkeypatch):
    clock = iter([10.0, 30.0])
    monkeypatch.setattr(records.progress, "stopwatch", lambda: lambda: next(clock))
    executor, run, call = (
        Runner(str(tmp_path), "small"),
        studies.find_run(("flip", "with")),
        runner._call,
    )

    def fail(*_):
        raise UserError("disk full")

    monkeypatch.setattr(runner, "_call", fail)
    with pytest.raises(UserError):
        executor.run("flip", run)
    monkeypatch.setattr(runner, "_call", call)
    assert executor.run("flip", run).seconds == 40.0


def test_probes_use_the_trained_network_and_its_data_set(calls, tmp_path):
    record = Runner(str(tmp_path), "small", dict(data_dir="x")).run(
        "probes", studies.find_run(("probes", "rotation"))
    )
    run, probes = calls
    assert "--augment_extra=rotate" in run and "--proj_out_dim=512" in run
    assert {
        "--probes=rotation",
        "--dataset=cifar10",
        "--train_split=train[:20%]",
        "--test_split=test",
        "--flags=--data_dir=x",
    } <= set(probes)
    assert record.results["probe/h"] == 0.7


def test_the_report_command_prints_a_table_and_writes_a_csv_file(calls, tmp_path, capsys):
    tables.main(["run", "color", f"--dir={tmp_path}"])
    capsys.readouterr()
    tables.main(["report", "color", "losses", f"--dir={tmp_path}"])
    printed = capsys.readouterr().out
    assert "### Strength of color distortion, contrastive (Table 1)" in printed
    assert "Columns with the same value in all rows are omitted: minutes = 0.0." in printed
    assert (
        "| run | paper, top-1 | logistic regression | change | change in the paper | same direction"
        " |\n| --- | --- | --- | --- | --- | --- |\n| 1/8 | 59.6 | 51.0 | -3.0 | -3.6 | yes |"
        in printed
    )
    command = f"python -m paper.tables run losses --scale=small --dir={tmp_path}"
    assert f" Not run. `{command}` executes the runs." in printed
    with open(tmp_path / "small" / "color.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and rows[0]["run"] == "1/8" and float(rows[0]["accuracy"]) == 0.51
    assert not (tmp_path / "small" / "losses.csv").exists()


@pytest.mark.parametrize(
    "study, figure",
    [
        ("pairs", "pairs"),
        ("batches", "batches"),
        ("networks", "parameters"),
        ("lengths", "batches"),
        ("cifar_batches", "batches --average=learning_rate"),
        ("cifar_temperature", "temperatures"),
        ("linear", "methods"),
    ],
)
def test_figures_can_be_drawn_from_report_csv_files(study, figure, calls, tmp_path, capsys):
    tables.main(["run", study, f"--dir={tmp_path}"])
    capsys.readouterr()
    tables.main(["report", study, f"--dir={tmp_path}"])
    row_with_changed_flags = (
        "| sqrt 2048, 400 epochs | train_batch_size 256, train_epochs 8 | 67.9 |"
    )
    assert (row_with_changed_flags in capsys.readouterr().out) == (study == "batches")
    name, *options = figure.split()
    figures.main([name, *options, f"--csv={tmp_path / 'small' / study}.csv", f"--out={tmp_path}"])
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


_STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("training", flush=True)
time.sleep(60)
"""


def test_sigterm_is_forwarded_and_the_caller_waits_for_the_run_to_stop(tmp_path):
    code = (
        f"import sys\nfrom paper import runner\nrunner._call(['-c', {_STOPS!r}], {str(tmp_path)!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        while "training" not in (
            (tmp_path / "run.log").read_text() if (tmp_path / "run.log").exists() else ""
        ):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert "Stopped: stopped in" in process.communicate(timeout=30)[1]
    assert (tmp_path / "run.log").read_text() == "training\nsaved\n"


def test_a_run_that_succeeds_after_sigterm_counts_as_stopped(tmp_path):
    code = (
        "import os, signal, sys\nfrom paper import runner\nchild = 'import signal, time;"
        " signal.signal(signal.SIGTERM, lambda *_: None); print(1, flush=True);"
        f" time.sleep(1)'\nrunner._call(['-c', child], {str(tmp_path)!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "run.log").exists() or not (tmp_path / "run.log").read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=30)
    assert "Stopped: stopped in" in errors and not printed


def test_unknown_tables_are_rejected_and_missing_accuracies_are_logged(
    calls, tmp_path, capsys, monkeypatch
):
    with pytest.raises(SystemExit):
        tables.main(["run", "flip", "flop", f"--dir={tmp_path}"])
    assert not calls and "table=flop: unknown table" in capsys.readouterr().err
    tables.main(["run", "flip", f"--dir={tmp_path}"])
    monkeypatch.setattr(runner, "LBFGS", "eval/other")  # Simulates a run with --eval_protocol=knn.
    tables.main(["run", "flip", f"--dir={tmp_path}"])
    assert "flip, with: no accuracy" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- several processes


_WORKER = """
import json, os, pathlib, sys, time
import tensorflow
from paper import runner, tables

directory, name, *arguments = sys.argv[1:]

def call(command, run_directory, _):
    start = next((argument.split("=")[1] for argument in command if argument.startswith("--checkpoint=")), None)
    start_is_finished = start is None or os.path.exists(start + "/record.json")
    settings = [argument for argument in command if not argument.startswith("--model_dir=")]
    with open(directory + "/executions", "a") as file:
        file.write(json.dumps([name, settings, start_is_finished]) + "\\n")
    time.sleep(0.2)
    pathlib.Path(run_directory, "result.json").write_text('{"eval/lbfgs_top_1_accuracy": 0.5}')

runner._call, runner.count_parameters, runner._POLL_SECONDS = call, lambda directory: 1, 0.1
pathlib.Path(directory, name).touch()
while not all(os.path.exists(f"{directory}/{other}") for other in ("one", "two")):
    time.sleep(0.02)
tables.main(["run", *arguments, f"--dir={directory}/tables"])
"""


def test_two_processes_execute_every_run_once(tmp_path):
    names = ["color", "flip", "few_labels"]
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path), name, *names],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    }
    for process in processes.values():
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert len([line for line in printed.splitlines() if ": 0.5000 (" in line]) == 12
    executions = [json.loads(line) for line in (tmp_path / "executions").read_text().splitlines()]
    assert {name for name, _, _ in executions} == set(processes)
    # `few_labels` starts from two runs of `linear`. One of these, one run of `color` and one of
    # `flip` are identical.
    assert len(executions) == len({tuple(settings) for _, settings, _ in executions}) == 12
    assert all(start_is_finished for _, _, start_is_finished in executions)
    assert all(
        (directory_of(tmp_path / "tables", name, run.name) / "record.json").exists()
        for name in names
        for run in studies.STUDIES[name].runs_at("small")
    )


def lock(base, *key):
    """Locks the directory of a run."""
    directory = directory_of(base, *key)
    directory.mkdir(parents=True)
    return Lock(str(directory), "--dir", "run.lock")


def test_a_run_is_executed_if_the_process_that_holds_its_lock_is_killed(
    calls, tmp_path, monkeypatch, capsys
):
    # The run with flips has the same settings as the locked run.
    directory = directory_of(tmp_path, "color", "1/2")
    directory.mkdir(parents=True)
    code = (
        "import sys, time\nfrom checkpoints.lock import Lock\nlock = Lock(*sys.argv[1:])\nprint(1,"
        " flush=True)\ntime.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(directory), "--dir", "run.lock"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert other.stdout.readline() == b"1\n"

    def kill(seconds):
        assert seconds == runner._POLL_SECONDS and len(calls) == 1
        other.kill()
        other.communicate()

    monkeypatch.setattr(runner.time, "sleep", kill)
    tables.main(["run", "flip", f"--dir={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert f"postponed flip, with: flip, with is in progress in process {other.pid} on " in lines[0]
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "1/2  flip, without: 0.5100",
        "waiting for other processes; postponed runs: 1",
        "2/2  flip, with: 0.5200",
    ]


def test_programs_of_a_killed_process_keep_the_lock_of_their_run(tmp_path):
    code = f"""
from checkpoints.lock import InUse, Lock
from paper import runner
with Lock({str(tmp_path)!r}, "--dir", "run.lock") as lock:
    runner._call(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"], {str(tmp_path)!r},
                 lock.descriptors)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        log = tmp_path / "run.log"
        while not log.exists() or not log.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    program = int(log.read_text())
    with pytest.raises(InUse, match="--dir=.*: the directory is in use by process"):
        Lock(str(tmp_path), "--dir", "run.lock")
    os.kill(program, signal.SIGKILL)
    with Lock(str(tmp_path), "--dir", "run.lock", wait=True) as lock:
        assert lock.descriptors


def test_runs_wait_for_the_run_that_they_start_from(calls, tmp_path, monkeypatch, capsys):
    key = ("linear", "ResNet-50 (2x)")
    with lock(tmp_path, *key) as held:
        directory = directory_of(tmp_path, *key)

        def finish_run(seconds):
            settings = Runner(str(tmp_path), "small").settings(studies.find_run(key))
            Record(settings, {runner.LBFGS: 0.5}, False, 1.0, "", "").write(str(directory))
            held.__exit__()

        monkeypatch.setattr(runner.time, "sleep", finish_run)
        tables.main(["run", "few_labels", f"--dir={tmp_path}"])
    printed = capsys.readouterr().out
    assert (
        "postponed few_labels, ResNet-50 (2x), 1 %: linear, ResNet-50 (2x) is in progress in"
        " process " in printed
    )
    assert len(calls) == 5 and not any(
        "study_small.cfg" in call[1] and "--width_multiplier=2" in call for call in calls
    )
    assert [f"--checkpoint={directory}" in call for call in calls] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_run_is_not_repeated_if_another_process_finishes_it_before_the_lock(
    calls, tmp_path, monkeypatch
):
    class LateLock(Lock):
        def __init__(self, *arguments):
            with monkeypatch.context() as patch:
                patch.setattr(runner, "Lock", Lock)
                Runner(str(tmp_path), "small").run("flip", studies.find_run(("flip", "with")))
            super().__init__(*arguments)

    monkeypatch.setattr(runner, "Lock", LateLock)
    tables.main(["run", "--only=flip/with", f"--dir={tmp_path}"])
    assert len(calls) == 1


def test_waiting_for_other_processes_can_be_stopped(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    runs = [("flip", run) for run in studies.STUDIES["flip"].runs_at("small")]
    with (
        lock(tmp_path, "flip", "with"),
        signals.StopSignals(),
        pytest.raises(
            Stopped, match="stopped by SIGTERM: finished work is kept; run the same command again"
        ),
    ):
        list(Runner(str(tmp_path), "small").run_all(runs))
    assert len(calls) == 1 and "--norandom_flip" in calls[0]


def test_printed_runner_commands_execute_all_runs_and_store_their_results(calls, tmp_path, capsys):
    tables.main(
        [
            "commands",
            "color",
            "flip",
            "few_labels",
            "--scale=small",
            "--runner",
            f"--dir={tmp_path}",
            "--flags=--data_dir='a b'",
            "--seeds=2",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    for count, (*program, arguments) in enumerate(
        ([*command[:3], command[3:]] for command in commands), 1
    ):
        assert program == ["python", "-m", "paper.tables"]
        tables.main(arguments)
        assert len(calls) == count  # Each line is the command for one run.
    assert len(commands) == 24 and all("--data_dir=a b" in call for call in calls)
    assert all(
        (directory_of(tmp_path, name, run.name, seed) / "record.json").exists()
        for name in ("color", "flip", "few_labels")
        for run in studies.STUDIES[name].runs_at("small")
        for seed in (1, 2)
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["run", "flip", "--only=color/1_2"],
            (
                "--only=color/1_2: the tables have no such run at the small scale. Use a "
                "name such as flip/with; `commands --runner` prints all names."
            ),
        ),
        (
            ["commands", "transfer", "--stage=3"],
            "--stage=3: the runs have 2 stages. Use a number from 1 to 2.",
        ),
        (
            ["run", "flip", "--seeds=2", "--flags=--seed=7"],
            (
                "--flags: --seed is set to 2 by the run 'with, seed 2' in the "
                "study flip. Remove --seed from --flags."
            ),
        ),
        (
            ["run", "flip", "--seeds=0"],
            "--seeds=0: the number of seeds is less than 1. Use a positive number.",
        ),
        (
            ["run", "flip", "--only=flip/with_seed_2"],
            "--only=flip/with_seed_2: the tables have no such run at the small",
        ),
        (
            ["commands", "flip", "--stage=0"],
            "--stage=0: the runs have 1 stage. Use a number from 1 to 1.",
        ),
        (["commands", "flip", "--flags=--temperature=-1"], "--temperature=-1"),
        (
            ["commands", "5", "--flags=--temperature=0.3"],
            "--flags: --temperature is set to 0.05 by the run",
        ),
    ],
)
def test_invalid_selections_of_runs_are_reported(arguments, message, calls, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        tables.main([*arguments, f"--dir={tmp_path / 'out'}"])
    printed = capsys.readouterr()
    assert (
        error.value.code == 2
        and message in printed.err
        and printed.err.count("\n") == 1
        and not printed.out
    )
    assert not calls and not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_runs_are_scheduled_once_and_after_the_runs_that_they_start_from(scale):
    names = [name for name, study in studies.STUDIES.items() if study.runs_at(scale)]
    executor = Runner("out", scale)
    for selection in (names, ["few_labels"], ["transfer"]):
        requested = schedule.runs_of(selection, scale)
        scheduled = schedule.schedule(requested, executor)
        assert [item.stage for item in scheduled] == sorted(item.stage for item in scheduled)
        scheduled_names = [name for item in scheduled for name in item.names]
        assert len(scheduled_names) == len(set(scheduled_names))
        assert {schedule.name_of(*pair) for pair in requested} <= set(scheduled_names)
        stage_of = {executor.directory(item.run): item.stage for item in scheduled}
        assert len(stage_of) == len(scheduled)
        for item in scheduled:
            start = item.run.starts_from
            assert item.stage == 1 + (
                stage_of[executor.directory(studies.find_run(start))] if start else 0
            )


def test_commands_are_grouped_by_stage(capsys):
    arguments = ["commands", "few_labels", "color", "flip", "--scale=small", "--dir=out"]
    tables.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    first, second = (index for index, line in enumerate(lines) if line.startswith("# stage"))
    assert lines[first] == "# stage 1 (8 runs): no dependencies"
    assert lines[second] == "# stage 2 (4 runs): start from the weights of stage 1"
    # The weights of `linear, ResNet-50 (1x)` come from an identical run of the color study.
    starts = [directory_of("out", *key) for key in (("color", "1/2"), ("linear", "ResNet-50 (2x)"))]
    starts *= 2
    for start, line in zip(starts, lines[second + 1 :], strict=True):
        assert f"--checkpoint={start}" in shlex.split(line)
        assert any(f"--model_dir={start}" in shlex.split(other) for other in lines[:second])
    assert "# identical to the run above: flip/with" in lines
    assert not any(line.endswith("flip/with") for line in lines if line.startswith("python"))
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
    for stage, expected in ((1, lines[:second]), (2, lines[second:])):
        tables.main([*arguments, f"--stage={stage}"])
        assert capsys.readouterr().out.splitlines() == [
            line for line in expected if not line.startswith("#")
        ]


@pytest.mark.slow
def test_a_run_is_executed_and_probed(tmp_path, monkeypatch):
    run = studies.Run(
        "one",
        dict(
            dataset="digits",
            image_size=8,
            train_split="train[:64]",
            train_steps=2,
            train_batch_size=16,
            proj_out_dim=16,
            eval_split="test[:64]",
        ),
        probe="rotation",
    )
    record = Runner(str(tmp_path), "small").run("flip", run)
    assert 0 <= runner.accuracy(record.results) <= 1 and record.seconds > 0
    assert record.results["probe/majority_baseline"] == 0.25
    # ResNet-10 without its classifier
    assert record.results["million_parameters"] == pytest.approx(4.9, abs=0.02)


def test_subcommands_list_studies_and_print_paper_results_and_commands():
    program = [sys.executable, "-m", "paper.tables"]
    listed = subprocess.run(
        [*program, "list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(name in listed for name in studies.STUDIES)
    shown = subprocess.run(
        [*program, "show", "losses"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "NT-Xent                 top-1 63.9" in shown
    printed = subprocess.run(
        [*program, "commands", "flip"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    comment, *lines = printed.splitlines()
    assert comment == "# stage 1 (2 runs): no dependencies" and len(lines) == 2
    without = studies.find_run(("flip", "without"))
    assert shlex.split(lines[1])[2:] == [
        "--flagfile=paper/recipes/imagenet_paper.cfg",
        "--norandom_flip",
        f"--model_dir={Runner('runs/tables', 'paper').directory(without)}",
    ]
    printed = subprocess.run(
        [*program, "commands", "probes"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.count("python run.py") == printed.count(" && python -m paper.probes") == 4
    assert "--dataset=imagenet2012" in printed and printed.count("/probes.json\n") == 4
    failed = subprocess.run(
        [*program, "run", "B.5"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "table=transfer_1x: no runs at the small scale. Use another scale" in failed.stderr
    failed = subprocess.run(
        [*program, "show", "flop"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (
        failed.returncode == 2
        and failed.stderr.count("\n") == 1
        and "table=flop: unknown table" in failed.stderr
    )
