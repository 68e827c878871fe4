"""Operators of the paper's augmentation studies, AutoAugment, and augmentation policies."""
