"""Checkpoints and run directories: reading SimCLR weights of any format, restoring, saving and locking."""
