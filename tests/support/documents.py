"""Commands and Python code in the documentation, and the small-scale versions that `make docs-check` executes."""

import dataclasses
import itertools
import json
import re
import shlex
import textwrap

import config as config_lib
from paper import schedule, studies
from support import ROOT

DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.[mi]*")),
    "benchmarks/README.md",
]
# Commands and code that `make docs-check` does not execute: (document, part of the text) ->
# reason.
NOT_EXECUTED = {
    ("README.md", "make "): "installs packages, and trains for several minutes",
    ("README.md", "python run.py --mode=train_then_eval"): "requires ImageNet and a TPU",
    ("docs/accelerators.md", "pip install"): "installs CUDA libraries",
    (
        "docs/accelerators.md",
        "TF_CONFIG=",
    ): "requires two machines; tests/faults/kill_test.py runs two workers",
    (
        "docs/clusters.md",
        "python -m paper.tables run few_labels",
    ): "requires ImageNet and accelerators",
    ("docs/accelerators.md", "python run.py --mode=train_then_eval"): "requires a TPU",
    ("docs/data.md", "imagenet"): "requires ImageNet",
    ("docs/install.md", "pip "): "installs or downloads packages",
    (
        "docs/install.md",
        'python -c "import simclr_tf2',
    ): "tests/package_test.py installs the package",
    ("docs/install.md", "PIP_NO_INDEX=1"): "installs packages from a directory",
    ("docs/own_images.md", "git clone"): "installs packages",
    ("docs/own_images.md", "--group_pattern"): "requires images of patients",
    (
        "docs/paper.md",
        "python run.py --flagfile=paper/recipes/imagenet.cfg",
    ): "requires ImageNet and a TPU",
    (
        "docs/pytorch.md",
        "from safetensors.torch import load_file",
    ): "requires PyTorch; `make test-torch` executes the code",
    (
        "docs/pytorch.md",
        "import torch_resnet",
    ): "requires PyTorch; `make test-torch` executes the code",
    ("docs/published_checkpoints.md", "simclrv"): "downloads weights",
    ("docs/pytorch.md", "import torchvision"): "requires PyTorch, and downloads weights",
    ("docs/reliability.md", "python run.py ..."): "is not a complete command",
    ("docs/saved_models.md", "pip install"): "installs packages",
    ("docs/training.md", 'python -c "import wandb'): "requires Weights & Biases",
    (
        "benchmarks/README.md",
        "python -m benchmarks ",
    ): "executed on small data by tests/benchmarks_test.py",
}

STEPS = 2
MODEL_SETTINGS = ("--resnet_depth=10", "--stem=imagenet", "--image_size=32")
SETTINGS = (f"--train_steps={STEPS}", "--train_batch_size=4", "--eval_batch_size=16")
_COMMAND = re.compile(r"(?:.*(?:&&|;|\bdo) )?(?:\w+=(?:'[^']*'|\S+) )*(?:python|pip|make) ")
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}(?:_[A-Z]+)*\b|\.\.\.|<[^>]*>")


@dataclasses.dataclass(frozen=True)
class Example:
    """A command, or Python code, in a document.

    Attributes:
      document: path of the document, relative to the project directory.
      line: line number.
      text: the text. Continued lines of a command are joined, and its comment is removed.
      is_python: whether the text is Python code.
    """

    document: str
    line: int
    text: str
    is_python: bool = False

    def __str__(self):
        return f"{self.document}:{self.line}"

    @property
    def reasons(self):
        """The reasons in `NOT_EXECUTED` that apply to this example. If there are none, the example is executed."""
        return [
            reason
            for (document, start), reason in NOT_EXECUTED.items()
            if self.document == document and start in self.text
        ]


