"""Evaluation of a frozen encoder: feature extraction, logistic regression, nearest neighbors."""
