"""Reproduces the paper's results: runs its studies, plots its figures and writes a report."""

import runtime as runtime  # Checks that the dependencies are installed.
