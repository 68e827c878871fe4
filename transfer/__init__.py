"""Transfer of an encoder to other data sets (paper, 4.3 and B.8)."""
