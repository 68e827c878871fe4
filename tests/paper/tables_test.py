"""Tests of `python -m paper.tables`: commands, resumed runs, runs shared by processes, and reports."""

import collections
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import types
import xml.etree.ElementTree

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import tensorflow as tf

import config as config_lib
import resnet
from checkpoints import records
from checkpoints.lock import InUse, Lock
from checkpoints.records import Record
from paper import figures, runner, schedule, studies, tables
from paper.runner import Runner
from runtime import signals, version
from runtime.errors import JobFailed, Stopped, TrainingDiverged
from runtime.paths import slug
from support import ROOT, no_space, processes
from support.errors import rejects
from transfer import cli, tasks


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("name", studies.STUDIES)
def test_commands_of_every_study_are_valid_and_distinct(name, scale):
    study = studies.STUDIES[name]
    executor, runs = Runner("out", scale, {"data_dir": "x"}), study.runs_at(scale)
    seen, directories = set(), set()
    for run in runs:
        executor.check(name, run)
        directory = executor.directory(run)
        assert f"out/{scale}/resnet" in directory
        directories.add(directory)
        if run.best_of:  # The command depends on the results of other runs.
            seen.add((run.starts_from, run.best_of))
            continue
        (program, *arguments, output), *_ = executor.commands(run)
        assert output.endswith(f"={directory}")
        if program == "run.py":
            seen.add((run.starts_from, runner.config_of(arguments)))
        else:
            options = cli._parser().parse_args([*arguments[1:], output])  # after -m transfer
            assert tasks.task_from_arguments(options) and options.data_dir == "x"
            seen.add((run.starts_from, *arguments))
        assert run.starts_from is None or studies.find_run(run.starts_from).transfer is None
    # All runs of a study differ.
    names = {run.name for run in runs}
    assert len(seen) == len(directories) == len(set(map(slug, names))) == len(runs)
    baselines = {study.baseline_of(run) for run in names} - {""}
    assert baselines <= names
    assert baselines or len(names) < 2 or name in ("probes", "few_labels_broader")


# ------------------------------------------------------------------------------------------------------------- runs


def runner_in(base, **extra):
    return Runner(str(base), "small", extra)


def directory_of(base, *key):
    """Returns the directory of a run at the small scale, given its study, name and seed."""
    return pathlib.Path(runner_in(base).directory(studies.find_run(key)))


@pytest.fixture
def calls(monkeypatch):
    """Records commands in the returned list and writes fake results instead of executing the commands."""
    commands = []

    def call(command, directory, _):
        commands.append(command)
        name = "result_3.json" if command[0] == "run.py" else "result.json"
        results = {runner.LBFGS: 0.5 + 0.01 * len(commands), "global_step": 3}
        if "paper.probes" in command:
            accuracies = {"majority_baseline": 0.25, "h": 0.7, "z": 0.3}
            name, results = "probes.json", {"rotation": accuracies}
        pathlib.Path(directory, name).write_text(json.dumps(results))

    monkeypatch.setattr(runner, "_call", call)
    monkeypatch.setattr(runner, "count_parameters", lambda directory: 11_200_000)
    monkeypatch.setattr(version, "revision", str)  # `git` would be started for each run.
    return commands


def test_finished_runs_are_repeated_only_with_flags_that_affect_their_results(
    calls, tmp_path, program
):
    printed = program("run", "flip", "--flags=--data_dir='a b'")
    assert len(calls) == 2 and "--data_dir=a b" in calls[0] and "--norandom_flip" in calls[1]
    directory = directory_of(tmp_path, "flip", "without")
    assert re.search(f"2/2  flip, without: 0.5200 .*, {directory.name}", printed)
    program("run", "flip", "--flags=--data_dir=b --checkpoint_epochs=1")
    assert len(calls) == 2
    (directory / "record.json").unlink()  # Simulates an interrupted run.
    program("run", "flip", "--flags=--data_dir='a b'")
    assert calls[2:] == calls[1:2]
    program("run", "flip", "--flags=--train_epochs=3")
    assert len(calls) == 5
    for flags, text in (("", "2 runs"), ("--train_epochs=3", "2 runs"), ("--seed=2", "Not run")):
        assert text in program("report", "flip", f"--flags={flags}")


