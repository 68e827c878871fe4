"""Checks of error messages."""

import contextlib

import pytest

from runtime.errors import UserError


@contextlib.contextmanager
def rejects(message):
    """Checks that the block raises a `UserError`: one line that matches the regular expression `message`."""
    with pytest.raises(UserError, match=message) as error:
        yield error
    assert "\n" not in str(error.value)
