"""Fed3R: the last layer by ridge regression, from sums of features, in one exchange."""

from fedntk.clients import ClosedFormClient
from fedntk.strategies import Fed3R

from ..config.settings import Settings
from .method import Method

__all__ = ["METHOD"]


class _Fed3R(Method[Settings]):
    name = "fed3r"
    strategy_class = Fed3R
    client_class = ClosedFormClient
    baseline = True


METHOD = _Fed3R()
