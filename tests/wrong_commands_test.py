"""Commands that a newcomer gets wrong: each gives one line with the flag, and status 2."""

import importlib
import re
import shlex

import pytest
import tensorflow as tf

import config as config_lib
import model as model_lib
import run as run_lib
from config import Config
from runtime.errors import UserError
from support import ROOT, SMALL
from support.images import write_images

LINES = [
    line.encode().decode("unicode_escape").split(" => ")
    for line in (ROOT / "tests/wrong_commands.txt").read_text().splitlines()
    if not line.startswith("#")
]
PROGRAMS = ("export", "inference", "checkpoints", "transfer")


@pytest.fixture(scope="module")
def places(tiny_resnet, tmp_path_factory):
    """Returns a dict that maps the placeholders in the commands to paths."""
    root = tmp_path_factory.mktemp("wrong")
    (root / "FILE").write_text("text")
    write_images(root / "PHOTOS", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    write_images(root / "FLAT", "1.png", "2.png")
    for name, has_classifier in (("TEACHER", True), ("ENCODER", False)):
        config = Config(**SMALL, dataset="digits", lineareval_while_pretraining=has_classifier)
        model = model_lib.build_model(config, 10)
        tf.train.Checkpoint(model=model).write(f"{root}/{name}")
    names = "TEACHER", "ENCODER", "PHOTOS", "FLAT", "FILE", "RUN", "OUT"
    return {name: f"{root}/{name}" for name in names}


def replace(text, places):
    return re.sub("|".join(places), lambda match: places[match[0]], text)


def start(program, arguments):
    """Runs a command up to the point at which training would start."""
    if program != "run.py":
        importlib.import_module(f"{program}.cli").main(arguments)
    run_lib.main(*config_lib.read_command_line("", arguments))


@pytest.mark.parametrize("command, words", LINES)
def test_wrong_commands_give_one_line_with_the_flag(
    command, words, places, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lib.train, "train", lambda context: pytest.fail("accepted"))
    program, *arguments = shlex.split(replace(command, places))
    if program not in PROGRAMS:
        program, arguments = "run.py", [program, *arguments]
    with pytest.raises((SystemExit, UserError)) as error:
        start(program, arguments)
    # The program prints the message of a UserError on one line.
    is_raised = isinstance(error.value, UserError)
    message = f"{error.value}\n" if is_raised else capsys.readouterr().err
    assert replace(words, places) in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_commands_cover_every_contradiction():
    flags = {words.split("=")[0].split(":")[0] for _, words in LINES}
    assert {f"--{name}" for name, *_ in config_lib._CONTRADICTIONS} <= flags
