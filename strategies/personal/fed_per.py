"""FedPer: FedAvg in which the last layer stays with the clients.

Source: Arivazhagan et al., *Federated Learning with Personalization Layers*, 2019, algorithms 1
and 2: base layers are averaged, personalization layers are each client's own. Here these are the
last linear layer, the paper's K_P = 1.
"""

from torch import nn

from fedntk.ntk.options import argument, option, part
from fedntk.ntk.parts import head_arrays

from ..core.secure import SecureAggregation
from .personalised import PersonalStrategy


class FedPer(PersonalStrategy):
    """FedPer (Arivazhagan et al. 2019). Clients: :class:`~fedntk.clients.PersonalisedClient`.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> sorted(FedPer(network=network).personal)
    ['2.bias', '2.weight']
    """

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    head: str = option(
        "layer that stays with the clients; the last linear one by default", default=""
    )

    secure: SecureAggregation | None = part("clients mask their weights", default=None)

    def prepare(self) -> None:
        """Find the head's arrays."""
        self.personal = head_arrays(self.network, self.head)
