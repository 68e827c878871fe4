"""The paper: its numbers and studies as data, runs of them, figures, and a report."""
