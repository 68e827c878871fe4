"""Transfer learning: evaluates an encoder on other data sets (paper, sections 6 and B.8)."""
