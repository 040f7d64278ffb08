"""Least squares in tangent features: local steps, ridge regression, the predictor."""

from .local_steps import (
    Spectrum,
    centred_targets,
    convex_loss,
    geometric_sums,
    looped_steps,
    mean_gradient,
    residual_sum,
)
from .ridge import pooled_ridge, ridge_regression
from .tct_model import TCTModel

__all__ = [
    "Spectrum",
    "TCTModel",
    "centred_targets",
    "convex_loss",
    "geometric_sums",
    "looped_steps",
    "mean_gradient",
    "pooled_ridge",
    "residual_sum",
    "ridge_regression",
]
