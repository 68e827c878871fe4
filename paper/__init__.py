"""The paper's numbers and studies as data, execution of the studies, figures, and a report."""
