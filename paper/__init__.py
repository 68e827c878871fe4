"""Reproduces the paper's results: runs its studies, plots its figures and writes a report."""
