"""Fed3R: the last layer by ridge regression, from sums of features, in one exchange."""

from dataclasses import dataclass
from typing import Any

from fedntk.strategies import BaseStrategy, Fed3R

from ..config.settings import setting
from .closed_form import ClosedFormMethod, ClosedFormSettings
from .method import Setup

__all__ = ["METHOD"]


@dataclass(frozen=True, kw_only=True)
class Fed3RSettings(ClosedFormSettings):
    """Settings of Fed3R."""

    table = "fed3r"

    ridge: float = setting(0.01, "lambda over the examples' mean squared norm", above=0)


class _Fed3R(ClosedFormMethod[Fed3RSettings]):
    name = "fed3r"
    settings = Fed3RSettings

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return Fed3R(network=setup.network, head=own.head, ridge=own.ridge, **options)


METHOD = _Fed3R()
