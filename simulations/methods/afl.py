"""AFL: the last layer by least squares, from sums of features, in one exchange."""

from fedntk.clients import ClosedFormClient
from fedntk.strategies import AFL

from ..config.settings import Settings
from .method import Method

__all__ = ["METHOD"]


class _AFL(Method[Settings]):
    name = "afl"
    strategy_class = AFL
    client_class = ClosedFormClient
    baseline = True


METHOD = _AFL()
