"""NTK-based federated learning for Flower; the rooms are ``fedntk.ntk``, ``.strategies`` and so on.

The package imports nothing by itself, so that ``fedntk.ntk`` needs torch and NumPy alone.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
