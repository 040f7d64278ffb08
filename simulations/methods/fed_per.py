"""FedPer: FedAvg in which the last layer stays with the clients."""

from typing import Any

from fedntk.strategies import BaseStrategy, FedPer

from ..config.settings import Settings, setting
from .method import Setup
from .personal import PersonalMethod

__all__ = ["METHOD"]


class FedPerSettings(Settings, frozen=True, eq=True):
    """Settings of FedPer."""

    table = "fed-per"

    head: str = setting("", "layer that stays with the clients; the last linear one by default")


class _FedPer(PersonalMethod[FedPerSettings]):
    name = "fed-per"
    settings = FedPerSettings
    baseline = True

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return FedPer(network=setup.network, head=self.own(setup.config).head, **options)


METHOD = _FedPer()
