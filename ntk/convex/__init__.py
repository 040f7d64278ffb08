"""Least squares in tangent features: local steps, ridge regression, pooled sums."""

from .ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from .local_steps import (
    Spectrum,
    centred_targets,
    convex_loss,
    looped_steps,
    mean_gradient,
    residual_sum,
)
from .pooled_statistics import (
    RIDGES,
    NormalEquations,
    best_ridge,
    class_weights,
    normaliser_of,
    personal_model,
)
from .private_sums import SumNoise, bound_rows, solve_noisy
from .ridge import pooled_ridge, sandwiched_ridge, solve_ridge

__all__ = [
    "RIDGES",
    "ClientLedger",
    "NormalEquations",
    "Spectrum",
    "SumNoise",
    "ValidationExamples",
    "are_possible",
    "best_ridge",
    "bound_rows",
    "centred_targets",
    "class_weights",
    "convex_loss",
    "find_harmful",
    "looped_steps",
    "mean_gradient",
    "normaliser_of",
    "personal_model",
    "pooled_ridge",
    "residual_sum",
    "sandwiched_ridge",
    "solve_noisy",
    "solve_ridge",
]
