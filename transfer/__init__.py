"""Transfer learning: evaluates an encoder on other data sets (paper, 4.3 and B.8)."""
