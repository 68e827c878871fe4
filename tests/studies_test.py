"""The studies' grids: their commands are valid, their numbers are the paper's, and runs are resumed and reported."""

import csv
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import zlib

import pytest

from config import UserError
from conftest import ROOT
from paper import figures, studies


def cell_of(name, cell):
    return next(each for each in studies.STUDIES[name].cells if each.name == cell)


@pytest.mark.parametrize("name", studies.STUDIES)
def test_commands_are_valid_at_both_scales(name):
    study = studies.STUDIES[name]
    assert study.small_names is None or set(study.small_names) <= {cell.name for cell in study.cells}
    for small, cells in ((False, study.cells), (True, study.small_cells())):
        configs = [studies.config_of(studies.arguments(cell, small)) for cell in cells]
        assert len(set(configs)) == len(cells)  # Every cell is another run.
        assert len({studies.slug(cell.name) for cell in cells}) == len(cells)


CHECKED = {  # study -> checksum of all names and numbers, and the sums of the columns of the paper's tables
    "colour": (4137376146, {"top-1": 372.0}), "colour_supervised": (3650645113, {"top-1": 458.4}),
    "flip": (3405402469, {"top-1": 127.9}), "broader": (3453527458, {"top-1": 441.2}),
    "losses": (1678207462, {"top-1": 281.8}),
    "temperature": (902130001, {"entropy": 23.0, "contrastive accuracy": 489.4, "top-1": 357.0}),
    "probes": (2303804243, {"h": 363.0, "g(h)": 238.9}), "batches": (1159649609, {"top-1": 3171.2}),
}


def test_the_numbers_are_those_of_the_paper():
    """They were read twice, once by a program that took them from the paper's source, and agreed."""
    found = {}
    for name, study in studies.STUDIES.items():
        sums = {}
        for measure, number in [item for cell in study.cells for item in cell.paper.items()]:
            sums[measure] = round(sums.get(measure, 0) + number, 1)
        if sums:
            content = json.dumps([[cell.name, cell.paper] for cell in study.cells])
            found[name] = zlib.crc32(content.encode()), sums
    assert found == CHECKED


def test_the_grid_of_pairs_is_seven_by_seven_on_one_branch():
    cells = studies.STUDIES["pairs"].cells
    assert len(cells) == 49
    configs = [studies.config_of(studies.arguments(cell, False)) for cell in cells]
    assert all(config.branches[1] == () and not config.blurs_views for config in configs)
    assert {config.branches[0] for config in configs if len(config.branches[0]) == 1} == {
        (name,) for name in ("crop", "cutout", "color", "sobel", "noise", "blur", "rotate")}
    assert sum(len(config.branches[0]) == 2 for config in configs) == 42


def test_all_losses_of_table_4_take_negatives_of_one_view():
    configs = [studies.config_of(studies.arguments(cell, False)) for cell in studies.STUDIES["losses"].cells]
    assert [(config.contrastive_loss, config.semi_hard) for config in configs] == [
        ("margin_triplet", False), ("nt_logistic", False), ("margin_triplet", True), ("nt_logistic", True),
        ("nt_xent", False)]
    assert all(config.negatives == "one_view" for config in configs)


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def calls(monkeypatch):
    """Commands in place of runs, each of which writes what run.py and paper.probes would."""
    found = []

    def call(command, directory):
        found.append(command)
        directory = pathlib.Path(directory)
        if "paper.probes" in command:
            (directory / "probes.json").write_text(json.dumps({"rotation": dict(guess=0.25, h=0.7, z=0.3)}))
            return
        (directory / "result.json").write_text(json.dumps({studies.LBFGS: 0.5 + 0.01 * len(found), "global_step": 3}))

    monkeypatch.setattr(studies, "_call", call)
    monkeypatch.setattr(studies, "count_parameters", lambda directory: 11_200_000)
    return found


def test_what_is_done_is_not_run_again(calls, tmp_path, capsys):
    studies.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert len(calls) == 2 and "--data_dir=a b" in calls[0] and "--norandom_flip" in calls[1]
    assert "2/2  flip: without  0.5200" in capsys.readouterr().out
    studies.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert len(calls) == 2
    (tmp_path / "flip" / "without" / "done.json").unlink()  # As if it had been interrupted.
    studies.main(["run", "flip", f"--dir={tmp_path}", "--flags=--data_dir='a b'"])
    assert calls[2] == calls[1]


