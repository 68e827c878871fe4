"""run.py with `ram://`, TensorFlow's file system in memory, in place of `gs://`: `... --model_dir=DIRECTORY FLAGS`.

The run directory is `ram://run`. It starts with the files of the local DIRECTORY, and replaces them at
the end. Two faults of `ram://` are corrected: the common prefix of files counts as a directory, and a
file that is overwritten keeps its old contents in front of the new ones. If the environment variable
KILLED_AT is set, the process is killed after this training step, with the files that exist by then.
"""

import os
import pathlib
import runpy
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runtime import paths, tensorflow_startup  # noqa: E402

tensorflow_startup.start()

import tensorflow as tf  # noqa: E402
from tensorflow.python.lib.io import file_io  # noqa: E402

from checkpoints.training_log import TrainingLog  # noqa: E402

gfile = tf.io.gfile
REMOTE = "ram://run"
LOCAL = sys.argv[1].removeprefix("--model_dir=")
isdir, GFile, update = gfile.isdir, gfile.GFile, TrainingLog.update


def is_directory(path):
    return isdir(path) and not gfile.exists(f"{path}.index")


def open_file(path, mode="r"):
    if "w" in mode and gfile.exists(path):
        gfile.remove(path)
    return GFile(path, mode)


def copy(source, target):
    for directory, _, names in gfile.walk(source):
        place = target + directory[len(source) :]
        gfile.makedirs(place)
        for name in names:
            # assets.extra is also listed as assets/.extra.
            if gfile.exists(path := f"{directory}/{name}"):
                gfile.copy(path, f"{place}/{name}")


def save():
    gfile.rmtree(LOCAL)
    copy(REMOTE, LOCAL)


def update_and_kill(log, step, *values):
    update(log, step, *values)
    if step >= int(os.environ.get("KILLED_AT", step + 1)):
        save()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    file_io.is_directory_v2 = gfile.isdir = is_directory
    gfile.GFile, TrainingLog.update = open_file, update_and_kill
    paths.REMOTE_SCHEMES = ("ram",)
    gfile.makedirs(LOCAL)
    copy(LOCAL, REMOTE)
    sys.argv.append(f"--model_dir={REMOTE}")
    try:
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
    finally:
        save()
