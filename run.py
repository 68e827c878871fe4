"""SimCLR: pretrain, evaluate and export from the command line. `python run.py --help` lists the settings."""

from __future__ import annotations

import contextlib
import io

import config as config_lib
from runtime import command_line, console, devices, tensorflow_startup
from runtime.errors import first_line

if __name__ == "__main__":
    console.set_up()  # Before other modules keep sys.stderr, which may be closed.

from absl import app, flags

config_lib.define_flags()
flags.adopt_module_key_flags(config_lib)


def _parse_flags(argv):
    """Parses the command line with absl; errors are one line, and end the program with status 2."""
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stderr(warnings):
            rest = flags.FLAGS(argv)
    except flags.CantOpenFlagFileError as error:
        _fail(f"--flagfile: {str(error.__context__ or error)}. Check its path and permissions.")
    except flags.Error as error:
        _fail(error)
    except ValueError as error:  # absl passes on what reading a file raises.
        _fail(f"--flagfile: a flag file cannot be read as text ({first_line(error)}). Save it as UTF-8.")
    if warnings.getvalue():  # The only warning there is: a file that includes itself is ignored.
        _fail(f"--flagfile: {warnings.getvalue().strip()}. Remove the --flagfile line from it.")
    if rest[1:]:
        _fail(f"{rest[1]!r} is not a flag: settings are written --name=value")
    return rest


def _fail(message):
    """Ends the program with status 2 because of an error of the user."""
    command_line.fail("run.py", message)


def main(argv):
    """Reads the flags and runs; see `command_line.run_command` for errors."""
    del argv

    def work():
        config = config_lib.from_flags()
        with tensorflow_startup.loading_tensorflow():
            pass  # FUNCIMPORT import devices
            import experiment  # Here: TensorFlow takes seconds to load, and wrong flags are reported before that.
            devices.start_runtime(config)
        experiment.run(config, eval_split_given=flags.FLAGS["eval_split"].present > 0)

    command_line.run_command("run.py", work)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
