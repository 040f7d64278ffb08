"""AFL: the last layer by least squares, from sums of features, in one exchange."""

from dataclasses import dataclass
from typing import Any

from fedntk.strategies import AFL, BaseStrategy

from ..config.settings import setting
from .closed_form import ClosedFormMethod, ClosedFormSettings
from .method import Setup

__all__ = ["METHOD"]


@dataclass(frozen=True, kw_only=True)
class AFLSettings(ClosedFormSettings):
    """Settings of AFL."""

    table = "afl"

    ridge: float = setting(
        0.0, "of the joint problem, over the examples' mean squared norm; 0: none", at_least=0
    )


class _AFL(ClosedFormMethod[AFLSettings]):
    name = "afl"
    settings = AFLSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return AFL(network=setup.network, head=own.head, ridge=own.ridge, **options)


METHOD = _AFL()
