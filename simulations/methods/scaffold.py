"""SCAFFOLD: FedAvg with control variates."""

from typing import Any, Literal

from flwr.client import NumPyClient

from fedntk.clients import SCAFFOLDClient
from fedntk.strategies import SCAFFOLD, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, Settings, setting
from .method import Method, Setup

__all__ = ["METHOD"]


class SCAFFOLDSettings(Settings, frozen=True, eq=True):
    """Settings of SCAFFOLD."""

    table = "scaffold"

    option: Literal["II", "I"] = setting(
        "II",
        "a client's new control: II: mean gradient of its local steps; I: gradient of all its "
        "examples at the received weights",
    )
    server_learning_rate: float = setting(1.0, "eta_g", above=0)


class _SCAFFOLD(Method[SCAFFOLDSettings]):
    name = "scaffold"
    settings = SCAFFOLDSettings
    baseline = True

    def check(self, config: Config, settings: SCAFFOLDSettings) -> None:
        del settings
        if not config.local_epochs:
            raise ConfigError("local-epochs: expected at least 1 with method = scaffold, got 0")

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        rate = self.own(setup.config).server_learning_rate
        return SCAFFOLD(server_learning_rate=rate, **options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        own = self.own(setup.config)
        return SCAFFOLDClient(option=own.option, **setup.config.local_sgd, **options)


METHOD = _SCAFFOLD()
