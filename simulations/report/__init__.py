"""Results, figures and the report."""
