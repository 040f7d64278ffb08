"""Least squares in tangent features: local steps, ridge regression, pooled sums, the predictor."""

from ..predictors.tct_model import TCTModel
from .local_steps import (
    Spectrum,
    centred_targets,
    convex_loss,
    geometric_sums,
    looped_steps,
    mean_gradient,
    residual_sum,
)
from .pooled_statistics import RIDGES, NormalEquations, best_ridge, class_weights, normaliser_of
from .ridge import pooled_ridge, ridge_regression

__all__ = [
    "RIDGES",
    "NormalEquations",
    "Spectrum",
    "TCTModel",
    "best_ridge",
    "centred_targets",
    "class_weights",
    "convex_loss",
    "geometric_sums",
    "looped_steps",
    "mean_gradient",
    "normaliser_of",
    "pooled_ridge",
    "residual_sum",
    "ridge_regression",
]
