"""The one import of Flower's NumPyClient.

Flower keeps the class for compatibility and has moved it before. All other files import it from
here. Users may subclass Flower's class: it is the same one.
"""

from flwr.client import NumPyClient

__all__ = ["NumPyClient"]
