"""Augmentation policies, AutoAugment, and operators for the paper's augmentation studies.

SimCLR's default operators, including the blur, are in `data_util.py`.
"""
