"""Flag values that are separate from those of the process."""

from absl import flags

import config as config_lib


def make_flags():
    values = flags.FlagValues()
    config_lib.define_flags(values)
    return values
