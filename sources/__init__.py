"""Data sets (TFDS, image folders, scikit-learn's `digits`), image file checks, and class-balanced subsets."""
