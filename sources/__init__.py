"""Sources of examples: TFDS, folders of images, and the embedded data set `digits`."""
