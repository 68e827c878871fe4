"""Flag values that are independent of the process's global flags."""

from absl import flags

import config as config_lib


def make_flags():
    values = flags.FlagValues()
    config_lib.define_flags(values)
    return values
