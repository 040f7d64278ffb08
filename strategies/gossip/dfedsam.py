"""DFedSAM: DFedAvg whose local steps go along the gradient at the sharpest point nearby.

Source: Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML
2023, algorithm 1 (DFedSAM and, with several gossip steps, DFedSAM-MGS). The step is that of Foret
et al., *Sharpness-Aware Minimization for Efficiently Improving Generalization*, ICLR 2021, eq. (2)
and (3): g is the gradient of a batch at y, and the step goes along its gradient at

    y + rho g / ||g||
"""

from typing import Any

from .dfedavg import DFedAvg

__all__ = ["DFedSAM"]


class DFedSAM(DFedAvg):
    """DFedSAM (Shi et al. 2023). Clients are :class:`~fedntk.clients.DFedSAMClient`, with rho.

    Parameters
    ----------
    learning_rate_factor : float
        In round k the clients' learning rate is multiplied by factor^(k - 1). 0.95 in the
        comparison of Thompson et al. 2025, appendix C.2; 1 means none.
    **options
        Of :class:`~fedntk.strategies.DFedAvg` (gossip_steps, mixing, same_weights and the rest).

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> DFedSAM().learning_rate_factor
    0.95
    """

    client = "DFedSAMClient"

    def __init__(self, *, learning_rate_factor: float = 0.95, **options: Any) -> None:
        super().__init__(learning_rate_factor=learning_rate_factor, **options)
