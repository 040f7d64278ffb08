"""D-PSGD: decentralised; averages with neighbours, and one's own steps."""

from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import DPSGDClient
from fedntk.strategies import DPSGD, BaseStrategy

from .decentralised import GossipMethod, GossipSettings
from .method import Setup

__all__ = ["METHOD"]


class DPSGDSettings(GossipSettings, frozen=True, eq=True):
    """Settings of D-PSGD."""

    table = "d-psgd"


class _DPSGD(GossipMethod[DPSGDSettings]):
    name = "d-psgd"
    settings = DPSGDSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return DPSGD(**self.shared(setup), **options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return DPSGDClient(**self.of_clients(setup), **options)


METHOD = _DPSGD()
