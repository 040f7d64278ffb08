"""Local training: no communication, a network for each client."""

from fedntk.clients import PersonalisedClient
from fedntk.strategies import LocalTraining

from .personal import PersonalMethod

__all__ = ["METHOD"]


class _LocalTraining(PersonalMethod):
    name = "local-training"
    strategy_class = LocalTraining
    client_class = PersonalisedClient
    baseline = True
    learns_on_server = False


METHOD = _LocalTraining()
