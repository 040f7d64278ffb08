"""What the methods share that compute the last layer in closed form, from sums of features."""

from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.client import NumPyClient

from fedntk.clients import ClosedFormClient

from ..config.settings import Settings, setting
from .method import Method, Setup

__all__ = ["ClosedFormMethod", "ClosedFormSettings"]


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
