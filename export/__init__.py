"""Export: SavedModels, model cards and TF Hub archives."""