def test_every_run_is_executed_with_each_seed_and_starts_from_the_run_with_the_same_seed(
    calls, tmp_path, program
):
    program("run", "few_labels")
    # Two networks are pretrained. Each is fine-tuned twice, and one is trained from scratch twice.
    assert len(calls) == 8
    printed = program("run", "few_labels", "--seeds=3")
    assert "18/18  few_labels, from scratch, ResNet-50 (1x), 10 %, seed 3: 0." in printed
    assert len(calls) == 24
    for index, seed in ((8, 2), (16, 3)):
        assert all(f"--seed={seed}" in call for call in calls[index : index + 8])
    starts = {word for call in calls[16:] for word in call if word.startswith("--checkpoint=")}
    networks = "ResNet-50 (1x)", "ResNet-50 (2x)"
    assert starts == {
        f"--checkpoint={directory_of(tmp_path, 'linear', name, 3)}" for name in networks
    }


def test_transfer_starts_from_weights_pretrained_with_the_same_seed(calls, tmp_path, program):
    program("run", "transfer", "--seeds=2")
    start, *transfers = calls[4:]
    assert "--seed=2" in start and len(transfers) == 3
    for call in transfers:
        assert f"--checkpoint={directory_of(tmp_path, 'color', '1/2', 2)}" in call
        assert ("--seed=2" in call) == ("linear" not in call)  # Linear evaluation has no seed.


def test_only_flag_selects_all_seeds_or_one_seed_of_a_run(calls, tmp_path, program):
    for only, seeds in (("flip/with_seed_2", [2]), ("flip/with", [1, 2])):
        program("run", "flip", "--seeds=2", f"--only={only}")
        expected = {directory_of(tmp_path, "flip", "with", seed) for seed in seeds}
        assert {path.parent for path in tmp_path.rglob("record.json")} == expected


# arguments => words of the message
INVALID = """
run => table: no table is selected. Use names from `list`, or all.
run flip flop => table=flop: unknown table
run flip --only=color/1_2 => --only=color/1_2: the tables have no such run at the small
run flip --only=flip/with_seed_2 => --only=flip/with_seed_2: the tables have no such
run flip --seeds=0 => --seeds: must be an integer of at least 1
run B.5 => table=transfer_1x: no runs at the small scale
commands transfer --stage=3 => --stage=3: the last stage is 2. Use a number
commands flip --flags=--temperature=-1 => --temperature=-1
commands 5 --flags=--temperature=0.3 => --flags: --temperature is set by paper.tables for the run
run flip --flags=--temprature=1 => --flags: unknown command line flag 'temprature'
run flip --flags=x => --flags: x is not a flag
run flip --flags="--seed='1" => --flags=--seed='1: invalid quoting
run flip --flags=--mode=train => --flags: --mode is set by paper.tables for the run
run transfer "--flags=--learning_rate 1" => --flags: --learning_rate is set by the grid search. Remove
run transfer --flags=--micro_batch_size=7 => --micro_batch_size=7
"""


def test_invalid_commands_are_reported_before_the_first_run(calls, tmp_path, fails):
    for line in INVALID.strip().splitlines():
        arguments, words = line.split(" => ")
        fails(words, tables.main, [*shlex.split(arguments), f"--dir={tmp_path / 'out'}"])
    assert not calls and not list(tmp_path.iterdir())


def test_transfer_receives_its_own_flags_and_forwards_the_others_to_training():
    run = studies.find_run(("transfer", "finetune, SimCLR, digits"))
    flags = ["--data_dir=a b", "--corrupt_images=skip", "--seed=3", "--precision=float32"]
    executor = Runner("out", "small", config_lib.parse_settings(shlex.join(flags)))
    (arguments,) = executor.commands(run)
    assert arguments[:3] == ["-m", "transfer", "finetune"]
    assert {*flags[:3], "--flags=--precision=float32"} < {*arguments}
    linear = studies.find_run(("transfer", "linear, SimCLR, digits"))
    ((_, *arguments),) = executor.commands(linear)
    assert {*flags[:2]} < {*arguments}
    assert not [argument for argument in arguments if argument.startswith(("--seed", "--flags"))]


