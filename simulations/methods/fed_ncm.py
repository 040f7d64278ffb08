"""FedNCM: the classifier of the nearest class mean, from class means, in one exchange."""

from dataclasses import dataclass
from typing import Any

from fedntk.strategies import BaseStrategy, FedNCM

from .closed_form import ClosedFormMethod, ClosedFormSettings
from .method import Setup

__all__ = ["METHOD"]


@dataclass(frozen=True, kw_only=True)
class FedNCMSettings(ClosedFormSettings):
    """Settings of FedNCM."""

    table = "fed-ncm"


class _FedNCM(ClosedFormMethod[FedNCMSettings]):
    name = "fed-ncm"
    settings = FedNCMSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        return FedNCM(network=setup.network, head=self.own(setup.config).head, **options)


METHOD = _FedNCM()
