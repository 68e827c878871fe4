"""Inference with exported SavedModels: embeddings and class predictions."""
