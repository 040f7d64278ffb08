"""DFedAvg and DFedAvgM: decentralised; local SGD, then averages with neighbours."""

from fedntk.clients import DFedAvgClient
from fedntk.strategies import DFedAvg

from .decentralised import DecentralisedMethod


class _DFedAvg(DecentralisedMethod):
    name = "dfedavg"
    strategy_class = DFedAvg
    client_class = DFedAvgClient
    baseline = True


METHOD = _DFedAvg()
