"""Linearised networks under gradient flow, and the choice of how far to follow it."""

from .candidates import Candidates, lowest_loss, mean_losses, median_losses, unstack_candidates
from .flow_options import FlowOptions, Kernel
from .gradient_flow import GradientFlow
from .learning_rate import AUTO, AUTO_STEPS
from .solver import SolverStep

__all__ = [
    "AUTO",
    "AUTO_STEPS",
    "Candidates",
    "FlowOptions",
    "GradientFlow",
    "Kernel",
    "SolverStep",
    "lowest_loss",
    "mean_losses",
    "median_losses",
    "unstack_candidates",
]
