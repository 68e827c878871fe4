"""Settings: ranges, combinations, command-line errors, and compatibility with the original's flags."""

import re
import shlex
import string
import subprocess
import sys

import pytest

import config as config_lib
from config import Config
from inference import cli as inference_cli
from runtime.errors import first_line
from support import ROOT, golden
from support.flags import make_flags
from transfer import cli as transfer_cli


def test_flags_from_the_original_keep_their_names_types_defaults_and_choices():
    values = make_flags()
    originals = golden.load_json("original_flags")
    assert len(originals) == 48
    for original in originals:
        flag = values[original["name"]]
        assert flag.flag_type() == original["type"], flag.name
        assert flag.default == original["default"] or flag.name == "use_tpu", flag.name
        assert {*(original["choices"] or ())} <= {*getattr(flag.parser, "enum_values", ())}
        assert flag.help


# Verbatim commands from the READMEs of google-research/simclr and of its folder tf2/.
PUBLISHED_COMMANDS = r"""
python run.py --train_mode=pretrain \
  --train_batch_size=512 --train_epochs=1000 \
  --learning_rate=1.0 --weight_decay=1e-4 --temperature=0.5 \
  --dataset=cifar10 --image_size=32 --eval_split=test --resnet_depth=18 \
  --use_blur=False --color_jitter_strength=0.5 \
  --model_dir=/tmp/simclr_test --use_tpu=False

python run.py --train_mode=pretrain \
  --train_batch_size=4096 --train_epochs=100 --temperature=0.1 \
  --learning_rate=0.075 --learning_rate_scaling=sqrt --weight_decay=1e-4 \
  --dataset=imagenet2012 --image_size=224 --eval_split=validation \
  --data_dir=$DATA_DIR --model_dir=$MODEL_DIR \
  --use_tpu=True --tpu_name=$TPU_NAME --train_summary_steps=0

python run.py --mode=train_then_eval --train_mode=finetune \
  --fine_tune_after_block=4 --zero_init_logits_layer=True \
  --variable_schema='(?!global_step|(?:.*/|^)Momentum|head)' \
  --global_bn=False --optimizer=momentum --learning_rate=0.1 --weight_decay=0.0 \
  --train_epochs=100 --train_batch_size=512 --warmup_epochs=0 \
  --dataset=cifar10 --image_size=32 --eval_split=test --resnet_depth=18 \
  --checkpoint=/tmp/simclr_test --model_dir=/tmp/simclr_test_ft --use_tpu=False

python run.py --mode=train_then_eval --train_mode=finetune \
  --fine_tune_after_block=4 --zero_init_logits_layer=True \
  --variable_schema='(?!global_step|(?:.*/|^)Momentum|head)' \
  --global_bn=False --optimizer=momentum --learning_rate=0.1 --weight_decay=1e-6 \
  --train_epochs=90 --train_batch_size=4096 --warmup_epochs=0 \
  --dataset=imagenet2012 --image_size=224 --eval_split=validation \
  --data_dir=$DATA_DIR --model_dir=$MODEL_DIR --checkpoint=$CHKPT_DIR \
  --use_tpu=True --tpu_name=$TPU_NAME --train_summary_steps=0

python run.py --mode=train_then_eval --train_mode=finetune \
  --fine_tune_after_block=-1 --zero_init_logits_layer=True \
  --variable_schema='(?!global_step|(?:.*/|^)Momentum|head_supervised)' \
  --global_bn=True --optimizer=lars --learning_rate=0.005 \
  --learning_rate_scaling=sqrt --weight_decay=0 \
  --train_epochs=60 --train_batch_size=1024 --warmup_epochs=0 \
  --dataset=imagenet2012_subset/1pct --image_size=224 --eval_split=validation \
  --data_dir=$DATA_DIR --model_dir=$MODEL_DIR --checkpoint=$CHKPT_DIR \
  --use_tpu=True --tpu_name=$TPU_NAME --train_summary_steps=0 \
  --num_proj_layers=3 --ft_proj_selector=1
""".strip().split("\n\n")
RECIPES = ("cifar10", "imagenet", "cifar10_linear", None, None)


