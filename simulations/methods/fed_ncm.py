"""FedNCM: class means as the last layer, in one exchange."""

from fedntk.clients import ClosedFormClient
from fedntk.strategies import FedNCM

from ..config.settings import Settings
from .method import Method

__all__ = ["METHOD"]


class _FedNCM(Method[Settings]):
    name = "fed-ncm"
    strategy_class = FedNCM
    client_class = ClosedFormClient
    baseline = True


METHOD = _FedNCM()
