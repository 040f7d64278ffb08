"""DFedSAM: decentralised; local steps along the gradient at the sharpest point nearby."""

from fedntk.clients import DFedSAMClient
from fedntk.strategies import DFedSAM

from .decentralised import DecentralisedMethod


class _DFedSAM(DecentralisedMethod):
    name = "dfedsam"
    strategy_class = DFedSAM
    client_class = DFedSAMClient
    baseline = True


METHOD = _DFedSAM()
