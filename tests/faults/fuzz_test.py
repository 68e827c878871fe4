"""Property-based tests: for any combination of flags, a run succeeds or fails with a one-line error.

`make soak` tests more combinations, chosen at random.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import re
import typing
import unittest.mock

import hypothesis
import pytest
from hypothesis import strategies as st

import config as config_lib
import run
from config import Config
from export import saving
from runtime import command_line
from runtime.errors import UserError
from support.runs import TINY

BOUNDS = [2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 10**20]
EDGES = [-1, -0.0, 0, 5e-324, 1e-300, 1e-45, 1e-30, 1e-9, 0.5, 1, 1e9, 1e30, 3.5e38, 1e308]
EXTREME = {
    int: st.integers(-3, 5) | st.sampled_from([16, 64, *BOUNDS]),
    float: st.floats() | st.sampled_from([*map(float, [*EDGES, "inf", "-inf", "nan"])]),
    bool: st.booleans(),
    str: (
        st.text(max_size=8)
        | st.sampled_from(["train", "eval", "test", "digits", "", "../x", "folder:", "a\nb"])
    ),
}


MANY_EXAMPLES = hypothesis.settings(
    max_examples=4 * hypothesis.settings().max_examples, deadline=None
)


def value_type(field):
    hint = typing.get_type_hints(Config)[field.name]
    (value_class,) = {*(typing.get_args(hint) or [hint])} - {type(None)}
    return value_class


@functools.cache
def values(field):
    """Returns a Hypothesis strategy that generates valid and invalid values of a setting."""
    options = [EXTREME[value_type(field)], st.just(field.default)]
    options += [st.sampled_from(field.metadata["choices"])] if field.metadata["choices"] else []
    options += [st.none()] if field.default is None else []
    return st.one_of(*options)


RANDOM_SETTINGS = st.lists(
    st.sampled_from(dataclasses.fields(Config)), max_size=6, unique_by=lambda field: field.name
).flatmap(lambda chosen: st.fixed_dictionaries({field.name: values(field) for field in chosen}))


@MANY_EXAMPLES
@hypothesis.given(RANDOM_SETTINGS)
def test_settings_are_accepted_or_give_one_line_errors(settings):
    try:
        config = Config(**settings)
    except UserError as error:
        assert "--" in str(error) and "\n" not in str(error)
        return
    parent, _ = pathlib.Path(config.default_model_dir()).parts
    assert parent == "runs"
    assert json.loads(json.dumps(dataclasses.asdict(config))) == dataclasses.asdict(config)


# Values for which most runs on `digits` finish in seconds.
FAST = """
mode: train train_then_eval
train_mode: pretrain supervised
image_size: 8 9
train_batch_size: 2 7 16
micro_batch_size: 0 1 2 8
eval_batch_size: 1 90
num_proj_layers: 1 2
proj_out_dim: 1 16
resnet_depth: 10
width_multiplier: 1
sk_ratio: 0 0.0625
se_ratio: 0 0.25
eval_protocol: linear_head knn contrastive lbfgs,knn nothing
ft_proj_selector: -1 0 1 3
fine_tune_after_block: -1 4
warmup_epochs: 0 1.5
learning_rate: 0 0.1
eval_steps: 0 1
linear_head_learning_rate: 0.1
label_fraction: 1 0.5 0.001
label_seed: 0 1
eval_split: test[:40] train[:40] validation
temperature: 0.01 1
batch_norm_decay: 0 0.9
color_jitter_strength: 0 1 3
min_crop_area: 0.01 1
loss_block_rows: 0 1 5
keep_checkpoint_max: 1
checkpoint_steps: 0 1
weight_decay: 0 1
"""


def plausible_values():
    """Returns a dict with the fast values of all settings for which such values are known."""
    names = Config.__dataclass_fields__.keys() - {"cluster", "use_tpu", "deterministic"}
    fields = [Config.__dataclass_fields__[name] for name in sorted(names)]
    known = {field.name: field.metadata["choices"] for field in fields if field.metadata["choices"]}
    known |= {field.name: [True, False] for field in fields if isinstance(field.default, bool)}
    lines = (line.split(": ") for line in FAST.strip().splitlines())
    return known | {name: text.split() for name, text in lines}


PLAUSIBLE = {name: st.sampled_from(known) for name, known in plausible_values().items()}
ABSL_FLAG = r"-*(help|\?|flagfile|undefok|only_check|pdb|run_with|use_cprofile|profile_file)"
FIXED = "--train_split=train[:64] --train_steps=2 --eval_split=test[:40] --image_size=8 --train_batch_size=16"


def call(function, argv):
    """Calls a function of the settings on a command line.

    Returns the exit status (0 if the function returns normally) and the standard error output.
    """
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            with command_line.reporting_errors("run.py"):
                function(*config_lib.read_command_line("", argv))
        except SystemExit as error:
            return error.code, stderr.getvalue()
    return 0, stderr.getvalue()


def assert_one_line_error(status, error_text):
    """Asserts that a run succeeded without errors, or failed with a one-line error that mentions a flag.

    Status 3 means that training diverged.
    """
    assert status in (0, 2, 3), error_text
    assert error_text.count("\n") == (status != 0) and (status == 0) == (not error_text)
    assert status == 0 or "--" in error_text or "flag" in error_text


def check_run(model_dir, argv):
    """Calls run.py with a small network, few images and the given arguments. Returns the exit status."""
    arguments = [f"--{name}={value}" for name, value in TINY.items()]
    arguments += [*FIXED.split(), f"--model_dir={model_dir}", *argv]
    status, error_text = call(run.main, arguments)
    assert_one_line_error(status, error_text)
    assert status != 0 or (model_dir / "ckpt-2.index").exists()
    return status


def command_lines(fields):
    """Returns a strategy for command lines whose flags may be misspelled or malformed."""
    value = st.one_of(*map(values, fields), st.text(max_size=5)).map(str)
    name = st.sampled_from([field.name for field in fields]) | st.text(max_size=5)
    form = st.sampled_from(["--{}={}", "-{}={}", "--no{}", "--{}", "--{} {}", "{}={}", "{1}"])
    return st.lists(
        st.builds(lambda form, name, value: form.format(name, value), form, name, value), max_size=4
    )


# Suggestions for misspelled flags are slow.
@unittest.mock.patch("absl.flags._helpers.get_flag_suggestions", lambda *_: [])
@MANY_EXAMPLES
@hypothesis.given(command_lines(dataclasses.fields(Config)))
def test_command_lines_are_accepted_or_give_one_line_errors(argv):
    hypothesis.assume(not any(re.match(ABSL_FLAG, argument) for argument in argv))

    assert_one_line_error(*call(lambda *_: None, argv))


@pytest.mark.slow
def test_runs_with_any_flag_combination_succeed_or_give_one_line_errors(
    tmp_path_factory, tiny_resnet, monkeypatch
):
    statuses = []
    monkeypatch.setattr(saving, "export_to_model_dir", lambda *_: "not made")

    @hypothesis.settings(
        max_examples=hypothesis.settings().max_examples // 8,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.lists(st.sampled_from(sorted(PLAUSIBLE)), min_size=3, max_size=12, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: PLAUSIBLE[name] for name in names})
        )
    )
    def check(settings):
        argv = [f"--{name}={value}" for name, value in settings.items()]
        statuses.append(check_run(tmp_path_factory.mktemp("run"), argv))

    check()
    assert {0, 2} <= set(statuses) <= {0, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, statuses",
    [
        (
            """
            --warmup_epochs=1e6 --keep_checkpoint_max=MAX --seed=MAX --loss_block_rows=MAX
            --shuffle_buffer_mb=MAX --weight_decay=1e-30 --momentum=1e-30 --batch_norm_decay=1e-30
            --checkpoint_epochs=1000000 --learning_rate=1e-30 --color_jitter_strength=100
            --brightness=additive --min_crop_area=1e-4 --sk_ratio=1e-30 --se_ratio=1e-30
            --optimizer=momentum --learning_rate_scaling=sqrt
            """,
            {0},
        ),
        (
            """
            --mode=train_then_eval --eval_steps=MAX --eval_batch_size=1048576
            --eval_protocol=linear_head,contrastive --warmup_epochs=1e-30 --learning_rate=-0.0
            --temperature=1e-30 --color_jitter_strength=1e-30
            """,
            {0},
        ),
        ("--learning_rate=1e30 --weight_decay=1e30 --warmup_epochs=0 --optimizer=momentum", {2, 3}),
        ("--label_fraction=1e-30 --train_mode=supervised", {2}),
        ("--label_fraction=0.99999999 --train_mode=supervised --label_seed=MAX", {0}),
    ],
)
def test_runs_with_settings_at_their_bounds_succeed_or_give_one_line_errors(
    flags, statuses, tmp_path, tiny_resnet, monkeypatch
):
    monkeypatch.setattr(saving, "export_to_model_dir", lambda *_: "not made")
    assert check_run(tmp_path, flags.replace("MAX", str(2**31 - 1)).split()) in statuses
