"""Any combination of flags either runs or ends with one line that the user can act upon.

`make soak` tries other combinations than the suites, and more of them.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import typing

import hypothesis
import pytest
from absl import flags
from hypothesis import strategies as st

import config as config_lib
import run
from config import Config
from export import saving
from runtime import command_line
from runtime.errors import Stopped, TrainingDiverged, UserError
from support.runs import TINY

EDGES = {int: [2**31 - 1, 2**31, -2**31, 2**63 - 1, 2**63, -2**63, 10**20],
         float: [-0.0, 5e-324, 1e-300, 1e-45, 1e-30, 1e30, 3.5e38, 1e308, float("inf"), float("-inf"), float("nan")]}
WEIRD = {int: st.integers(-3, 5) | st.sampled_from([16, 64, *EDGES[int]]),
         float: st.floats() | st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e-9, 1e9, *EDGES[float]]),
         bool: st.booleans(),
         str: st.text(max_size=8) | st.sampled_from(["train", "eval", "test", "digits", "", "../x", "folder:", "a\nb"])}


def kind_of(field):
    hints = typing.get_type_hints(Config)[field.name]
    return next(kind for kind in typing.get_args(hints) or (hints,) if kind is not type(None))


def values(field):
    """What people, scripts and slips may give a setting."""
    options = [WEIRD[kind_of(field)], st.just(field.default)]
    options += [st.sampled_from(field.metadata["choices"])] if field.metadata["choices"] else []
    options += [st.none()] if field.default is None else []
    return st.one_of(*options)


def some_settings(fields, most):
    return st.lists(st.sampled_from(fields), max_size=most, unique_by=lambda field: field.name).flatmap(
        lambda chosen: st.fixed_dictionaries({field.name: values(field) for field in chosen}))


@hypothesis.settings(max_examples=10 * hypothesis.settings().max_examples, deadline=None)
@hypothesis.given(some_settings(dataclasses.fields(Config), 6))
def test_settings_are_accepted_or_refused_in_one_line(settings):
    try:
        config = Config(**settings)
    except UserError as error:
        assert "--" in str(error) and "\n" not in str(error)
        return
    assert len(pathlib.Path(config.default_model_dir()).parts) == 2 and config.default_model_dir().startswith("runs/")
    assert json.loads(json.dumps(dataclasses.asdict(config))) == dataclasses.asdict(config)


def sane(field):
    """Values among which most combinations should run, on `digits`, in seconds."""
    name, choices = field.name, field.metadata["choices"]
    known = dict(
        mode=["train", "train_then_eval"], train_mode=["pretrain", "supervised"], image_size=[8, 9],
        train_batch_size=[2, 7, 16], micro_batch_size=[0, 1, 2, 8], eval_batch_size=[1, 90], num_proj_layers=[1, 2],
        proj_out_dim=[1, 16], resnet_depth=[10], width_multiplier=[1], sk_ratio=[0.0, 0.0625], se_ratio=[0.0, 0.25],
        eval_protocol=["linear_head", "knn", "contrastive", "lbfgs,knn", "nothing"], ft_proj_selector=[-1, 0, 1, 3],
        fine_tune_after_block=[-1, 4], warmup_epochs=[0.0, 1.5], learning_rate=[0.0, 0.1], eval_steps=[0, 1],
        linear_head_learning_rate=[None, 0.1], label_fraction=[1.0, 0.5, 0.001], label_seed=[0, 1],
        eval_split=["test[:40]", "train[:40]", "validation"], temperature=[0.01, 1.0], batch_norm_decay=[0.0, 0.9],
        color_jitter_strength=[0.0, 1.0, 3.0], min_crop_area=[0.01, 1.0], loss_block_rows=[0, 1, 5],
        profile_steps=[0], keep_checkpoint_max=[1], checkpoint_steps=[0, 1], weight_decay=[0.0, 1.0])
    if name in known:
        return st.sampled_from(known[name])
    if choices:
        return st.sampled_from(choices)
    return st.booleans() if isinstance(field.default, bool) and name not in ("use_tpu", "deterministic") else None


SANE = {field.name: sane(field) for field in dataclasses.fields(Config) if sane(field) is not None}
OF_ABSL = ("help", "?", "flagfile", "undefok", "only_check", "pdb", "run_with", "use_cprofile", "profile_file")
FIXED = dict(train_split="train[:64]", train_steps=2, eval_split="test[:40]", image_size=8, train_batch_size=16)


def call(function, argv):
    """The exit status (0 if it returns) and the lines on standard error of a function of `run.py` that reads flags."""
    values = flags.FLAGS
    for name in Config.__dataclass_fields__:
        values[name].unparse()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            function(values, ["run.py", *argv])
        except SystemExit as error:
            return error.code, told.getvalue()
    return 0, told.getvalue()


def assert_told(status, told):
    """Either the run succeeded, or one line says what to change; status 3 means that training diverged."""
    assert status in (0, 2, 3), told
    assert told.count("\n") == (status != 0) and (status == 0) == (not told)
    assert status == 0 or "--" in told or "flag" in told


def words(fields):
    """A command line: settings that may be misspelt, cut, or of another kind."""
    value = st.one_of(*map(values, fields), st.text(max_size=5)).map(str)
    name = st.sampled_from([field.name for field in fields]) | st.text(max_size=5)
    form = st.sampled_from(["--{}={}", "-{}={}", "--no{}", "--{}", "--{} {}", "{}={}", "{1}"])
    return st.lists(st.builds(lambda form, name, value: form.format(name, value), form, name, value), max_size=4)


@hypothesis.settings(max_examples=4 * hypothesis.settings().max_examples, deadline=None)
@hypothesis.given(words(dataclasses.fields(Config)))
def test_any_command_line_is_read_or_refused_in_one_line(argv):
    hypothesis.assume(not any(word.lstrip("-").startswith(OF_ABSL) for word in argv))

    def read(values, argv):
        run.parse_flags(argv)
        with command_line.reporting_errors("run.py"):
            config_lib.from_flags(values)

    assert_told(*call(read, argv))


@pytest.mark.parametrize("error, expected", [
    (UserError("x"), 2), (TrainingDiverged("x"), 3), (Stopped("x"), 75)])
def test_errors_have_their_exit_status(error, expected, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(run, "main", fail)
    assert call(lambda _, argv: (run.parse_flags(argv), run.run_from_flags(argv)), [])[0] == expected


@pytest.mark.slow
def test_any_combination_runs_two_steps_or_ends_with_status_2_and_one_line(tmp_path_factory, tiny_resnet,
                                                                           unoptimized_graphs, monkeypatch):
    statuses = []
    monkeypatch.setattr(saving, "export_to_model_dir", lambda *_: "not made")

    @hypothesis.settings(max_examples=hypothesis.settings().max_examples // 8, deadline=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.lists(st.sampled_from(sorted(SANE)), min_size=3, max_size=12, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: SANE[name] for name in names})))
    def check(settings):
        directory = tmp_path_factory.mktemp("run")
        settings = {**TINY, **FIXED, "model_dir": directory, **settings}
        argv = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        status, told = call(lambda _, argv: (run.parse_flags(argv), run.run_from_flags(argv)), argv)
        assert_told(status, told)
        assert status != 0 or (directory / "ckpt-2.index").exists()
        statuses.append(status)

    check()
    assert {0, 2} <= set(statuses) <= {0, 2, 3}


MOST = 2**31 - 1


@pytest.mark.slow
@pytest.mark.parametrize("settings, statuses", [
    (dict(warmup_epochs=1e6, log_seconds=1e-30, keep_checkpoint_max=MOST, seed=MOST, loss_block_rows=MOST,
          shuffle_buffer_mb=MOST, weight_decay=1e-30, momentum=1e-30, batch_norm_decay=1e-30, checkpoint_epochs=10**6,
          learning_rate=1e-30, color_jitter_strength=100, brightness="additive", min_crop_area=1e-4, sk_ratio=1e-30,
          se_ratio=1e-30, optimizer="momentum", learning_rate_scaling="sqrt"), {0}),
    (dict(mode="train_then_eval", eval_steps=MOST, eval_batch_size=2**20, eval_protocol="linear_head,contrastive",
          warmup_epochs=1e-30, learning_rate=-0.0, temperature=1e-30, color_jitter_strength=1e-30), {0}),
    (dict(learning_rate=1e30, weight_decay=1e30, warmup_epochs=0.0, optimizer="momentum"), {2, 3}),
    (dict(label_fraction=1e-30, train_mode="supervised"), {2}),
    (dict(label_fraction=0.99999999, train_mode="supervised", label_seed=MOST, profile_steps=MOST), {0})])
def test_settings_at_their_bounds_run_two_steps_or_are_refused(settings, statuses, tmp_path, tiny_resnet,
                                                               unoptimized_graphs, monkeypatch):
    monkeypatch.setattr(saving, "export_to_model_dir", lambda *_: "not made")
    settings = {**TINY, **FIXED, "model_dir": tmp_path, **settings}
    status, told = call(lambda _, argv: (run.parse_flags(argv), run.run_from_flags(argv)),
                        [f"--{name}={value}" for name, value in settings.items()])
    assert_told(status, told)
    assert status in statuses and (status != 0 or (tmp_path / "ckpt-2.index").exists())
