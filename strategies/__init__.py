"""The server half of each method: Flower strategies on the Message API."""

import fedntk.ntk  # noqa: F401 - before torch: how its threads wait

from .base import BaseStrategy
from .cp_ntk_fl import CPNTKFL
from .fed_be import FedBE
from .fed_be_distillation import Distillation
from .fed_ensemble import FedEnsemble
from .fedavg import SeededFedAvg
from .inner import CheckedStrategy
from .ntk_fl import DEFAULT_STEPS, NTKFL, Selection
from .replies import NoUsableReply
from .scaffold import SCAFFOLD
from .tct import TCT, ConvexOptimizer

__all__ = [
    "CPNTKFL",
    "DEFAULT_STEPS",
    "NTKFL",
    "SCAFFOLD",
    "TCT",
    "BaseStrategy",
    "CheckedStrategy",
    "ConvexOptimizer",
    "Distillation",
    "FedBE",
    "FedEnsemble",
    "NoUsableReply",
    "SeededFedAvg",
    "Selection",
]
