"""Augmentation policies, AutoAugment, and operators for the paper's augmentation studies."""
