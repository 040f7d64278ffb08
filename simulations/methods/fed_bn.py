"""FedBN: FedAvg in which BatchNorm stays with the clients."""

from typing import Any

from fedntk.strategies import BaseStrategy, FedBN

from ..config.settings import Settings
from .method import Setup
from .personal import PersonalMethod

__all__ = ["METHOD"]


class FedBNSettings(Settings, frozen=True, eq=True):
    """FedBN has no settings of its own."""

    table = "fed-bn"


class _FedBN(PersonalMethod[FedBNSettings]):
    name = "fed-bn"
    settings = FedBNSettings
    baseline = True

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return FedBN(network=setup.network, **options)


METHOD = _FedBN()
