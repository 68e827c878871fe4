"""The paper's results and studies: runs the studies, plots the figures and writes a report."""
