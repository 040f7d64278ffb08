"""DFedSAM: decentralised; local steps along the gradient at the sharpest point nearby."""

from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import DFedSAMClient
from fedntk.strategies import BaseStrategy, DFedSAM

from ..config.settings import setting
from .decentralised import GossipMethod, GossipSettings
from .method import Setup

__all__ = ["METHOD"]


class DFedSAMSettings(GossipSettings, frozen=True, eq=True):
    """Settings of DFedSAM."""

    table = "dfedsam"

    rho: float = setting(0.01, "radius of the sharpest point; 0: DFedAvg", at_least=0)
    gossip_steps: int = setting(1, "averages in a round, an exchange each", at_least=1)
    learning_rate_factor: float = setting(
        0.95, "in round k the learning rate is multiplied by factor^(k - 1)", above=0
    )


class _DFedSAM(GossipMethod[DFedSAMSettings]):
    name = "dfedsam"
    settings = DFedSAMSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return DFedSAM(gossip_steps=own.gossip_steps, **self.shared(setup), **options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return DFedSAMClient(rho=self.own(setup.config).rho, **self.of_clients(setup), **options)


METHOD = _DFedSAM()
