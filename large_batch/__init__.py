"""Exact computation for batches that do not fit into memory; enabled by flags."""
