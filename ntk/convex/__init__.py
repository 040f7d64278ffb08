"""Least squares in tangent features: local steps, ridge regression, pooled sums."""
