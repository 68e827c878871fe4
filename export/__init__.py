"""Exports SavedModels, model cards and TF Hub archives."""
