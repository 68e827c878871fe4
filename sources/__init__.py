"""Data sets (TFDS, image folders, scikit-learn's `digits`), image file checks, and class-balanced subsets.

To add a source, implement `source.Source` (`TfdsSource` reads sequentially, `IndexedSource` has
random access), and add it to `datasets.open_source`.
"""
