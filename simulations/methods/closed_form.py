"""What the methods share that compute the last layer in closed form, from sums of features."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.client import NumPyClient

from fedntk.clients import ClosedFormClient
from fedntk.ntk import FeatureMap

from ..config.settings import Settings, setting
from .method import Method, Need, Setup

__all__ = ["ClosedFormMethod", "ClosedFormSettings", "GramMethod"]


@dataclass(frozen=True, kw_only=True)
class ClosedFormSettings(Settings):
    """Settings of all of them."""

    head: str = setting("", "layer that is computed; the last linear one by default")


S = TypeVar("S", bound=ClosedFormSettings)


class ClosedFormMethod(Method[S]):
    """A method whose clients send sums of features once, and train nothing."""

    baseline = True

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make a client."""
        del setup, partition
        return ClosedFormClient(**options)


class GramMethod(ClosedFormMethod[S]):
    """One whose clients send the features' Gram matrix, too."""

    def needs(self, setup: Setup) -> Iterable[Need]:
        """Say what the Gram matrices of the clients, on this machine, and the server take."""
        feature_map = FeatureMap("last-layer", head=self.own(setup.config).head)
        width = feature_map.width(setup.network)
        clients = len(setup.split.clients)
        yield Need(
            width**2 * (36 + 12 + 8 * clients),  # an upload is there twice
            f"Gram matrices of {width} features from {clients} clients",
            "use a network with a smaller last layer, or fewer clients",
            f"model = {setup.config.model}",
        )
