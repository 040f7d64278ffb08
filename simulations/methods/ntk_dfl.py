"""NTK-DFL: decentralised; clients send each other Jacobians."""

from fedntk.clients import NTKDFLClient
from fedntk.strategies import NTKDFL

from .decentralised import DecentralisedMethod


class _NTKDFL(DecentralisedMethod):
    name = "ntk-dfl"
    strategy_class = NTKDFL
    client_class = NTKDFLClient
    apart = frozenset({"class_prior"})
    metrics = (*DecentralisedMethod.metrics, "t")


METHOD = _NTKDFL()
