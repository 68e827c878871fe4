"""Exact NT-Xent loss and gradients for batches that do not fit in memory."""
