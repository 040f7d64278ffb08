"""DFedSAM: DFedAvg with local steps along the gradient at the sharpest point nearby.

Source: Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML
2023, algorithm 1 (DFedSAM and, with several gossip steps, DFedSAM-MGS). The step is that of Foret
et al., *Sharpness-Aware Minimization for Efficiently Improving Generalization*, ICLR 2021, eq. (2)
and (3): g is the gradient of a batch at y, and the step goes along its gradient at

    y + rho g / ||g||
"""

from fedntk.ntk.options import shared

from .dfedavg import DFedAvg


class DFedSAM(DFedAvg):
    """DFedSAM (Shi et al. 2023). Clients are :class:`~fedntk.clients.DFedSAMClient`, with rho."""

    client = "DFedSAMClient"

    learning_rate_factor: float = shared(
        "in round k the learning rate is multiplied by factor^(k - 1); 0.95 in the comparison of "
        "Thompson et al. 2025, appendix C.2",
        default=0.95,
        above=0,
    )
