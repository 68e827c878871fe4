"""Executes the commands and the Python code of the documentation on small data. `make docs-check` runs this program.

    python tests/docs/docs_check.py [DOCUMENT...]

DOCUMENTs are paths such as docs/data.md. The default is all documents. Each document is checked in
its own directory, which contains links to the files of the project and small images. The examples
in a document are executed in order, so they can use the results of earlier ones. Training is short
(see `documents.small_form`). Two documents are checked at a time. The exit status is 1 if an example
fails. No network connection is required.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent import futures

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[number]) for number in (2, 1)]

from runtime import tensorflow_startup  # noqa: E402

tensorflow_startup.set_environment()

from support import ROOT, documents, tfds_data  # noqa: E402

_FLAGS = " ".join(documents.SETTINGS)
_IMAGES = (
    "import numpy as np\nimages = np.random.default_rng(0).random((4, 32, 32, 3), np.float32)\n\n"
)
# Commands that create files that the examples in a document read but do not create.
_PREPARATION = {
    "docs/gallery.md": "cp $(ls photos/*/*.png | head -n 1) photos/a.jpg",
    "docs/pytorch.md": "python -m export torch --checkpoint=MODEL --out=resnet50.safetensors",
    "docs/saved_models.md": "cp new_photos/0000.png a.jpg && cp new_photos/0001.png b.jpg",
    "docs/studies.md": (
        "python -m paper.tables commands heads color --scale=small --flags=--data_dir=DATA |"
        " grep -E 'resnet10_(762ab628|f430b944)$' |"
        f' while read -r line; do eval "$line {_FLAGS}" || exit 1; done'
    ),
}
# Content of CSV files for `python -m paper.figures`. Creating them with `python -m paper.tables`
# would take hours.
_CSV = (
    "accuracy,top-5,epochs,batch_size,scaling,learning_rate,temperature,training,network,million"
    " parameters,group\n"
    "0.5,0.9,100,512,sqrt,1,0.5,long,R18,11,SimCLR\n0.6,0.9,200,512,sqrt,1,0.5,long,R50,24,SimCLR\n"
)


class Checker:
    """Executes examples. The working directories, the data and a pretrained network are in `directory`."""

    def __init__(self, directory):
        self._directory = directory
        self._data, self._model = directory / "tfds", directory / "model" / "run"
        self._environment = {
            **os.environ,
            "TFDS_DATA_DIR": str(self._data),
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        }

    def _make_directory(self, name):
        """Creates a working directory with links to the files of the project."""
        path = self._directory / re.sub(r"\W", "_", name)
        path.mkdir()
        for file in ROOT.iterdir():
            if file.name == "docs":  # `python -m paper.tables report` writes to this directory.
                shutil.copytree(file, path / file.name)
            elif file.name not in ("runs", "figures") and not file.name.startswith("."):
                (path / file.name).symlink_to(file)
        return path

    def prepare(self):
        """Creates the data sets, writes images with the code of docs/own_images.md, and pretrains a network."""
        tfds_data.write_tfds("cifar10", self._data, train=2000, test=100)
        tfds_data.write_tfds("food101", self._data, train=303, validation=101)
        path = self._make_directory("model")
        writer = next(
            example
            for example in documents.find_examples("docs/own_images.md")
            if "tfds.load" in example.text
        )
        flags = f"{_FLAGS} {' '.join(documents.MODEL_SETTINGS)}"
        train = (
            "python run.py --flagfile=paper/recipes/own_images.cfg --dataset=folder:photos"
            " --model_dir=run"
        )
        if not (
            self._execute("images", path, [sys.executable, "-c", writer.text])
            and self._execute("model", path, ["bash", "-c", f"{train} {flags}"])
        ):
            raise SystemExit("the images and the network for the checks cannot be created")

    def check(self, document):
        """Executes the examples in a document. Returns those that fail."""
        examples = [example for example in documents.find_examples(document) if not example.reasons]
        if not examples:
            return []
        path, failed = self._make_directory(document), []
        for name in ("photos", "new_photos", "labeled_photos"):
            shutil.copytree(self._directory / "model" / name, path / name)
        if document in _PREPARATION:
            text = (
                _PREPARATION[document]
                .replace("MODEL", str(self._model))
                .replace("DATA", str(self._data))
            )
            if not self._execute(f"{document}: preparation", path, ["bash", "-c", text]):
                return [f"{document}: preparation"]
        for example in examples:
            text = documents.small_form(example, self._model, self._data)
            for file in re.findall(r"--csv=(\S+)", text):
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                if not (path / file).exists():
                    (path / file).write_text(_CSV)
            command = (
                [sys.executable, "-c", _IMAGES + text]
                if example.is_python
                else ["bash", "-c", text]
            )
            if not self._execute(str(example), path, command):
                failed.append(str(example))
        return failed

    def _execute(self, name, path, command):
        """Executes a command, logs its duration, and returns whether it succeeded. Logs its output if it fails."""
        begin = time.monotonic()
        process = subprocess.run(
            command,
            cwd=path,
            env=self._environment,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines = [
            f"{name}: status {process.returncode}, {time.monotonic() - begin:.0f} s",
            *command[-1].removeprefix(_IMAGES).splitlines(),
        ]
        print(
            "\n    ".join(
                [*lines, *(process.stdout.splitlines()[-20:] if process.returncode else [])]
            ),
            flush=True,
        )
        return process.returncode == 0


def main():
    """Checks the given documents, or all documents."""
    # Start with the longest documents, so that both threads finish at about the same time.
    selected = sorted(
        sys.argv[1:] or documents.DOCUMENTS,
        key=lambda document: len(documents.find_examples(document)),
        reverse=True,
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, futures.ThreadPoolExecutor(2) as pool:
        checker = Checker(pathlib.Path(directory))
        checker.prepare()
        failed = [name for names in pool.map(checker.check, selected) for name in names]
    print(
        f"{len(failed)} failed, {(time.monotonic() - begin) / 60:.0f} minutes",
        *failed,
        sep="\n    ",
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
