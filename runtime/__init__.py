"""Utilities independent of SimCLR: errors, console, devices, hosts, signals, child processes, files, random numbers."""
