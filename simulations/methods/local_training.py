"""Local training: no communication, a network for each client."""

from typing import Any

from fedntk.strategies import BaseStrategy, LocalTraining

from ..config.settings import Settings
from .method import Setup
from .personal import PersonalMethod

__all__ = ["METHOD"]


class LocalTrainingSettings(Settings, frozen=True, eq=True):
    """Local training has no settings of its own."""

    table = "local-training"


class _LocalTraining(PersonalMethod[LocalTrainingSettings]):
    name = "local-training"
    settings = LocalTrainingSettings
    baseline = True
    learns_on_server = False

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        del setup
        return LocalTraining(**options)


METHOD = _LocalTraining()
