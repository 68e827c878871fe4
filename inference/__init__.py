"""Inference with exported SavedModels: embeddings and class predictions."""

import runtime as runtime  # Checks that the dependencies are installed.
