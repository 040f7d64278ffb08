"""SCAFFOLD: FedAvg with control variates."""

from fedntk.clients import SCAFFOLDClient
from fedntk.strategies import SCAFFOLD

from ..config.settings import Settings
from .method import Method

__all__ = ["METHOD"]


class _SCAFFOLD(Method[Settings]):
    name = "scaffold"
    strategy_class = SCAFFOLD
    client_class = SCAFFOLDClient
    baseline = True


METHOD = _SCAFFOLD()
