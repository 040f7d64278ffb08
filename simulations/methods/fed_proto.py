"""FedProto: clients keep their networks, and share class prototypes."""

from fedntk.clients import FedProtoClient
from fedntk.strategies import FedProto

from .personal import PersonalMethod

__all__ = ["METHOD"]


class _FedProto(PersonalMethod):
    name = "fed-proto"
    strategy_class = FedProto
    client_class = FedProtoClient
    baseline = True
    learns_on_server = False


METHOD = _FedProto()
