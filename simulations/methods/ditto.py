"""Ditto: FedAvg, and beside it a model of each client's own, held near the global one."""

from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import DittoClient
from fedntk.strategies import BaseStrategy, Ditto

from ..config.settings import Settings, setting
from .method import Setup
from .personal import PersonalMethod, personal_cache

__all__ = ["METHOD"]


class DittoSettings(Settings, frozen=True, eq=True):
    """Settings of Ditto."""

    table = "ditto"

    pull: float = setting(
        1.0,
        "lambda: how strongly a client's model is pulled to the global one; 0: local training",
        at_least=0,
    )
    personal_epochs: int = setting(
        0, "passes that train a client's own model; 0: as many as local-epochs", at_least=0
    )


class _Ditto(PersonalMethod[DittoSettings]):
    name = "ditto"
    settings = DittoSettings
    baseline = True
    metrics = ("personal-loss", "restarted")

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        del setup
        return Ditto(**options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        own, config = self.own(setup.config), setup.config
        return DittoClient(
            pull=own.pull,
            personal_epochs=own.personal_epochs,
            cache=personal_cache(config),
            **config.local_sgd,
            **options,
        )


METHOD = _Ditto()
