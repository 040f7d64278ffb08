"""FedAvg, and FedProx: Flower's, reproducible and safe from bad replies."""

from fedntk.clients import SGDClient
from fedntk.strategies import SeededFedAvg

from ..config.settings import Settings
from .method import Method

__all__ = ["METHOD"]


class _FedAvg(Method[Settings]):
    name = "fedavg"
    strategy_class = SeededFedAvg
    client_class = SGDClient
    baseline = True
    apart = frozenset({"proximal_mu"})


METHOD = _FedAvg()
