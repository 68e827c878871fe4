"""Utilities that are not specific to SimCLR: errors, console, devices, workers, signals, processes and files."""
