"""The server half of each method: Flower strategies on the Message API."""

from .cp_ntk_fl import CPNTKFL
from .ntk_fl import DEFAULT_STEPS, NTKFL, Selection
from .seeded_fedavg import SeededFedAvg

__all__ = [
    "CPNTKFL",
    "DEFAULT_STEPS",
    "NTKFL",
    "SeededFedAvg",
    "Selection",
]
