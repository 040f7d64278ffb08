"""FedPer: FedAvg in which the last layer stays with the clients.

Source: Arivazhagan et al., *Federated Learning with Personalization Layers*, 2019, algorithms 1
and 2: base layers are averaged, personalization layers are each client's own. Here these are the
last linear layer, the paper's K_P = 1.
"""

from typing import Any

from torch import nn

from fedntk.ntk.parts import head_arrays

from .personalised import PersonalisedStrategy

__all__ = ["FedPer"]


class FedPer(PersonalisedStrategy):
    """FedPer (Arivazhagan et al. 2019). Clients: :class:`~fedntk.clients.PersonalisedClient`.

    Parameters
    ----------
    network : nn.Module
        Of the clients' architecture; its weights do not matter.
    head : str
        Name of the layer that stays with the clients; by default the last ``nn.Linear``.
    **options
        Of :class:`PersonalisedStrategy`.

    Raises
    ------
    ValueError
        If there is no such layer, or an argument is out of range.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> sorted(FedPer(network=network).personal)
    ['2.bias', '2.weight']
    """

    def __init__(self, *, network: nn.Module, head: str = "", **options: Any) -> None:
        super().__init__(personal=head_arrays(network, head), **options)
