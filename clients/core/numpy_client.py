"""The one import of Flower's NumPyClient, which is kept for compatibility and has moved before."""

from flwr.client import NumPyClient

__all__ = ["NumPyClient"]
