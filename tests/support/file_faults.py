"""Short runs in which a chosen file operation fails, or kills the process; see file_faults.c.

The module is also the program that executes the runs: `python tests/support/file_faults.py`. It
imports TensorFlow once, and forks a process for each line of JSON with the arguments of a run.
"""

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILL = 0


class Runs:
    """Starts runs; see the module's docstring."""

    def __init__(self, directory, settings):
        """Compiles the library in `directory`. Raises `FileNotFoundError` if there is no C compiler.

        `settings` is a dict with the settings of all runs.
        """
        self._settings = settings
        if not shutil.which("cc"):
            raise FileNotFoundError("cc")
        source, library = pathlib.Path(__file__).with_suffix(".c"), f"{directory}/file_faults.so"
        command = ["cc", "-shared", "-fPIC", "-w", "-o", library, source, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        self.log = pathlib.Path(directory, "runs.log")
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "LD_PRELOAD": library},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, model_dir, match="*", at=0, action=KILL, trace="", **settings):
        """Runs in `model_dir`, and returns the exit status (-9 if killed) and the number of operations.

        Args:
          model_dir: directory whose operations are watched.
          match: pattern of the operations that are counted.
          at: number of the operation at which `action` takes place; 0: never.
          action: `KILL`, or the errno with which the operation fails.
          trace: directory for the operations and the synced contents.
          **settings: changes to the settings, and `umask`.
        """
        arguments = [str(model_dir), match, at, action, str(trace)]
        settings = {**self._settings, "model_dir": str(model_dir), **settings}
        self._process.stdin.write(json.dumps([arguments, settings]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        """Stops the program."""
        self._process.stdin.close()
        self._process.wait()


def _serve():
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from runtime import tensorflow_startup

    tensorflow_startup.set_environment()
    import tensorflow as tf

    import resnet
    import run as run_lib
    from checkpoints import training_log
    from config import Config
    from runtime import command_line
    from support import networks

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    resnet.DEPTHS[10] = (False, ())
    training_log.draw_curves = lambda *_: b"curves"
    networks.replace_exports()
    networks.replace_untrained_network()
    gc.freeze()  # The child processes share all objects.
    library = ctypes.CDLL(None)
    for line in sys.stdin:
        (model_dir, match, at, action, trace), settings = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(2, 1)
            status = 1
            os.umask(settings.pop("umask", 0o022))
            library.file_faults(model_dir.encode(), match.encode(), at, action, trace.encode())
            with contextlib.suppress(SystemExit):
                try:
                    with command_line.reporting_errors("run.py"):
                        run_lib.main(Config(**settings), ["eval_split"])
                    status = 0
                except SystemExit as error:
                    status = error.code
            os.write(writer, str(library.file_faults_count()).encode())
            os._exit(status)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        count = os.read(reader, 99)
        os.close(reader)
        print(json.dumps([os.waitstatus_to_exitcode(status), int(count or 0)]), flush=True)


if __name__ == "__main__":
    _serve()
