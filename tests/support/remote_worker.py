"""run.py as it is, except that `ram://`, TensorFlow's file system in memory, takes the place of `gs://`.

    python tests/support/remote_worker.py DIRECTORY KILLED_AT FLAGS...

`ram://run` starts with the files of the local DIRECTORY, to which they are copied back at the end. If
KILLED_AT is not 0, the process is killed after this training step, with the files that exist by then.
Two faults of `ram://` are corrected: the common prefix of files counts as a directory, and a file that
is overwritten keeps its old contents in front of the new ones.
"""

import os
import pathlib
import runpy
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runtime import paths, tensorflow_startup  # noqa: E402

paths.REMOTE_SCHEMES = ("ram",)
tensorflow_startup.start()

import tensorflow as tf  # noqa: E402
from tensorflow.python.lib.io import file_io  # noqa: E402

from checkpoints.training_log import TrainingLog  # noqa: E402

_REMOTE = "ram://run"
_isdir, _GFile, _update = tf.io.gfile.isdir, tf.io.gfile.GFile, TrainingLog.update


def _is_directory(path):
    return _isdir(path) and not tf.io.gfile.exists(f"{path}.index")


def _open(path, mode="r"):
    if "w" in mode and tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
    return _GFile(path, mode)


def _copy(source, target):
    for directory, _, names in tf.io.gfile.walk(source):
        place = target + directory[len(source) :]
        tf.io.gfile.makedirs(place)
        for name in names:
            if tf.io.gfile.exists(
                path := f"{directory}/{name}"
            ):  # assets.extra is also listed as assets/.extra.
                tf.io.gfile.copy(path, f"{place}/{name}", overwrite=True)


if __name__ == "__main__":
    local, killed_at, *arguments = sys.argv[1:]

    def save():
        tf.io.gfile.rmtree(local)
        _copy(_REMOTE, local)

    def update(log, step, *values):
        """Shows the progress, as before, and then kills the process if this is the step."""
        _update(log, step, *values)
        if 0 < int(killed_at) <= step:
            save()
            os.kill(os.getpid(), signal.SIGKILL)

    file_io.is_directory_v2 = tf.io.gfile.isdir = _is_directory
    tf.io.gfile.GFile = _open
    TrainingLog.update = update
    # Graph optimization takes more time than it saves.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    _copy(local, _REMOTE)
    sys.argv = ["run.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
    finally:
        save()
