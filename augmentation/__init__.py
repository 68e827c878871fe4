"""The operators of the paper's studies, AutoAugment, and augmentation policies."""