@pytest.mark.parametrize("command, recipe", [*zip(PUBLISHED_COMMANDS, RECIPES)], ids=range(5))
def test_published_commands_are_accepted_verbatim(command, recipe, logged):
    template, values = string.Template(command.replace("\\\n", "")), make_flags()
    text = template.substitute(
        DATA_DIR="/data", MODEL_DIR="/run", CHKPT_DIR="/pretrained", TPU_NAME="tpu"
    )
    arguments = shlex.split(text)[2:]
    values(["run.py", *arguments])
    config, _ = config_lib.read_command_line("", arguments)
    ignored = re.findall(r"--\w*(?:summary|schema)\w*", text)
    line = f"flags without effect: {', '.join(sorted(ignored))} ("
    assert sum(text.startswith(line) for text in logged) == bool(ignored)
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in ignored:
            value = getattr(config, name[2:])
            expected = text if isinstance(value, (bool, str)) else float(text)
            assert type(expected)(value) == expected, name
    if recipe:
        expected = config_lib.from_arguments([f"--flagfile={ROOT}/paper/recipes/{recipe}.cfg"])
        where = ("mode", "model_dir", "data_dir", "checkpoint", "use_tpu", "tpu_name")
        assert expected.replace(**{name: getattr(config, name) for name in where}) == config


def test_default_model_dir_depends_on_the_identity_of_the_run_but_not_on_its_length():
    config = Config(dataset="imagenet2012_subset/1pct")
    directory = config.default_model_dir()
    assert directory.startswith("runs/imagenet2012_subset_1pct_resnet50_")
    same_run = config.replace(train_steps=5, mode="eval", data_dir="/x")
    assert same_run.default_model_dir() == directory
    assert config.replace(temperature=0.2).default_model_dir() != directory
    assert Config(dataset="folder:/a/b c/").default_model_dir().startswith("runs/a_b_c_resnet50_")


def test_roles_of_settings_do_not_conflict():
    for roles, others in (
        ("identity network of_run", "length order output per_worker no_effect"),
        ("length", "order no_effect per_worker"),
    ):
        one, other = ({*config_lib.settings_with(*names.split())} for names in (roles, others))
        assert not one & other


def test_cifar_stem_is_the_default_for_image_sizes_up_to_32():
    assert Config(image_size=32).cifar_stem and not Config(image_size=33).cifar_stem
    assert not Config(image_size=32, stem="imagenet").cifar_stem
    assert Config(image_size=64, stem="cifar").cifar_stem


def test_command_line_errors_print_one_line_before_tensorflow_is_loaded():
    for argument in ("--temperature=0", "--flagfile=none", "--dataset=folder:/none"):
        command = [sys.executable, f"{ROOT}/run.py", argument]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 2 and process.stdout == ""
        assert argument[:9] in process.stderr and process.stderr.count("\n") == 1


def test_documents_mention_only_existing_flags():
    """Slurm and pip are described in clusters.md and install.md, whose commands `documents_test.py` parses."""
    names = {"flagfile", "logdir", "saved", "weight_decays", "tf_xla_persistent_cache_directory"}
    names |= {"zone", "accelerator", "worker"}  # of gcloud
    names |= {name for flag in make_flags() for name in (flag, f"no{flag}")}
    for module in ROOT.glob("*/*.py"):
        names |= set(re.findall(r"--([a-z_]+)", module.read_text()))
    for parser in (transfer_cli._parser(), inference_cli._parser()):
        for command in parser._subparsers._group_actions[0].choices.values():
            names |= set(re.findall(r"--([a-z_]+)", command.format_help()))
    documents = {*ROOT.glob("docs/*.md"), *ROOT.glob("paper/recipes/*.cfg"), ROOT / "README.md"}
    for document in documents - {ROOT / "docs/clusters.md", ROOT / "docs/install.md"}:
        mentioned = re.findall(r"(?<![\w-])--([a-z][a-z_]*)", document.read_text())
        assert set(mentioned) <= names, document.name


def test_recipes_are_valid():
    for recipe in ROOT.glob("paper/recipes/*.cfg"):
        config = config_lib.from_arguments([f"--flagfile={recipe}"])
        lines = recipe.read_text().splitlines()
        assert "own_images" in recipe.stem or f"--dataset={config.dataset}" in lines, recipe


