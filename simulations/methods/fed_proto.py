"""FedProto: clients keep their networks, and share class prototypes."""

from typing import Any, Literal

from flwr.client import NumPyClient

from fedntk.clients import FedProtoClient
from fedntk.strategies import BaseStrategy, FedProto

from ..config.settings import Settings, setting
from .method import Setup
from .personal import PersonalMethod, personal_cache

__all__ = ["METHOD"]


class FedProtoSettings(Settings, frozen=True, eq=True):
    """Settings of FedProto."""

    table = "fed-proto"

    pull: float = setting(
        1.0,
        "lambda: how strongly features are drawn to the global prototypes; 0: local training",
        at_least=0,
    )
    predict: Literal["prototype", "head"] = setting(
        "prototype",
        "what clients evaluate: prototype: the nearest global one; head: their own last layer",
    )
    head: str = setting("", "layer before which features are taken; the last linear one by default")


class _FedProto(PersonalMethod[FedProtoSettings]):
    name = "fed-proto"
    settings = FedProtoSettings
    baseline = True
    learns_on_server = False

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return FedProto(network=setup.network, head=self.own(setup.config).head, **options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        own, config = self.own(setup.config), setup.config
        return FedProtoClient(
            pull=own.pull,
            predict=own.predict,
            cache=personal_cache(config),
            **config.local_sgd,
            **options,
        )


METHOD = _FedProto()