def test_diverged_runs_are_not_retried_and_dependent_runs_are_skipped(calls, program, monkeypatch):
    call = runner._call

    def diverging(command, directory, descriptors):
        call(command, directory, descriptors)
        if "--width_multiplier=2" in command:
            raise JobFailed(f"{directory}: the run exited with status 3", TrainingDiverged.status)

    monkeypatch.setattr(runner, "_call", diverging)
    printed = program("run", "few_labels")
    # Both networks are pretrained, and the first is fine-tuned twice and trained from scratch twice.
    assert len(calls) == 6
    assert "few_labels, ResNet-50 (2x), 1 %: diverged" in printed
    assert "few_labels, ResNet-50 (1x), 1 %: 0.5" in printed
    assert "linear, ResNet-50 (2x): diverged" in program("run", "linear", "few_labels")
    assert len(calls) == 6


@pytest.mark.parametrize("status", [-9, 2])
def test_only_the_exit_status_marks_a_run_as_diverged(status, calls, tmp_path, monkeypatch, fails):
    def failing(*_):
        raise JobFailed("the run failed (training diverged at step 3)", status)

    monkeypatch.setattr(runner, "_call", failing)
    fails("the run failed", tables.main, ["run", "flip", f"--dir={tmp_path}"])
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize("name, content", [("result_3.json", b"[]"), ("record.json", b'{"a": ')])
def test_corrupt_results_cause_errors(name, content, calls, tmp_path, monkeypatch, fails):
    monkeypatch.setattr(runner, "_call", lambda *_: None)
    directory = directory_of(tmp_path, "flip", "with")
    directory.mkdir(parents=True)
    (directory / name).write_bytes(content)
    fails(name, tables.main, ["run", "flip", f"--dir={tmp_path}"])
    assert name == "record.json" or not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize("command", ["run", "report"])
