"""Export: SavedModels, model cards and archives for TF Hub."""
