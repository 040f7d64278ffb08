"""Linearised networks under gradient flow, and the choice of how far to follow it."""