def find_examples(document, text=None):
    """Returns the commands and the Python code in the indented and fenced blocks of a document, in order."""
    text = (ROOT / document).read_text() if text is None else text
    if document.endswith(".ipynb"):
        text = _notebook_as_markdown(text)
    examples, language, code, command, first = [], None, [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if language == "python":
                examples.append(
                    Example(document, number - len(code), "\n".join(code), is_python=True)
                )
            language, code = (line[3:].strip() or "text") if language is None else None, []
        elif language == "python":
            code.append(line)
        elif language or line.startswith("    "):
            first = first if command else number
            command += line.strip().removesuffix("\\")
            if not line.endswith("\\"):
                if _COMMAND.match(f"{command} "):
                    examples.append(Example(document, first, re.sub(r"\s+# .*", "", command)))
                command = ""
    return examples


def _notebook_as_markdown(text):
    """Returns the code cells of a notebook, without those that install packages or only display files."""
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if "outputs" in cell]
    return "\n".join(
        textwrap.indent(cell, "    ") if cell.startswith("%%bash") else f"```python\n{cell}\n```"
        for cell in cells
        if not cell.startswith("!") and "IPython" not in cell
    )


def arguments(command):
    """Returns the program (`python`, `pip` or `make`) in a shell command, followed by its arguments."""
    # runs/{a,b}/c -> runs/a/c runs/b/c
    command = re.sub(r"(\S*)\{(\w+),(\w+)\}(\S*)", r"\1\2\4 \1\3\4", command)
    words = itertools.dropwhile(
        lambda word: word not in ("python", "pip", "make"), shlex.split(command)
    )
    return list(itertools.takewhile(lambda word: word not in ("&&", "&", ">", "|"), words))


def _additional_flags(words, data_dir):
    """Returns flags that shorten a command. They are appended to the command, so they override its values."""
    if words[1] == "run.py":
        given = config_lib.parse_settings(shlex.join(words[2:]))
        fits_checkpoint = "checkpoint" in given and "resnet_depth" not in given
        return [
            *SETTINGS,
            *([] if fits_checkpoint else MODEL_SETTINGS),
            *(["--micro_batch_size=2"] if "micro_batch_size" in given else []),
            *([] if "dataset" in given else ["--dataset=folder:photos"]),
        ]
    if words[1:3] == ["-m", "transfer"] and words[3] in ("linear", "finetune", "scratch"):
        grid = [f"--steps={STEPS}", "--learning_rates=0.1", "--weight_decays=0", "--jobs=1"]
        return ["--batch_size=4", *(grid if words[3] != "linear" else [])]
    if words[1:4] == ["-m", "paper.tables", "run"] and not any(
        word.startswith("--only") for word in words
    ):
        study = studies.find_studies(words[4])[0]
        run = schedule.name_of(study, studies.STUDIES[study].runs_at("small")[0])
        return [f"--only={run}", f"--flags=--data_dir={data_dir} {' '.join(SETTINGS)}"]
    if words[1:3] == ["-m", "benchmarks"]:
        flags = " ".join([*SETTINGS, *MODEL_SETTINGS])
        return ["--sizes=4", "--rounds=1", "--calls=2", f"--flags={flags}"]
    return []


def small_form(example, model_dir, data_dir):
    """Returns the text of an example, with placeholders replaced by paths. In commands, training is also shortened.

    `run.py` trains a ResNet-10 for two steps with batch size 4 at 32 pixels, unless a checkpoint
    determines the network. Grid searches have one trial of two steps. `paper.tables run` executes
    the first run of the table, and `benchmarks` one size.

    Args:
      example: the example.
      model_dir: run directory of a network with a SavedModel, which was trained for `STEPS` steps.
      data_dir: directory of prepared TFDS data sets.
    """
    text = example.text
    for pattern, value in (
        (r"(data|tfds)_dir=DIR\b", rf"\1_dir={data_dir}"),
        (r"\b(?:PATH|MODEL|MODEL_DIR)\b", model_dir),
        (r"\bSTEP\b", STEPS),
        (r"=DIR\b", f"=directory_{example.line}"),
        (r"\bFILE\.tar\.gz", f"archive_{example.line}.tar.gz"),
        (r"\bA/predictions", "runs/transfer/finetune_food101/predictions"),
        (r"\bB/predictions", "runs/transfer/scratch_food101/predictions"),
    ):
        text = re.sub(pattern, str(value), text)
    if not example.is_python and arguments(text)[0] == "python":
        text = f"{text} {shlex.join(_additional_flags(arguments(text), data_dir))}".rstrip()
    return text


def placeholders(command):
    """Returns the placeholders in a command, such as DIR and `...`, except in Python code that follows `-c`."""
    words = arguments(command)
    return _PLACEHOLDER.findall(" ".join(words[3:] if words[1] == "-c" else words))
