"""Checkpoints and run directories: reading SimCLR weights in any supported format, restoring, saving and locking."""
