"""DFedAvg and DFedAvgM: decentralised; local SGD, then averages with neighbours."""

from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import DFedAvgClient
from fedntk.strategies import BaseStrategy, DFedAvg

from ..config.settings import setting
from .decentralised import GossipMethod, GossipSettings
from .method import Setup

__all__ = ["METHOD"]


class DFedAvgSettings(GossipSettings, frozen=True, eq=True):
    """Settings of DFedAvg."""

    table = "dfedavg"

    gossip_steps: int = setting(1, "averages in a round, an exchange each", at_least=1)


class _DFedAvg(GossipMethod[DFedAvgSettings]):
    name = "dfedavg"
    settings = DFedAvgSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return DFedAvg(gossip_steps=own.gossip_steps, **self.shared(setup), **options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return DFedAvgClient(**self.of_clients(setup), **options)


METHOD = _DFedAvg()
