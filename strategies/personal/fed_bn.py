"""FedBN: FedAvg in which BatchNorm stays with the clients.

Source: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
ICLR 2021, section 3 and algorithm 1: all layers but BatchNorm's are averaged; BatchNorm's
parameters and statistics are each client's own.
"""

from typing import Any

from torch import nn

from fedntk.ntk.parts import batch_norm_arrays

from .personalised import PersonalisedStrategy

__all__ = ["FedBN"]


class FedBN(PersonalisedStrategy):
    """FedBN (Li et al. 2021). Clients are :class:`~fedntk.clients.PersonalisedClient`.

    Parameters
    ----------
    network : nn.Module
        Of the clients' architecture; its weights do not matter.
    **options
        Of :class:`PersonalisedStrategy`.

    Raises
    ------
    ValueError
        If the network has no BatchNorm layer, or an argument is out of range.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> sorted(FedBN(network=network).personal)[:2]
    ['1.bias', '1.num_batches_tracked']
    """

    def __init__(self, *, network: nn.Module, **options: Any) -> None:
        personal = batch_norm_arrays(network)
        if not personal:
            raise ValueError(
                "network: expected one with BatchNorm layers, got one without any; without them "
                "FedBN is FedAvg"
            )
        super().__init__(personal=personal, **options)