def test_the_same_run_of_another_study_is_taken(calls, tmp_path, capsys):
    studies.main(["run", "colour", f"--dir={tmp_path}"])
    assert len(calls) == 6
    studies.main(["run", "flip", f"--dir={tmp_path}"])  # With flips it is the colours' third.
    assert len(calls) == 7 and "--norandom_flip" in calls[6]
    printed = capsys.readouterr().out
    assert "colour: 1/2  0.5300" in printed and "flip: with  0.5300" in printed
    taken = studies.read_done(tmp_path / "flip" / "with")
    assert taken["arguments"] == studies.arguments(cell_of("flip", "with"), small=True)
    studies.main(["run", "temperature", f"--dir={tmp_path}", "--flags=--seed=2"])  # Another seed is another run.
    assert len(calls) == 13


def test_other_flags_are_refused(calls, tmp_path, capsys):
    studies.main(["run", "flip", f"--dir={tmp_path}"])
    with pytest.raises(SystemExit) as error:
        studies.main(["run", "flip", f"--dir={tmp_path}", "--flags=--seed=2"])
    assert error.value.code == 2 and len(calls) == 2
    told = capsys.readouterr().err
    assert "was run with other flags" in told and told.count("\n") == 1


@pytest.mark.parametrize("flags, words", [
    ("--temprature=1", "--flags: Unknown command line flag 'temprature'"), ("x", "--flags: x is not a flag"),
    ("--seed='1", "--flags=--seed='1: No closing quotation"), ("--mode=train", "--flags: --mode is the studies' own"),
    ("--temperature=-1", "--temperature=-1")])
