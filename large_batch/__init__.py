"""Exact NT-Xent and gradients for batches that do not fit into memory; enabled by flags."""
