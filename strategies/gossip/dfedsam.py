"""DFedSAM: DFedAvg with local steps along the gradient at the sharpest point nearby.

Source: Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML
2023, algorithm 1 (DFedSAM and, with several gossip steps, DFedSAM-MGS). The step is that of Foret
et al., *Sharpness-Aware Minimization for Efficiently Improving Generalization*, ICLR 2021, eq. (2)
and (3): g is the gradient of a batch at y, and the step goes along its gradient at

    y + rho g / ||g||
"""

from fedntk.ntk.options import shared
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from .dfedavg import train_and_average
from .relay import RelayStrategy, Step


class DFedSAM(DFedAvgOptions, RelayStrategy):
    """DFedSAM (Shi et al. 2023). Clients are :class:`~fedntk.clients.DFedSAMClient`, with rho."""

    client = "DFedSAMClient"

    learning_rate_factor: float = shared(
        "in round k the learning rate is multiplied by factor^(k - 1)", default=0.95, above=0
    )

    def plan(self, *, first: bool) -> list[Step]:
        """Return the exchanges: trained weights, then their averages."""
        return train_and_average(self.gossip_steps)
