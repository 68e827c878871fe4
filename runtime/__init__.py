"""Utilities that are not specific to SimCLR: errors, console, devices, hosts, signals, processes and files."""
