"""The methods, found by :mod:`fedntk.simulations.config.registry`."""

from ..config.registry import all_methods, own_methods

__all__ = ["all_methods", "own_methods"]
