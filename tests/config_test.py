"""Settings: ranges, combinations, command-line errors, and compatibility with the original's flags."""

import re
import shlex
import string
import subprocess
import sys

import pytest

import config as config_lib
from config import Config
from runtime.errors import first_line
from support import ROOT, golden
from support.errors import rejects
from support.flags import make_flags


def test_flags_from_the_original_keep_their_names_types_defaults_and_choices():
    values = make_flags()
    originals = golden.load_json("original_flags")
    assert len(originals) == 48
    for original in originals:
        flag = values[original["name"]]
        assert flag.flag_type() == original["type"], original["name"]
        assert flag.default == original["default"] or original["name"] == "use_tpu", original[
            "name"
        ]
        if original["choices"]:
            assert set(original["choices"]) <= set(flag.parser.enum_values)
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
def test_published_commands_are_accepted_verbatim(command, recipe):
    template, values = string.Template(command.replace("\\\n", "")), make_flags()
    text = template.substitute(
        DATA_DIR="/data", MODEL_DIR="/run", CHKPT_DIR="/pretrained", TPU_NAME="tpu"
    )
    arguments = shlex.split(text)[2:]
    values(["run.py", *arguments])
    config = config_lib.from_flags(values)
    ignored = [
        argument.split("=")[0]
        for argument in arguments
        if "summary" in argument or "schema" in argument
    ]
    line = config_lib.describe_ignored_flags(values)
    assert bool(line) == bool(ignored) and all(name in line for name in ignored)
    for argument in arguments:
        name, _, text = argument.removeprefix("--").partition("=")
        if f"--{name}" not in ignored:
            value = getattr(config, name)
            expected = text if isinstance(value, (bool, str)) else float(text)
            assert type(expected)(value) == expected, name
    if recipe:
        expected = config_lib.from_arguments([f"--flagfile={ROOT}/paper/recipes/{recipe}.cfg"])
        where = ("mode", "model_dir", "data_dir", "checkpoint", "use_tpu", "tpu_name")
        assert expected.replace(**{name: getattr(config, name) for name in where}) == config


def test_flags_without_effect_are_reported_in_one_line():
    process = run_program(
        *("--train_summary_steps=0", "--variable_schema=(?!head)", "--dataset=no_such_dataset")
    )
    assert process.stdout.startswith(
        "flags without effect: --train_summary_steps, --variable_schema ("
    )
    assert process.returncode == 2 and "--dataset=no_such_dataset" in process.stderr


def test_parsed_flags_are_converted_to_a_config():
    arguments = ["--resnet_depth=18", "--temperature=0.5", "--nouse_blur", "--seed=3"]
    assert config_lib.from_arguments(arguments) == Config(
        resnet_depth=18, temperature=0.5, use_blur=False, seed=3
    )


def test_default_model_dir_depends_on_the_identity_of_the_run_but_not_on_its_length():
    config = Config(dataset="imagenet2012_subset/1pct")
    assert config.default_model_dir().startswith("runs/imagenet2012_subset_1pct_resnet50_")
    assert (
        config.replace(train_steps=5, mode="eval", data_dir="/x").default_model_dir()
        == config.default_model_dir()
    )
    assert config.replace(temperature=0.2).default_model_dir() != config.default_model_dir()
    assert Config(dataset="folder:/a/b c/").default_model_dir().startswith("runs/a_b_c_resnet50_")


def test_roles_of_settings_do_not_conflict():
    identity = set(config_lib.settings_with("identity", "network", "of_run"))
    assert not identity & set(
        config_lib.settings_with("length", "order", "output", "per_worker", "no_effect")
    )
    assert not set(config_lib.settings_with("length")) & set(
        config_lib.settings_with("order", "no_effect", "per_worker")
    )


def test_cifar_stem_is_the_default_for_image_sizes_up_to_32():
    assert Config(image_size=32).cifar_stem and not Config(image_size=33).cifar_stem
    assert (
        not Config(image_size=32, stem="imagenet").cifar_stem
        and Config(image_size=64, stem="cifar").cifar_stem
    )


def run_program(*arguments):
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "argument", ["--temperature=0", "--flagfile=none", "--dataset=folder:/none"]
)
def test_command_line_errors_print_one_line_before_tensorflow_is_loaded(argument):
    process = run_program(argument)
    assert process.returncode == 2
    assert argument[:9] in process.stderr.replace("'", "--")
    assert process.stderr.count("\n") == 1 and process.stdout == ""


def test_help_lists_flags_that_the_original_does_not_have():
    process = run_program("--help")
    assert "--linear_head_learning_rate" in process.stdout and "--brightness" in process.stdout