def test_wrong_flags_are_told_before_anything_is_run(flags, words, calls, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        studies.main(["run", "flip", f"--dir={tmp_path / 'out'}", f"--flags={flags}"])
    told = capsys.readouterr().err
    assert error.value.code == 2 and words in told and told.count("\n") == 1
    assert not calls and not (tmp_path / "out").exists()


def test_runs_of_another_version_are_left_alone(calls, tmp_path, capsys):
    (tmp_path / "colour" / "1_2").mkdir(parents=True)
    (tmp_path / "colour" / "1_2" / "done.json").write_text(json.dumps(dict(arguments=["--gone=1"], probes={})))
    studies.main(["run", "flip", f"--dir={tmp_path}"])
    assert len(calls) == 2


def test_probes_are_asked_of_what_was_run(calls, tmp_path):
    studies.run_cell(cell_of("probes", "rotation"), str(tmp_path / "cell"), ["--data_dir=x"])
    run, probes = calls
    assert "--augment_extra=rotate" in run and "--proj_out_dim=512" in run
    assert {"--probes=rotation", "--dataset=cifar10", "--train_split=train[:20%]", "--test_split=test",
            "--flags=--data_dir=x"} <= set(probes)
    assert studies.read_done(tmp_path / "cell")["probes"]["rotation"]["h"] == 0.7


def test_the_report_is_a_table_and_its_data(calls, tmp_path, capsys):
    studies.main(["run", "colour", f"--dir={tmp_path}"])
    capsys.readouterr()
    studies.main(["report", "colour", "flip", f"--dir={tmp_path}"])
    printed = capsys.readouterr().out
    assert "### Strength of colour distortion, contrastive (Table 1)" in printed
    assert ("| cell | paper, top-1 | logistic regression | minutes |\n| --- | --- | --- | --- |\n"
            "| 1/8 | 59.6 | 51.0 | 0.0 |") in printed
    assert "### Random flips (Appendix A)\nThe paper: helpful, not essential. Accuracies in %.\n\nNot run." in printed
    with open(tmp_path / "colour.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and rows[0]["cell"] == "1/8" and float(rows[0]["accuracy"]) == 0.51
    assert not (tmp_path / "flip.csv").exists()


@pytest.mark.parametrize("study, figure", [("pairs", "pairs"), ("batches", "batches"), ("networks", "parameters")])
def test_reports_can_be_drawn(study, figure, calls, tmp_path, capsys):
    studies.main(["run", study, f"--dir={tmp_path}"])
    capsys.readouterr()
    studies.main(["report", study, f"--dir={tmp_path}"])
    what_is_smaller = "| sqrt 2048, 400 epochs | train_batch_size 256, train_epochs 8 | 67.9 |"
    assert (what_is_smaller in capsys.readouterr().out) == (study == "batches")
    figures.main([figure, f"--csv={tmp_path / study}.csv", f"--out={tmp_path}"])
    assert (tmp_path / f"{figure}.png").stat().st_size > 5000


_STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("training", flush=True)
time.sleep(60)
"""


def test_a_run_that_fails_ends_the_studies(tmp_path):
    with pytest.raises(UserError, match=r"the run ended with status 2 \(run.py: error: no room\): see .*run.log"):
        studies._call([sys.executable, "-c", "import sys; print('at first\\nrun.py: error: no room'); sys.exit(2)"],
                      str(tmp_path))


def test_a_signal_is_passed_on_to_the_run_which_saves(tmp_path):
    """The studies wait for it, end with its status, and leave no process behind."""
    code = ("import sys\nfrom paper import studies\n"
            f"studies._call([sys.executable, '-c', {_STOPS!r}], {str(tmp_path)!r})")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while "training" not in ((tmp_path / "run.log").read_text() if (tmp_path / "run.log").exists() else ""):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert "Stopped: stopped in" in process.communicate(timeout=30)[1]
    assert (tmp_path / "run.log").read_text() == "training\nsaved\n"


def test_a_run_that_ends_as_ever_after_a_signal_was_stopped_nevertheless(tmp_path):
    code = ("import os, signal, sys\nfrom paper import studies\n"
            "child = 'import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print(1, flush=True); "
            "time.sleep(1)'\n"
            f"studies._call([sys.executable, '-c', child], {str(tmp_path)!r})")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        while not (tmp_path / "run.log").exists() or not (tmp_path / "run.log").read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, told = process.communicate(timeout=30)
    assert "Stopped: stopped in" in told and printed == "stopping: waiting for the run to save\n"


def test_what_cannot_be_run_or_judged_is_told(calls, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        studies.main(["run", "flip", "flop", f"--dir={tmp_path}"])
    assert not calls and "flop is no study" in capsys.readouterr().err
    studies.main(["run", "flip", f"--dir={tmp_path}"])
    monkeypatch.setattr(studies, "LBFGS", "eval/other")  # As if it had been run with --eval_protocol=knn.
    studies.main(["run", "flip", f"--dir={tmp_path}"])
    assert "flip: with  no accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cell_is_run_and_probed(tmp_path, monkeypatch):
    cell = studies.Cell("one", dict(dataset="digits", image_size=8, train_split="train[:64]", train_steps=2,
                                    train_batch_size=16, proj_out_dim=16, eval_split="test[:64]"), probes=("rotation",))
    done = studies.run_cell(cell, str(tmp_path / "cell"))
    assert 0 <= studies.accuracy(done) <= 1 and done["seconds"] > 0
    assert done["probes"]["rotation"]["guess"] == 0.25
    assert done["million_parameters"] == pytest.approx(4.9, abs=0.02)  # ResNet-10 without its classifier


def test_the_program_lists_shows_and_tells_commands():
    program = [sys.executable, "-m", "paper.studies"]
    listed = subprocess.run([*program, "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in listed for name in studies.STUDIES)
    shown = subprocess.run([*program, "show", "losses"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "NT-Xent                 top-1 63.9" in shown
    told = subprocess.run([*program, "commands", "flip"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in told.splitlines()]
    assert len(lines) == 2 and lines[1][2:] == [
        "--flagfile=paper/recipes/imagenet_paper.cfg", "--norandom_flip", "--model_dir=runs/flip/without"]
    told = subprocess.run([*program, "commands", "probes"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.count("python run.py") == told.count("python -m paper.probes") == 4 and "--dataset=imagenet2012" in told
    alone = subprocess.run([*program, "commands", "seeds"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and "use --scale=small" in alone.stderr
    wrong = subprocess.run([*program, "show", "flop"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "flop is no study" in wrong.stderr