def test_valid_names_and_paths_are_unchanged():
    for name in ("n" * 63, "two words", "-x", "été", "a..b"):
        assert Config(eval_name=name).eval_name == name
    for path in ("größe/日本/a\u3000b", "gs://bucket/run", "{a,b}!]"):
        assert Config(model_dir=path).model_dir == path
    assert Config(data_dir="My data [old]").data_dir == "My data [old]"
    address = "https://tfhub.dev/a/b?c=d"
    assert Config(checkpoint=address).checkpoint == address


def test_tilde_is_expanded_to_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = Config(model_dir="~/run", checkpoint="~/other")
    assert (config.model_dir, config.checkpoint) == ("/home/someone/run", "/home/someone/other")


_OP = (
    "{{function_node"
    " __wrapped__IteratorGetNext_output_types_1_device_/job:localhost/device:CPU:0}} "
)
_GRAPH = (
    "Graph execution error:\n\nDetected at node DecodePng defined at (most recent call last):\n"
)
_NO_TRACE = "<stack traces unavailable>\n"
_TRACE = '  File "run.py", line 20, in <module>\n\n  File "train.py", line 5, in step\n\n'
_MAP = (
    "Error in user-defined function passed to MapDataset:7 transformation with iterator: "
    "Iterator::Root::ParallelMapV2: "
)
_PNG = "Invalid PNG data, size 20"
_NODES = "\n\t [[{{node DecodePng}}]]\n\t [[IteratorGetNext]] [Op:__inference_step_44]"
_TWO = (
    "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  {0}\n\t [[{{{{node DecodePng}}}}]]\n\t"
    " [[RemoteCall]]\n  (1) INVALID_ARGUMENT:  {0}\n\t [[{{{{node DecodePng}}}}]]\n0 successful"
    " operations.\n0 derived errors ignored. [Op:__inference_step_425]"
)


def test_first_line_returns_the_message_without_graph_locations():
    # Messages with _MAP are from TensorFlow 2.21, the others from 2.15.
    for text in (
        _OP + _PNG + "\n\t [[{{node DecodePng}}]] [Op:IteratorGetNext] name: ",
        _OP + _MAP + _PNG + " [Op:IteratorGetNext]",
        _GRAPH + _TRACE + _PNG + _NODES,
        _GRAPH + _NO_TRACE + _TWO.format(_MAP + _PNG),
        f"\n {_PNG}\nmore",
    ):
        assert first_line(ValueError(text)) == _PNG


def test_first_line_is_never_empty():
    for error, expected in (
        (ValueError(), "ValueError"),
        (ValueError(_GRAPH), "Graph execution error:"),
        (OSError(28, "No space", "a file"), "[Errno 28] No space: 'a file'"),
    ):
        assert first_line(error) == expected


def test_first_line_of_a_chained_error_includes_its_root_cause():
    cause = OSError(-3, "Temporary failure in name resolution")
    outer = ConnectionError("download failed")
    outer.__cause__ = ValueError("no connection")
    outer.__cause__.__cause__ = cause
    assert first_line(outer) == f"download failed: {cause}"
    reason = f"(Caused by {cause!r})"
    line = first_line(ConnectionError(f"Max retries exceeded with url: {'x' * 1000} {reason}"))
    assert line.startswith("Max retries") and line.endswith(reason) and len(line) < 500


@pytest.mark.parametrize(
    "content, optimizer, names",
    [
        ("--momentum=0.5", "adam", ["linear_head_learning_rate"]),
        ("--momentum=0.5", "lars", []),
        ("--label_fraction=0.5", "adam", []),
    ],
)
def test_flag_files_give_way_to_the_command_line(content, optimizer, names, tmp_path):
    path, values = tmp_path / "flags.cfg", make_flags()
    path.write_text(f"--linear_head_learning_rate=0.1\n{content}")
    argv = ["run.py", f"--flagfile={path}", f"--optimizer={optimizer}"]
    values(argv)
    given = set(config_lib.given_flags(values))
    lines = config_lib.resolve_contradictions(argv, values)
    assert [line.split("--")[1].split("=")[0] for line in lines] == names
    assert set(config_lib.given_flags(values)) == given - set(names)
    assert (values["momentum"].value == 0.5) == ("momentum" in content)
