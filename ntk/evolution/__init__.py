"""Linearised networks under gradient flow, and the choice of how far to follow it."""

from .candidates import stack_candidates, unstack_candidates
from .gradient_flow import Evolution, evolve

__all__ = ["Evolution", "evolve", "stack_candidates", "unstack_candidates"]
