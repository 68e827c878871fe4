"""Checkpoints and the directory of a run: reading any SimCLR weights, restoring, saving, locking."""
