"""FedBN: FedAvg in which BatchNorm stays with the clients."""

from fedntk.clients import PersonalisedClient
from fedntk.strategies import FedBN

from .personal import PersonalMethod

__all__ = ["METHOD"]


class _FedBN(PersonalMethod):
    name = "fed-bn"
    strategy_class = FedBN
    client_class = PersonalisedClient
    baseline = True


METHOD = _FedBN()
