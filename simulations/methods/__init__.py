"""The methods, by name."""

from .table import all_methods, find_method, own_methods, require_importable_method

__all__ = ["all_methods", "find_method", "own_methods", "require_importable_method"]
