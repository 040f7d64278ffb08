"""Linearised networks under gradient flow, and the choice of how far to follow it."""

from .candidates import (
    Candidates,
    lowest_loss,
    mean_losses,
    stack_candidates,
    unstack_candidates,
)
from .gradient_flow import Evolution, GradientFlow, evolve

__all__ = [
    "Candidates",
    "Evolution",
    "GradientFlow",
    "evolve",
    "lowest_loss",
    "mean_losses",
    "stack_candidates",
    "unstack_candidates",
]
