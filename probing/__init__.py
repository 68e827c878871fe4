"""Evaluation of a frozen encoder: features, logistic regression, nearest neighbors."""
