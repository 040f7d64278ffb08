"""Linearised networks under gradient flow, and the choice of how far to follow it."""

from .candidates import Candidates, lowest_loss, mean_losses, stack_candidates, unstack_candidates
from .gradient_flow import Evolution, GradientFlow, Kernel, KernelDtype, evolve
from .learning_rate import AUTO, AUTO_STEPS, largest_eigenvalue
from .solver import SolverStep

__all__ = [
    "AUTO",
    "AUTO_STEPS",
    "Candidates",
    "Evolution",
    "GradientFlow",
    "Kernel",
    "KernelDtype",
    "SolverStep",
    "evolve",
    "largest_eigenvalue",
    "lowest_loss",
    "mean_losses",
    "stack_candidates",
    "unstack_candidates",
]
