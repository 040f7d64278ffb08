"""DisPFL: decentralised; a sparse model of each client's own."""

from fedntk.clients import DisPFLClient
from fedntk.strategies import DisPFL

from .decentralised import DecentralisedMethod


class _DisPFL(DecentralisedMethod):
    name = "dispfl"
    strategy_class = DisPFL
    client_class = DisPFLClient
    baseline = True
    headline = "client-accuracy-mean"
    metrics = (*DecentralisedMethod.metrics, "mask-density", "mask-changed")


METHOD = _DisPFL()