def test_documents_mention_only_existing_flags():
    """Slurm and pip are described in clusters.md and install.md, whose commands `documents_test.py` parses."""
    names = {"flagfile", "logdir", "saved", "weight_decays", "tf_xla_persistent_cache_directory"}
    names |= {"zone", "accelerator", "worker"}  # of gcloud
    names |= {name for flag in make_flags() for name in (flag, f"no{flag}")}
    for module in ROOT.glob("*/*.py"):
        names |= set(re.findall(r"--([a-z_]+)", module.read_text()))
    documents = {*ROOT.glob("docs/*.md"), *ROOT.glob("paper/recipes/*.cfg"), ROOT / "README.md"}
    for document in documents - {ROOT / "docs" / "clusters.md", ROOT / "docs" / "install.md"}:
        mentioned = re.findall(r"(?<![\w-])--([a-z][a-z_]*)", document.read_text())
        assert set(mentioned) <= names, document.name


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "paper" / "recipes").glob("*.cfg")), ids=lambda path: path.stem
)
def test_recipes_are_valid(recipe):
    config = config_lib.from_arguments([f"--flagfile={recipe}"])
    assert (
        "own_images" in recipe.stem
        or f"--dataset={config.dataset}" in recipe.read_text().splitlines()
    )


@pytest.mark.parametrize("flag", ["model_dir", "checkpoint"])
@pytest.mark.parametrize(
    "path, problem",
    [
        ("My data [old]/run", r"contains \["),
        ("a\\b", "contains"),
        (" ", "is empty"),
        ("two\nlines", "control characters"),
        ("\udcff", "not valid UTF-8"),
        ("s3://bucket/run", "s3:// is not supported"),
    ],
)
def test_paths_that_tensorflow_cannot_handle_are_rejected(flag, path, problem):
    with rejects(f"^--{flag}=.*{problem}"):
        Config(**{flag: path})


@pytest.mark.parametrize(
    "flag, path",
    [
        ("model_dir", "größe/日本/a\u3000b"),
        ("model_dir", "gs://bucket/run"),
        ("model_dir", "{a,b}!]"),
        ("data_dir", "My data [old]"),
        ("checkpoint", "https://tfhub.dev/a/b?c=d"),
    ],
)
def test_valid_paths_are_unchanged(flag, path):
    assert getattr(Config(**{flag: path}), flag) == path


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


# Messages with _MAP are from TensorFlow 2.21, the others from 2.15.
@pytest.mark.parametrize(
    "text",
    [
        _OP + _PNG + "\n\t [[{{node DecodePng}}]] [Op:IteratorGetNext] name: ",
        _OP + _MAP + _PNG + " [Op:IteratorGetNext]",
        _GRAPH + _TRACE + _PNG + _NODES,
        _GRAPH + _NO_TRACE + _TWO.format(_MAP + _PNG),
        f"\n {_PNG}\nmore",
    ],
)
def test_first_line_returns_the_message_without_graph_locations(text):
    assert first_line(ValueError(text)) == _PNG


def test_first_line_is_never_empty():
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError(_GRAPH)) == "Graph execution error:"
    assert (
        first_line(OSError(28, "No space left on device", "a file"))
        == "[Errno 28] No space left on device: 'a file'"
    )


def test_first_line_of_a_chained_error_includes_its_root_cause():
    cause = OSError(-3, "Temporary failure in name resolution")
    outer = ConnectionError("download failed")
    outer.__cause__ = ValueError("no connection")
    outer.__cause__.__cause__ = cause
    assert first_line(outer) == f"download failed: {cause}"
    nested = first_line(
        ConnectionError(f"Max retries exceeded with url: {'x' * 1000} (Caused by {cause!r})")
    )
    assert (
        nested.startswith("Max retries exceeded")
        and nested.endswith(f"(Caused by {cause!r})")
        and len(nested) < 500
    )


@pytest.mark.parametrize(
    "content, typed, names",
    [
        ("--linear_head_learning_rate=0.1\n--momentum=0.5", "adam", ["linear_head_learning_rate"]),
        ("--linear_head_learning_rate=0.1\n--momentum=0.5", "lars", []),
        ("--linear_head_learning_rate=0.1\n--label_fraction=0.5", "adam", []),
    ],
)
def test_flag_files_give_way_to_the_command_line(content, typed, names, tmp_path):
    (tmp_path / "flags.cfg").write_text(content)
    values, argv = make_flags(), ["run.py", f"--flagfile={tmp_path}/flags.cfg"]
    argv += [f"--optimizer={typed}"]
    values(argv)
    given = set(config_lib.given_flags(values))
    lines = config_lib.resolve_contradictions(argv, values)
    assert [line.split("--")[1].split("=")[0] for line in lines] == names
    assert set(config_lib.given_flags(values)) == given - set(names)
    assert (values["momentum"].value == 0.5) == ("momentum" in content)
