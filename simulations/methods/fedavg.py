"""FedAvg, and with a proximal term FedProx."""

from dataclasses import dataclass
from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import SGDClient
from fedntk.strategies import BaseStrategy, SeededFedAvg

from ..config.settings import Settings, setting
from .method import Method, Setup

__all__ = ["METHOD"]


@dataclass(frozen=True, kw_only=True)
class FedAvgSettings(Settings):
    """Settings of FedAvg."""

    table = "fedavg"

    proximal_mu: float = setting(0.0, "mu of FedProx's proximal term; 0: none", at_least=0)


class _FedAvg(Method[FedAvgSettings]):
    name = "fedavg"
    settings = FedAvgSettings
    baseline = True

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        del setup
        return SeededFedAvg(**options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        own = self.own(setup.config)
        return SGDClient(proximal_mu=own.proximal_mu, **setup.config.local_sgd, **options)


METHOD = _FedAvg()