def test_unusable_directories_are_reported(command, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    for value in ("x*", "a\nb", "", "s3://x/y", "/proc/none"):
        words = value if value.startswith("/") else "--dir="
        fails(f"paper.tables: error: {words}", tables.main, [command, "flip", f"--dir={value}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["-x", "\u00e9" * 127, "trailing/", "$(touch y);'"])
def test_unusual_directory_names_work(name, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        tables.main(["run", "flip", f"--dir=link/{name}"])
        tables.main(["report", "flip", f"--dir=link/{name}"])
    assert len(calls) == 2 and (tmp_path / "real" / name / "small/flip.csv").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"real", "link"}


def test_parameters_are_counted_in_the_newest_checkpoint(tmp_path, write_network):
    with rejects("neither a checkpoint"):
        runner.count_parameters(str(tmp_path))
    _, network = write_network(tmp_path)
    expected = sum(map(tf.size, network.resnet_model.trainable_variables))
    assert runner.count_parameters(str(tmp_path)) == expected


def test_the_version_is_unknown_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    assert version.revision() == ""


def test_recorded_seconds_include_all_attempts(calls, tmp_path, monkeypatch):
    clock = iter([10.0, 30.0])
    monkeypatch.setattr(records.progress, "stopwatch", lambda: lambda: next(clock))
    executor, run = runner_in(tmp_path), studies.find_run(("flip", "with"))
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(runner, "_call", no_space)
        executor.run("flip", run)
    assert executor.run("flip", run).seconds == 40.0


def test_probes_use_the_trained_network_and_its_data_set(calls, tmp_path):
    run = studies.find_run(("probes", "rotation"))
    executor = runner_in(tmp_path, data_dir="a b", corrupt_images="skip")
    record = executor.run("probes", run)
    training, probes = calls
    assert {"--augment_extra=rotate", "--proj_out_dim=512"} <= {*training}
    assert {
        "--probes=rotation",
        "--dataset=cifar10",
        "--train_split=train[:20%]",
        "--test_split=test",
        "--flags='--data_dir=a b' --corrupt_images=skip",
    } <= {*probes}
    assert record.results["probe/h"] == 0.7
    # The probe is part of the run, so a run without it has another directory.
    assert executor.directory(run) != executor.directory(dataclasses.replace(run, probe=None))


def test_the_report_command_prints_a_table_and_writes_a_csv_file(calls, tmp_path, program):
    program("run", "color")
    printed = program("report", "color", "losses")
    assert "| 1/8 | 59.6 | 51.0 | -3.0 | -3.6 | yes |" in printed
    command = f"python -m paper.tables run losses --scale=small --dir={tmp_path}"
    assert f" Not run. `{command}` executes the runs." in printed
    rows = pd.read_csv(tmp_path / "small/color.csv")
    assert len(rows) == 6 and [*rows.loc[0, ["run", "accuracy"]]] == ["1/8", 0.51]
    assert not (tmp_path / "small/losses.csv").exists()
    assert "Not run." in program("report", "color", "--scale=paper")


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
def test_figures_can_be_drawn_from_report_csv_files(
    study, figure, calls, tmp_path, program, monkeypatch, savefig
):
    monkeypatch.setattr(plt.Figure, "savefig", savefig)
    program("run", study)
    program("report", study)
    name, *options = figure.split()
    figures.main([name, *options, f"--csv={tmp_path / 'small' / study}.csv", f"--out={tmp_path}"])
    assert min(tf.io.decode_png((tmp_path / f"{name}.png").read_bytes()).shape[:2]) > 100
    xml.etree.ElementTree.parse(tmp_path / f"{name}.svg")


def test_missing_accuracies_are_logged(calls, program, monkeypatch):
    program("run", "flip")
    monkeypatch.setattr(runner, "LBFGS", "eval/other")  # Simulates a run with --eval_protocol=knn.
    assert "flip, with: no accuracy" in program("run", "flip")


# ------------------------------------------------------------------------------------------------- several processes


_WORKERS = """
import functools, json, os, pathlib, sys, time
import tensorflow
from paper import runner, tables

directory, *arguments = sys.argv[1:]
child = os.fork()
name = "two" if child else "one"

def call(command, run_directory, _):
    start = next((argument.split("=")[1] for argument in command if argument.startswith("--checkpoint=")), None)
    start_is_finished = start is None or os.path.exists(start + "/record.json")
    settings = [argument for argument in command if not argument.startswith("--model_dir=")]
    with open(directory + "/executions", "a") as file:
        file.write(json.dumps([name, settings, start_is_finished]) + "\\n")
    time.sleep(0.2)
    pathlib.Path(run_directory, "result_1.json").write_text('{"eval/lbfgs_top_1_accuracy": 0.5}')

runner._call, runner.count_parameters, runner._POLL_SECONDS = call, lambda directory: 1, 0.1
config_of = functools.cache(lambda *arguments, parse=runner.config_of: parse([*arguments]))
runner.config_of = lambda arguments: config_of(*arguments)  # as in conftest.py
tables.main(["run", *arguments, f"--dir={directory}/tables"])
if child:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_two_processes_execute_every_run_once(tmp_path):
    command = [sys.executable, "-c", _WORKERS, tmp_path, "flip", "few_labels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 0.5000 (") == 2 * 8
    executions = [json.loads(line) for line in (tmp_path / "executions").read_text().splitlines()]
    assert {name for name, _, _ in executions} == {"one", "two"}
    # `few_labels` starts from two runs of `linear`. One of these and one of `flip` are identical.
    assert len(executions) == len({tuple(settings) for _, settings, _ in executions}) == 9
    assert all(start_is_finished for _, _, start_is_finished in executions)
    assert len(list(tmp_path.rglob("record.json"))) == 9


@pytest.fixture
def instead_of_sleeping(monkeypatch):
    """Returns a function that replaces the runner's pauses with a function of their length in seconds."""
    return lambda function: monkeypatch.setattr(
        runner, "time", types.SimpleNamespace(sleep=function)
    )


def lock(base, *key):
    """Locks the directory of a run."""
    directory = directory_of(base, *key)
    directory.mkdir(parents=True)
    return Lock(str(directory), "--dir", "run.lock")


def test_a_run_is_executed_if_the_process_that_holds_its_lock_is_killed(
    calls, tmp_path, instead_of_sleeping, program
):
    # The run with flips has the same settings as the locked run.
    directory = directory_of(tmp_path, "color", "1/2")
    directory.mkdir(parents=True)

    def kill(seconds):
        assert seconds == runner._POLL_SECONDS and len(calls) == 1
        other.kill()
        other.communicate()

    instead_of_sleeping(kill)
    with processes.holding_lock(directory, "--dir", "run.lock") as other:
        lines = program("run", "flip").splitlines()
    assert lines[0] == f"2 runs, 2 to execute, in {tmp_path}/small"
    assert f"postponed flip, with: flip, with is in progress in process {other.pid} on " in lines[1]
    assert re.match("runs left: 1; expected end: 2.* \\(in 0:00:", lines[4])
    texts = [line.split(" (")[0].partition(": /")[0] for line in [*lines[2:4], *lines[5:]]]
    assert texts == [
        "running flip, without; output",
        "1/2  flip, without: 0.5100",
        "waiting for other processes; postponed runs: 1",
        "running flip, with; output",
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


def test_runs_wait_for_the_run_that_they_start_from(calls, tmp_path, instead_of_sleeping, program):
    key = ("linear", "ResNet-50 (2x)")
    with lock(tmp_path, *key) as held:
        directory = directory_of(tmp_path, *key)

        def finish_run(seconds):
            settings = runner_in(tmp_path).settings(studies.find_run(key))
            Record(settings, {runner.LBFGS: 0.5}, False, 1.0, "", "").write(str(directory))
            held.__exit__()

        instead_of_sleeping(finish_run)
        printed = program("run", "few_labels")
    message = "few_labels, ResNet-50 (2x), 1 %: linear, ResNet-50 (2x) is in progress in process "
    assert f"postponed {message}" in printed
    # The locked run is not executed, and the two runs that start from it are the last ones.
    starts = [f"--checkpoint={directory}" in call for call in calls]
    assert starts == [False, False, False, False, False, True, True]
    assert not any(f"--model_dir={directory}" in call for call in calls)


def test_a_run_is_not_repeated_if_another_process_finishes_it_before_the_lock(
    calls, tmp_path, monkeypatch, program
):
    class LateLock(Lock):
        def __init__(self, *arguments):
            with monkeypatch.context() as patch:
                patch.setattr(runner, "Lock", Lock)
                runner_in(tmp_path).run("flip", studies.find_run(("flip", "with")))
            super().__init__(*arguments)

    monkeypatch.setattr(runner, "Lock", LateLock)
    program("run", "--only=flip/with")
    assert len(calls) == 1


def test_waiting_for_other_processes_can_be_stopped(calls, tmp_path, instead_of_sleeping):
    instead_of_sleeping(lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    runs = schedule.runs_of(["flip"], "small")
    with (
        lock(tmp_path, "flip", "with"),
        signals.StopSignals(),
        pytest.raises(Stopped, match="finished work is kept; run the same command again"),
    ):
        list(runner_in(tmp_path).run_all(runs))
    assert len(calls) == 1 and "--norandom_flip" in calls[0]


def test_printed_runner_commands_execute_all_runs_and_store_their_results(calls, tmp_path, program):
    flags = ["--scale=small", "--seeds=2", "--flags=--data_dir='a b'"]
    lines = program("commands", "flip", "few_labels", "--runner", *flags).splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    for count, command in enumerate(commands, 1):
        assert command[:3] == ["python", "-m", "paper.tables"]
        tables.main(command[3:])
        assert len(calls) == count  # Each line is the command for one run.
    assert all("--data_dir=a b" in call for call in calls)
    # Both studies start from, or are, ResNet-50 (1x) with flips.
    assert len(calls) == len(list(tmp_path.rglob("record.json"))) == 2 * (2 + 1 + 6)


@pytest.mark.parametrize(
    "scale, names", [("small", [*studies.STUDIES]), ("paper", ["few_labels", "transfer"])]
)
def test_runs_are_scheduled_once_and_after_the_runs_that_they_start_from(scale, names):
    executor, requested = Runner("out", scale), schedule.runs_of(names, scale)
    scheduled = schedule.schedule(requested, executor)
    stages = [item.stage for item in scheduled]
    assert stages == sorted(stages)
    counts = collections.Counter(name for item in scheduled for name in item.names)
    assert {schedule.name_of(*pair) for pair in requested} <= counts.keys()
    stage_of = {executor.directory(item.run): item.stage for item in scheduled}
    assert len(stage_of) == len(scheduled) and {*counts.values()} == {1}
    for item in scheduled:
        start, choices = item.run.starts_from, executor.choices(item.run)
        needed = [studies.find_run(start)] if start else [choice for _, choice in choices]
        before = [stage_of[executor.directory(run)] for run in needed]
        assert item.stage == 1 + max(before, default=0)


def test_a_run_repeats_the_best_of_other_runs_with_other_seeds(calls, tmp_path, program):
    executor, run = runner_in(tmp_path), studies.find_run(("losses", "margin"))
    names = [choice.name for _, choice in executor.choices(run)]
    assert names == [
        f"margin {margin}, rate {rate}" for margin in (0.4, 0.8, 1.6) for rate in (0.1, 0.3)
    ]
    printed = program("run", "--only=losses/margin", "--seeds=2")
    # Accuracies increase with the number of the call, so the last of the six choices is the best.
    assert len(calls) == 8 and "2/2  losses, margin, seed 2: 0." in printed
    for call in calls[:6]:
        assert {"--eval_split=train[20%:40%]", "--contrastive_loss=margin_triplet"} <= {*call}
    for call, seed in zip(calls[6:], (2, 3), strict=True):
        expected = {"--margin=1.6", "--learning_rate=0.3", "--eval_split=test", f"--seed={seed}"}
        assert expected <= {*call} and "--eval_split=train[20%:40%]" not in call
    program("report", "losses")
    selected = pd.read_csv(tmp_path / "small/losses.csv")["selected"]
    assert list(selected) == ["margin 1.6, rate 0.3"] * 2
    (line,) = (
        line for line in program("commands", "losses").splitlines() if "losses/margin " in line
    )
    assert line.startswith("python -m paper.tables run --only=losses/margin")


def test_commands_are_grouped_by_stage(program):
    arguments = "commands", "few_labels", "color", "flip"
    text = program(*arguments)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    first, second = text.split("# stage 2 (runs: 4): use the weights or the results of stage 1\n")
    assert first.startswith("# stage 1 (runs: 10): no dependencies\n")
    assert "\n# identical to the run above: flip/with\n" in first
    for stage, expected in (("1", first), ("2", second)):
        printed = program(*arguments, "--stage", stage)
        assert printed == re.sub("^#.*\n", "", expected, flags=re.MULTILINE)


@pytest.mark.slow
def test_a_run_is_executed_and_probed(tmp_path, monkeypatch):
    # The programs that are started do not see the small network of other tests.
    monkeypatch.setitem(resnet.DEPTHS, 10, (False, (1, 1, 1, 1)))
    run = studies.Run(
        "one",
        {
            "dataset": "digits",
            "image_size": 8,
            "train_split": "train[:64]",
            "train_steps": 2,
            "train_batch_size": 16,
            "proj_out_dim": 16,
            "eval_split": "test[:64]",
        },
        probe="rotation",
    )
    record = runner_in(tmp_path).run("flip", run)
    assert 0 <= runner.accuracy(record.results) <= 1 and record.seconds > 0
    assert record.results["probe/majority_baseline"] == 0.25
    # ResNet-10 without its classifier
    assert record.results["million_parameters"] == pytest.approx(4.9, abs=0.02)


def test_subcommands_list_studies_and_print_paper_results_and_commands(capsys):
    def printed(*arguments):
        tables.main(arguments)
        return capsys.readouterr().out

    listed = printed("list")
    assert all(f"\n{name} " in listed for name in studies.STUDIES)
    assert max(map(len, listed.splitlines())) <= 80
    assert re.search("^pairs +9 +3 +49  Figure 5$", listed, re.MULTILINE)
    assert "NT-Xent                 top-1 63.9" in printed("show", "losses")
    *_, without = printed("commands", "flip", "--scale=paper").splitlines()
    arguments = ["--flagfile=paper/recipes/imagenet_paper.cfg", "--norandom_flip"]
    assert shlex.split(without)[:-1] == ["python", "run.py", *arguments]
    probes = printed("commands", "probes", "--scale=paper")
    assert probes.count("python run.py") == probes.count(" && python -m paper.probes") == 4
