"""The server half of each method: Flower strategies on the Message API."""

from .ntk_fl import DEFAULT_STEPS, NTKFL, Selection
from .seeded_fedavg import SeededFedAvg

__all__ = ["DEFAULT_STEPS", "NTKFL", "SeededFedAvg", "Selection"]
