"""Data sets: TFDS, image folders, and the embedded `digits`; image file checks; class-balanced subsets."""
