"""D-PSGD: decentralised; averages with neighbours, and one's own steps."""

from fedntk.clients import DPSGDClient
from fedntk.strategies import DPSGD

from .decentralised import DecentralisedMethod


class _DPSGD(DecentralisedMethod):
    name = "d-psgd"
    strategy_class = DPSGD
    client_class = DPSGDClient
    baseline = True


METHOD = _DPSGD()
