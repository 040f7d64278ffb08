"""Ditto: FedAvg, and beside it a model of each client's own, held near the global one."""

from fedntk.clients import DittoClient
from fedntk.strategies import Ditto

from .personal import PersonalMethod

__all__ = ["METHOD"]


class _Ditto(PersonalMethod):
    name = "ditto"
    strategy_class = Ditto
    client_class = DittoClient
    baseline = True
    metrics = ("personal-loss", "restarted")


METHOD = _Ditto()
