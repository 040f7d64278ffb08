"""DFedAvg and DFedAvgM: local epochs of SGD, then an average with the neighbours.

Source: Sun, Li and Wang, *Decentralized Federated Averaging*, IEEE Transactions on Pattern Analysis
and Machine Intelligence 45, 2023 (arXiv 2104.11375). In round k client i has the weights x_i, the
examples of F_i, and the mixing matrix W:

    z_i = E epochs of SGD with momentum on F_i, begun at x_i without momentum
    x_i <- sum over j of W_ij z_j

The paper's W is symmetric and doubly stochastic; by default here it goes by examples, as in the
comparison of Thompson et al., *NTK-DFL*, ICML 2025. Its quantisation is not here.

Two exchanges a round: ``train``, in which clients send z_i, and ``average``. Each further gossip
step, as of Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML
2023, is another average of the averages, and one more exchange.
"""

from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord

from .gossip import GossipStrategy
from .relay import Step

__all__ = ["DFedAvg"]


class DFedAvg(GossipStrategy):
    """DFedAvg, and with the clients' momentum DFedAvgM (Sun, Li and Wang 2023).

    Clients are :class:`~fedntk.clients.DFedAvgClient`, which have epochs, batches, learning rate
    and momentum. One local epoch, as a comparison may have it for D-PSGD, is this method with
    ``local_epochs=1``; :class:`~fedntk.strategies.DPSGD` has the other order.

    Parameters
    ----------
    gossip_steps : int
        Averages in a round, of which each is an exchange: W^Q for W. 1 in the paper.
    **options
        Of :class:`~fedntk.strategies.GossipStrategy` (mixing, learning_rate_factor, same_weights),
        of :class:`~fedntk.strategies.RelayStrategy` (topology, collect), of
        :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> [step.name for step in DFedAvg(mixing="metropolis").steps(first=True)]
    ['train', 'average']
    """

    client = "DFedAvgClient"
    ends_with = "averaged"

    def __init__(self, *, gossip_steps: int = 1, **options: Any) -> None:
        super().__init__(**options)
        if gossip_steps < 1:
            raise ValueError(f"gossip_steps: expected at least 1, got {gossip_steps}")
        self.gossip_steps = gossip_steps

    def settings(self) -> dict[str, Any]:
        """Add the number of averages."""
        return {**super().settings(), "gossip_steps": self.gossip_steps}

    def steps(self, *, first: bool) -> Sequence[Step]:
        """Return the exchanges: trained weights, then their averages."""
        del first
        return [Step("train"), *(Step("average", k) for k in range(self.gossip_steps))]

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add the number of averages."""
        super().prepare_config(config, server_round)
        config["gossip-steps"] = self.gossip_steps
