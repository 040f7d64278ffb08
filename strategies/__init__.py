"""The server half of each method: Flower strategies on the Message API."""

from .cp_ntk_fl import CPNTKFL
from .ntk_fl import DEFAULT_STEPS, NTKFL, Selection
from .scaffold import SCAFFOLD
from .seeded_fedavg import SeededFedAvg
from .tct import TCT, ConvexOptimizer

__all__ = [
    "CPNTKFL",
    "DEFAULT_STEPS",
    "NTKFL",
    "SCAFFOLD",
    "TCT",
    "ConvexOptimizer",
    "SeededFedAvg",
    "Selection",
]
