"""Transfer learning: evaluates an encoder on other data sets (paper, section 6 and B.8)."""
