"""FedPer: FedAvg in which the last layer stays with the clients."""

from fedntk.clients import PersonalisedClient
from fedntk.strategies import FedPer

from .personal import PersonalMethod

__all__ = ["METHOD"]


class _FedPer(PersonalMethod):
    name = "fed-per"
    strategy_class = FedPer
    client_class = PersonalisedClient
    baseline = True


METHOD = _FedPer()
